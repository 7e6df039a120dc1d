"""Kernels of few bits: what they are, what they multiply to, and models made of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.errors import ConfigError, ModelError
from specjax.formats.loading import load_drafter
from specjax.models import kernels
from specjax.models.hf import LoadedModel, load_model, quantize_model, save_model
from specjax.models.kernels.quantised import SCHEMES, Quantised
from specjax.models.sharding import mesh_of
from specjax.training.init.first_weights import SharedEnds
from tests.cases import in_proof, transformer

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32}
PROMPTS = [[1, 2, 3], [7], list(range(20))]
FORMS = [pytest.param(name, turned, id=f"{name}-{turned}") for name in SCHEMES for turned in (True, False)]


def matrix(inputs: int = 256, outputs: int = 24) -> jax.Array:
    """One output is all zero."""
    return jax.random.normal(jax.random.key(0), (inputs, outputs)).at[:, 3].set(0.0)


def quantised(name: str, turned: bool, monkeypatch, of: jax.Array | None = None) -> Quantised:
    monkeypatch.setattr(backend, "transposes_kernels", lambda: turned)
    return Quantised.of(matrix() if of is None else of, SCHEMES[name])


@pytest.mark.parametrize(("name", "turned"), FORMS)
def test_numbers_are_the_nearest_and_take_their_bits(name, turned, monkeypatch):
    found, w = quantised(name, turned, monkeypatch), np.asarray(matrix())
    scheme = SCHEMES[name]
    groups = scheme.groups(256)
    assert found.scale.shape == (groups, 24)
    assert found.size == w.size
    assert found.nbytes == w.size * scheme.bits // 8 + 4 * groups * 24
    scale, dense = np.repeat(np.asarray(found.scale), 256 // groups, axis=0), np.asarray(found.dense())
    inside = np.abs(w) <= scale * scheme.largest * 1.0001
    assert (np.abs(dense - w)[inside] <= 0.5001 * scale[inside]).all()
    np.testing.assert_allclose(dense[~inside], (np.sign(w) * scale * scheme.largest)[~inside], rtol=1e-6)
    assert (dense[:, 3] == 0).all()
    if name == "int8":
        assert inside.all()
    else:  # some are cut, where that costs less than a coarser scale
        assert np.square(dense - w).mean() < 0.016


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 17, 300])
@pytest.mark.parametrize(("name", "turned"), FORMS)
def test_it_multiplies_as_the_matrix_that_it_is(name, turned, tokens, monkeypatch):
    found = quantised(name, turned, monkeypatch)
    x = jax.random.normal(jax.random.key(tokens), (tokens, 256))
    expected = np.asarray(x) @ np.asarray(found.dense())
    np.testing.assert_allclose(jax.jit(lambda q, x: q(x))(found, x), expected, atol=2e-4)
    low = x.astype(jnp.bfloat16)
    wide = jax.jit(lambda q, x: q(x, wide=True))(found, low)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, np.asarray(low.astype(jnp.float32)) @ np.asarray(found.dense()), atol=0.3)
    assert jax.jit(lambda q, x: q(x))(found, low).dtype == jnp.bfloat16


@pytest.mark.parametrize(("name", "turned"), FORMS)
def test_what_groups_do_not_divide_shares_one_scale(name, turned, monkeypatch):
    of = matrix(99, 5)
    found = quantised(name, turned, monkeypatch, of)
    assert found.scale.shape == (1, 5)
    x = jax.random.normal(jax.random.key(1), (3, 99))
    np.testing.assert_allclose(found(x), np.asarray(x) @ np.asarray(found.dense()), atol=2e-4)


@pytest.mark.parametrize(("name", "turned"), FORMS)
def test_joined_they_come_apart_again(name, turned, monkeypatch):
    parts = [quantised(name, turned, monkeypatch, matrix(256, outputs) * outputs) for outputs in (8, 24)]
    whole = kernels.join(parts)
    assert isinstance(whole, Quantised)
    x = jax.random.normal(jax.random.key(1), (2, 256))
    np.testing.assert_allclose(whole(x), np.concatenate([part(x) for part in parts], axis=1), rtol=1e-5, atol=1e-3)
    for part, again in zip(parts, kernels.split(whole, (8, 24)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, part, again)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    where = tmp_path_factory.mktemp("models") / "target"
    toy = transformer(0, tie_embeddings=False, **SIZES)
    save_model(LoadedModel(toy.spec, toy.params), where)
    return where


def dense(model: LoadedModel) -> LoadedModel:
    """With the matrices that its kernels are."""
    params = jax.tree.map(
        lambda x: x.dense() if isinstance(x, Quantised) else x, model.params, is_leaf=lambda x: isinstance(x, Quantised)
    )
    return dataclasses.replace(model, params=params)


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("int4", 1.0), in_proof("int8", 0.0), in_proof("int8", 1.0), in_proof("int4", 0.0)],
)
def test_a_quantised_target_is_the_model_of_its_rounded_weights(directory, name, temperature):
    """Plainly, with a draft, laid out and not; greedily and sampled."""
    target = load_model(directory, quantize=name)
    assert target.name == f"target-{name}"
    held = [leaf for leaf in kernels.leaves_of(target.params) if isinstance(leaf, Quantised)]
    assert len(held) == 2 * 7 + 1  # projections of two layers, and the head
    tokens = np.asarray([[1, 2, 3, 4]])
    np.testing.assert_allclose(target.logits(tokens), dense(target).logits(tokens), atol=2e-3)
    full = load_model(directory)
    assert np.abs(np.asarray(target.logits(tokens) - full.logits(tokens))).max() > 0.01
    options = {"max_new_tokens": 16, "temperature": temperature, "ignore_eos": True}
    plain, rounded, drafted = (
        Decoder(model, drafter, "coupled", "fixed").generate(PROMPTS, **options).tokens  # pyright: ignore
        for model, drafter in ((target, None), (dense(target), None), (target, DraftModel(full, 3)))
    )
    assert plain == rounded == drafted


def test_a_target_is_its_own_draft_in_few_bits(directory):
    """Exact, and mostly accepted."""
    target = load_model(directory)
    draft = quantize_model(target, "int8")
    assert draft.params["embedding"] is target.params["embedding"]
    found = Decoder(target, DraftModel(draft, 3), "coupled", "fixed").generate(
        PROMPTS, max_new_tokens=24, temperature=1.0, ignore_eos=True
    )
    plain = Decoder(target, None, "coupled").generate(PROMPTS, max_new_tokens=24, temperature=1.0, ignore_eos=True)
    assert found.tokens == plain.tokens
    assert sum(s.accepted for s in found.stats) > 0.7 * sum(s.drafted for s in found.stats)
    by_path = load_drafter(directory, target, 3, quantize="int8")
    again = Decoder(target, by_path, "coupled", "fixed").generate(
        PROMPTS, max_new_tokens=24, temperature=1.0, ignore_eos=True
    )
    assert [s.accepted for s in again.stats] == [s.accepted for s in found.stats]


def test_a_tied_head_is_laid_out_in_eight_bits():
    toy = transformer(0, **SIZES)
    model = quantize_model(LoadedModel(toy.spec, toy.params), "int4")
    layout = model.layout()
    head = layout.params["head"]["kernel"]
    assert (head.bits, head.size) == (8, toy.params["embedding"].size)
    assert kernels.counted(layout.params)[0] == model.parameter_count + head.size
    jax.tree.map(np.testing.assert_array_equal, layout.originals(), model.params)


def test_it_lies_over_a_mesh_as_its_matrix_does(directory):
    mesh = jax.make_mesh((4,), ("tensor",))
    one, many = load_model(directory, quantize="int8"), load_model(directory, quantize="int8", mesh=mesh)
    assert mesh_of(many.params) is not None
    options = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    assert Decoder(many).generate(PROMPTS, **options).tokens == Decoder(one).generate(PROMPTS, **options).tokens  # pyright: ignore
    held = next(leaf for leaf in kernels.leaves_of(many.params) if isinstance(leaf, Quantised))
    assert len(held.value.sharding.device_set) == 4


def test_what_needs_the_weights_as_stored_refuses(directory, tmp_path):
    model = load_model(directory, quantize="int8")
    told = "needs the model's weights as they are stored; load it without quantize"
    with pytest.raises(ModelError, match=f"save_model: {told}"):
        save_model(model, tmp_path / "again")
    with pytest.raises(ModelError, match=f"quantize_model: {told}"):
        quantize_model(model, "int4")
    with pytest.raises(ModelError, match="quantize='int3' is unknown; use one of int8, int4, or None"):
        load_model(directory, quantize="int3")
    with pytest.raises(ConfigError, match="quantize='int8': is for separate models and drafts"):
        load_drafter(directory, model, kind={"kind": "glide"}, quantize="int8")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8"])
def test_a_checkpoint_stored_in_few_bits_is_refused_by_name(llama, method):
    path = llama.write(quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ModelError, match=rf"stored quantised \({method}\).*load the checkpoint that it was made from"):
        load_model(path)


def test_a_draft_shares_a_quantised_head_as_it_is(directory):
    target = load_model(directory, quantize="int4")
    shared = SharedEnds(target.spec, shared=("embedding", "head"))
    own = {name: value for name, value in dense(target).params.items() if name not in shared.shared}
    whole = shared.complete(own, target.params)
    assert whole["head"]["kernel"] is target.params["head"]["kernel"]
    assert whole["embedding"].dtype == jnp.float32
