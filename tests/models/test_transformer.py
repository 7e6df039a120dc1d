"""The forward pass against a numpy Llama, and every cache path against the pass without a cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.interfaces import Reads
from specjax.models.cache import grow
from specjax.models.config import LayerKind, ModelConfig
from specjax.models.hf import LoadedModel, load_model
from specjax.models.products import attend
from specjax.models.rotary import Rope, rotary_table, rotate
from specjax.models.transformer import Model

CONFIG = ModelConfig(
    vocab_size=37,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=64,
    layers=(LayerKind(Rope(50.0)),),
    tie_embeddings=False,
)
NEAR = 3e-5  # of logits up to 6, in sums of another order: 1.3e-5 on a machine of narrower vectors
SLOTS = 32
ROWS = 3  # shapes are shared between tests where possible: compiling is most of the time


class Jitted:
    """`Model`, compiled: the same call, in a fraction of the time."""

    def __init__(self, model: Model):
        self.init, self.init_cache = model.init, model.init_cache
        self.call = jax.jit(model, static_argnames="reads")

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


@pytest.fixture(scope="module")
def model():
    return Jitted(Model(CONFIG))


@pytest.fixture(scope="module")
def params(model):
    # Attention further from uniform than at initialisation, so that no mistake hides; embeddings of ordinary size,
    # so that rounding is not amplified by the first norm.
    params = jax.tree.map(lambda x: x * 1.5, model.init(jax.random.key(1)))
    return {**params, "embedding": params["embedding"] * 20.0}


def random_tokens(seed: int, batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (batch, length)).astype(np.int32)


def arange_rows(batch: int, length: int) -> np.ndarray:
    return np.broadcast_to(np.arange(length, dtype=np.int32), (batch, length))


def full_logits(model, params, tokens: np.ndarray) -> np.ndarray:
    """Without a cache; padded, so that all lengths share one compilation (`test_a_later_token_...` covers that)."""
    padded = np.pad(tokens, ((0, 0), (0, SLOTS - tokens.shape[1])))
    logits = model(params, jnp.asarray(padded), jnp.asarray(arange_rows(*padded.shape))).logits
    return np.asarray(logits)[:, : tokens.shape[1]]


def poisoned_cache(model, batch: int, poison: float = 1e9):
    return jax.tree.map(lambda x: jnp.full_like(x, poison), model.init_cache(batch, SLOTS))


def prefilled(model, params, tokens: np.ndarray, lengths: np.ndarray, poison: float = 1e9):
    """A cache that holds ``tokens[b, :lengths[b]]``; the padding of shorter rows leaves stale entries behind it."""
    padded = SLOTS // 2
    fed = np.where(np.arange(padded) < lengths[:, None], tokens[:, :padded], 0)
    at = jnp.asarray(arange_rows(*fed.shape))
    return model(params, jnp.asarray(fed), at, at, poisoned_cache(model, len(tokens), poison)).cache


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 6},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 0.3},
        {"rope_theta": 10_000.0, "num_hidden_layers": 1},
    ],
    ids=str,
)
def test_logits_equal_a_float64_numpy_llama(llama, shape):
    loaded = load_model(llama.write(**shape))
    tokens = random_tokens(0, 2, 11)
    expected = llama.reference(tokens)
    assert expected.std() > 0.5
    np.testing.assert_allclose(loaded.logits(tokens), expected, rtol=0, atol=NEAR)


def test_rotary_pairs_feature_i_with_i_plus_half_as_hugging_face_does():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 7, 7, 40]], np.int32)
    angle = positions[..., None] / 50.0 ** (np.arange(0, 8, 2) / 8)
    cos, sin = (np.concatenate([f(angle), f(angle)], axis=-1)[:, :, None] for f in (np.cos, np.sin))
    expected = x * cos + np.concatenate([-x[..., 4:], x[..., :4]], axis=-1) * sin
    got = rotate(jnp.asarray(x), rotary_table(jnp.asarray(positions), Rope(50.0), 8, jnp.float32))
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_later_token_does_not_change_earlier_logits(model, params):
    tokens = random_tokens(1, ROWS, 10)
    changed = tokens.copy()
    changed[:, 6] = (changed[:, 6] + 1) % CONFIG.vocab_size
    before, after = full_logits(model, params, tokens), full_logits(model, params, changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (np.abs(before[:, 6:] - after[:, 6:]).max(axis=-1) > 1e-4).all()


@pytest.mark.parametrize("block", [1, 3, 8])
def test_decoding_in_blocks_at_ragged_positions_equals_the_full_forward(model, params, block):
    tokens, lengths = random_tokens(2, ROWS, 30), np.array([1, 9, 5])
    expected = full_logits(model, params, tokens)
    cache = prefilled(model, params, tokens, lengths)
    for start in range(0, 16, block):
        at = (lengths[:, None] + start + np.arange(block)).astype(np.int32)
        fed = np.take_along_axis(tokens, at, axis=1)
        out = model(params, jnp.asarray(fed), jnp.asarray(at), jnp.asarray(at), cache)
        cache = out.cache
        np.testing.assert_allclose(out.logits, np.take_along_axis(expected, at[..., None], axis=1), rtol=0, atol=NEAR)


def test_a_rejected_block_leaves_no_trace_once_overwritten(model, params):
    tokens, lengths = random_tokens(3, ROWS, 20), np.array([4, 9, 1])
    at = jnp.asarray(lengths[:, None] + np.arange(8), jnp.int32)
    cache = prefilled(model, params, tokens, lengths)
    rejected = model(params, jnp.asarray(random_tokens(99, ROWS, 8)), at, at, cache).cache
    fed = jnp.asarray(np.take_along_axis(tokens, np.asarray(at), axis=1))
    again = model(params, fed[:, :3], at[:, :3], at[:, :3], rejected).logits
    np.testing.assert_array_equal(again, model(params, fed[:, :3], at[:, :3], at[:, :3], cache).logits)


@pytest.mark.parametrize("tree", [False, True])
def test_unwritten_slots_do_not_influence_the_result(model, params, tree):
    tokens, lengths = random_tokens(4, ROWS, 20), np.array([3, 8, 1])
    at = jnp.asarray(lengths[:, None] + np.arange(3), jnp.int32)
    mask = jnp.broadcast_to(jnp.eye(3, dtype=bool)[None], (ROWS, 3, 3)) if tree else None
    fed = jnp.asarray(random_tokens(5, ROWS, 3))
    clean, poisoned = (
        model(params, fed, at, at, prefilled(model, params, tokens, lengths, poison), mask) for poison in (0.0, 1e9)
    )
    np.testing.assert_array_equal(clean.logits, poisoned.logits)


PARENTS = (-1, 0, 0, 1, 1, 2)  # a root, two children, two grandchildren of the first and one of the second
DEPTHS = (0, 1, 1, 2, 2, 2)


def ancestry() -> list[list[int]]:
    paths = []
    for node, parent in enumerate(PARENTS):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


@pytest.mark.parametrize("lengths", [[0, 0, 0], [7, 3, 1]], ids=["no cache", "ragged cache"])
def test_every_node_of_a_tree_sees_exactly_its_own_path(model, params, lengths):
    prompt, nodes, lengths = random_tokens(6, ROWS, 20), random_tokens(7, ROWS, len(PARENTS)), np.array(lengths)
    mask = np.zeros((ROWS, len(PARENTS), len(PARENTS)), bool)
    for node, path in enumerate(ancestry()):
        mask[:, node, path] = True
    positions = jnp.asarray(lengths[:, None] + np.array(DEPTHS), jnp.int32)
    slots, cache = None, None
    if lengths.any():
        slots = jnp.asarray(lengths[:, None] + np.arange(len(PARENTS)), jnp.int32)
        cache = prefilled(model, params, prompt, lengths)
    got = model(params, jnp.asarray(nodes), positions, slots, cache, jnp.asarray(mask)).logits
    for node, path in enumerate(ancestry()):
        sequences = np.zeros((ROWS, 12), np.int32)
        for row, length in enumerate(lengths):
            sequences[row, : length + len(path)] = [*prompt[row, :length], *nodes[row, path]]
        expected = full_logits(model, params, sequences)[np.arange(ROWS), lengths + len(path) - 1]
        np.testing.assert_allclose(got[:, node], expected, rtol=0, atol=NEAR)


def test_a_row_does_not_depend_on_its_neighbours(model, params):
    tokens, lengths = random_tokens(8, ROWS, 20), np.array([6, 2, 11])
    at = jnp.asarray(lengths[:, None] + np.arange(3), jnp.int32)
    fed = jnp.asarray(np.take_along_axis(tokens, np.asarray(at), axis=1))
    cache = prefilled(model, params, tokens, lengths)
    together = model(params, fed, at, at, cache).logits
    swapped = jax.tree.map(lambda x: x[::-1], cache)
    np.testing.assert_allclose(model(params, fed[::-1], at[::-1], at[::-1], swapped).logits[::-1], together, atol=1e-6)
    alone = model(params, fed[1:2], at[1:2], at[1:2], jax.tree.map(lambda x: x[1:2], cache)).logits
    np.testing.assert_allclose(alone[0], together[1], rtol=0, atol=NEAR)


def test_a_grown_cache_gives_the_same_logits(model, params):
    tokens, lengths = random_tokens(9, ROWS, 20), np.array([6, 3, 1])
    at = jnp.asarray(lengths[:, None] + np.arange(3), jnp.int32)
    fed = jnp.asarray(np.take_along_axis(tokens, np.asarray(at), axis=1))
    cache = prefilled(model, params, tokens, lengths)
    grown = grow(jax.tree.map(jnp.copy, cache), 2 * SLOTS)
    assert grown.num_slots == 2 * SLOTS
    np.testing.assert_allclose(
        model(params, fed, at, at, grown).logits, model(params, fed, at, at, cache).logits, rtol=0, atol=1e-5
    )


def test_asking_for_some_rows_gives_those_rows_of_all_logits(model, params):
    tokens = jnp.asarray(random_tokens(10, ROWS, 6))
    positions, rows = jnp.asarray(arange_rows(ROWS, 6)), jnp.array([[5, 0], [2, 3], [1, 1]])
    everything = model(params, tokens, positions).logits
    some = model(params, tokens, positions, rows=rows).logits
    np.testing.assert_allclose(some, jnp.take_along_axis(everything, rows[..., None], axis=1), rtol=0, atol=1e-6)


def test_hidden_states_are_the_residual_streams_and_end_with_the_normed_one(model, params):
    tokens, positions = jnp.asarray(random_tokens(11, ROWS, 6)), jnp.asarray(arange_rows(ROWS, 6))
    out = model(params, tokens, positions, reads=Reads(hidden_layers=(2, 0, 1)))
    last, entering, middle = out.hidden
    final = out.final
    assert np.abs(np.asarray(last - middle)).max() > 1e-2
    np.testing.assert_array_equal(entering, params["embedding"][tokens])
    assert np.abs(np.asarray(middle - entering)).max() > 1e-2
    np.testing.assert_allclose(final @ params["head"]["kernel"], out.logits, rtol=0, atol=NEAR)


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16",) * 2, ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_model_computes_in_its_dtype_whatever_its_weights_are_stored_in(model, params, stored, dtype):
    tokens, positions = jnp.asarray(random_tokens(12, ROWS, 8)), jnp.asarray(arange_rows(ROWS, 8))
    exact = model(params, tokens, positions).logits
    out = Jitted(Model(CONFIG, dtype))(jax.tree.map(lambda x: x.astype(stored), params), tokens, positions)
    assert out.final.dtype == dtype
    low = out.logits
    assert low.dtype == jnp.float32
    error = np.asarray(low) - np.asarray(exact)
    assert 0 < error.std() < 0.1 * np.asarray(exact).std()


@pytest.mark.parametrize("tied", [True, False])
def test_the_two_best_logits_of_a_bfloat16_model_never_tie(tied):
    """Rounded to bfloat16, they are equal at 2-4% of these positions."""
    spec = Model(dataclasses.replace(CONFIG, vocab_size=512, hidden_size=32, tie_embeddings=tied))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), spec.init(jax.random.key(0)))
    low = LoadedModel(dataclasses.replace(spec, dtype="bfloat16"), low)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 64)).astype(np.int32)
    second, best = np.moveaxis(np.sort(low.logits(tokens), axis=-1)[..., -2:], -1, 0)
    assert np.count_nonzero(best == second) == 0


def test_attention_in_bfloat16_keeps_the_digits_of_its_scores():
    """Scores reach 60 here, where bfloat16 has one number in four: its output would be off by 0.025."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(4 * rng.normal(size=shape), jnp.bfloat16) for shape in ((1, 8, 2, 8), (2, 16, 8)))
    v, visible = jnp.asarray(rng.normal(size=(2, 8, 16)), jnp.bfloat16), jnp.ones((1, 8, 16), bool)
    low, exact = (
        attend(q, k, v, visible),
        attend(q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32), visible),
    )
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), exact, rtol=0, atol=0.01)


def test_gradients_of_a_bfloat16_model_are_those_of_float32_but_for_rounding(model, params):
    tokens, positions = jnp.asarray(random_tokens(13, ROWS, 8)), jnp.asarray(arange_rows(ROWS, 8))

    def loss(params, model):
        log_probs = jax.nn.log_softmax(model(params, tokens, positions).logits, axis=-1)
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[..., None], axis=-1))

    exact = jax.grad(loss)(params, model)
    low = jax.grad(loss)(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), Jitted(Model(CONFIG, "bfloat16")))
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(low), strict=True):
        assert b.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(b, np.float32) - a) < 0.3 * np.linalg.norm(a)


@pytest.mark.parametrize(
    ("changes", "message"), [({"num_kv_heads": 3}, "num_kv_heads=3"), ({"head_dim": 5}, "head_dim=5")]
)
def test_an_impossible_architecture_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
