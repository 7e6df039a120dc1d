"""The draft that reads its target: its decoding is its training forward, one that equals its target has everything
accepted, and whatever it proposes, the output is the target's."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import config
from specjax.decode.decoder import Decoder
from specjax.decode.programs import compiled_chunk
from specjax.drafters.glide import BoundGlide, Glide, GlideModel, LoadedGlide, TrainedGlide, load_glide, save_glide
from specjax.errors import ConfigError, ModelError
from specjax.interfaces import Batch, TargetView, TrainingForm
from specjax.models.config import LayerKind, Norm
from specjax.models.families.settings import same_or_each
from specjax.models.hf import LoadedModel, load_model
from specjax.models.rotary import LongRope, Rope
from specjax.models.transformer import Model
from specjax.sampling import fresh_noise
from specjax.testing.toys import context, exact_distribution, neutral_sampling
from specjax.training.init.first_weights import initial_draft
from tests.cases import in_proof, predicted, target_output, transformer
from tests.decode import distributions
from tests.models.test_families import random_params, read
from tests.models.variants import VARIANTS
from tests.training import toys

PROMPTS = [[1, 2, 3], [7], list(range(20)), [5] * 11]
WINDOWS = {"num_layers": 3, "layers": (LayerKind(window=6), LayerKind(), LayerKind(window=9))}
ODD = {
    "num_layers": 3,
    "layers": (LayerKind(rope=Rope(partial=0.5, interleaved=True)), LayerKind(rope=None), LayerKind(window=9)),
    "qk_norm": "each_head",
    "attention_soft_cap": 20.0,
    "attention_scale": 0.2,
    "norm": Norm(placement="sandwich", offset=1.0),
    "qkv_bias": True,
}
KINDS: dict[str, dict[str, Any]] = {"llama": {"num_layers": 3}, "windows": WINDOWS, "odd": ODD}


def target_of(**changes) -> LoadedModel:
    model = transformer(0, **{"max_positions": 256, **changes})
    return LoadedModel(model.spec, model.params)


def glide_of(target: LoadedModel, reads: tuple[int, ...], depths: int = 2, **changes) -> TrainedGlide:
    kinds = same_or_each([target.config.layer(i) for i in reads])
    config = dataclasses.replace(target.config, num_layers=len(reads), layers=kinds, **changes)
    return TrainedGlide(GlideModel(Model(config), reads), depths=depths)


def random_glide(target: LoadedModel, k: int = 3, reads: tuple[int, ...] = (0, 2)) -> Glide:
    drafter = glide_of(target, reads, hidden_size=16, intermediate_size=24)
    params = jax.tree.map(lambda x: x * 3.0, drafter.init_params(jax.random.key(1), target))
    return drafter.to_drafter(params, target, k)


def itself(target: LoadedModel, k: int) -> Glide:
    """A draft that equals its target: all layers of it, each reading itself."""
    every = tuple(range(target.config.num_layers))
    return Glide(LoadedGlide(target.spec, target.params, every), k)


@pytest.mark.parametrize("kind", list(KINDS))
def test_decoding_is_the_training_forward(kind):
    target = target_of(**KINDS[kind])
    drafter = glide_of(target, (0, 2), hidden_size=16, intermediate_size=24)
    params = jax.tree.map(lambda x: x * 3.0, drafter.init_params(jax.random.key(1), target))
    assert_decodes_as_it_trains(drafter, params, target)


# One of every family with gated MLPs.
QUICK_FAMILIES = ("gemma3", "cohere-qk-norm")
FAMILIES = (
    *("llama-tied-biased", "mistral-window", "qwen2-window", "qwen3-window-biased", "gemma", "gemma2", "phi3"),
    *("smollm3-window", "granite", "olmo2-biased"),
)


@pytest.mark.parametrize("name", [*QUICK_FAMILIES, *map(in_proof, FAMILIES)])
def test_one_of_every_gated_family_decodes_as_it_trains_and_comes_back(name, tmp_path):
    settings = VARIANTS[name]
    spec = Model(read(settings))
    target = LoadedModel(spec, random_params(spec.config), family=settings["model_type"])
    sizes = {"hidden_size": 20, "intermediate_size": 24, "num_layers": 2}
    draft = config.Draft(architecture=config.Architecture(**sizes), init="target", kind="glide")
    data = config.Data(path="x", seq_len=8)
    text = np.random.default_rng(0).integers(0, 61, (16, 33)).astype(np.int32)
    initial = initial_draft(config.RunConfig(config.Target(path="x"), data, draft), target, toys.Windows(text))
    drafter: Any = initial.drafter
    assert drafter.reads.kv_layers == (0, spec.config.num_layers - 1)
    assert_decodes_as_it_trains(drafter, initial.params, target)
    drafter.save(initial.params, target, tmp_path / "draft")
    found: Any = specjax.load_drafter(tmp_path / "draft", target)
    assert found.model.spec.config == drafter.glide.model.config
    jax.tree.map(np.testing.assert_array_equal, found.model.params, initial.params)


def test_a_target_of_experts_is_refused_with_what_can_be_done():
    target = LoadedModel(Model(read(VARIANTS["mixtral"])), {}, family="mixtral")
    draft = config.Draft(config.Architecture(hidden_size=16, num_layers=2), init="target", kind="glide")
    run = config.RunConfig(config.Target(path="x"), config.Data(path="x", seq_len=8), draft)
    with pytest.raises(ConfigError, match=r"mixtures of experts; set it to scratch, or train a separate draft"):
        initial_draft(run, target, toys.Windows(np.zeros((4, 9), np.int32)))


def assert_decodes_as_it_trains(drafter: TrainedGlide, params: Any, target: LoadedModel) -> None:
    """At every depth of blocks behind prompts of many lengths, over a cache with stale slots, the logits are those of
    the training forward over the text with the drafts in it."""
    depths, fed, reads = 4, 32, drafter.reads.kv_layers
    drafter, size = drafter.unrolled(depths), target.config.vocab_size
    bound, laid_out = drafter.to_drafter(params, target, depths).bind(target)
    lengths = np.asarray([1, 2, 9, 20, fed - depths])
    rows = len(lengths)
    text = np.random.default_rng(0).integers(0, size, (rows, fed)).astype(np.int32)
    place = jnp.broadcast_to(jnp.arange(fed, dtype=jnp.int32)[None], text.shape)
    empty = target.spec.init_cache(rows, 48)
    cache = jax.jit(target.spec.__call__)(target.params, jnp.asarray(text), place, place, empty).cache
    noise = fresh_noise(jnp.arange(2 * rows, dtype=jnp.uint32).reshape(rows, 2), jnp.asarray(lengths), depths)
    seen = context(text, lengths, neutral_sampling(rows, size), noise)
    view = TargetView({}, cache.view(reads), jnp.asarray(lengths, jnp.int32) - 1)
    draft, _ = jax.jit(bound.draft)(laid_out, view, {}, seen)
    assert draft.logits is not None
    for row, length in enumerate(lengths):
        text[row, length : length + depths] = draft.tokens[row]
    batch = Batch(jnp.asarray(text), jnp.asarray(np.roll(text, -1, axis=1)), jnp.ones(text.shape))
    close = 2e-4 * max(1.0, float(jnp.std(draft.logits)))
    for depth, prediction in enumerate(predicted(drafter, params, target, batch)):
        found = np.asarray(prediction.logits)[np.arange(rows), lengths - 1 + depth]
        np.testing.assert_allclose(found, draft.logits[:, depth], atol=close)
        assert (np.asarray(prediction.weight)[np.arange(rows), lengths - 1 + depth] == 1).all()


@pytest.mark.parametrize("kind", ["windows", "odd", in_proof("llama")])
def test_one_that_equals_its_target_predicts_what_it_predicts_at_every_depth(kind):
    target = target_of(**KINDS[kind])
    drafter = dataclasses.replace(glide_of(target, (0, 1, 2), 4), decay=0.5)
    text = np.random.default_rng(0).integers(0, 61, (2, 24))
    # Two documents in a row, whose positions begin again.
    segments = np.repeat([[0, 1]], 2, 0).repeat(12, 1)
    positions = jnp.asarray(np.tile(np.arange(12), 2)[None].repeat(2, 0), jnp.int32)
    weight = jnp.asarray(np.arange(24)[None].repeat(2, 0) % 5 != 0, jnp.float32)
    several: dict[str, Any] = {"segments": jnp.asarray(segments), "positions": positions}
    for more in ({}, several):
        batch = Batch(jnp.asarray(text, jnp.int32), jnp.asarray(np.roll(text, -1, 1), jnp.int32), weight, **more)
        wanted = target_output(target.spec, target.params, batch).logits
        predictions = predicted(drafter, target.params, target, batch)
        assert [p.share for p in predictions] == pytest.approx([8 / 15, 4 / 15, 2 / 15, 1 / 15])
        for depth, prediction in enumerate(predictions):
            document = np.arange(24) % 12 if more else np.arange(24)
            has_root = document >= depth
            np.testing.assert_array_equal(prediction.weight, np.where(has_root[None], weight, 0.0))
            np.testing.assert_allclose(prediction.logits[:, has_root], wanted[:, has_root], atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "verifier", "temperature"),
    [
        *(("llama", "block", 1.0), ("llama", "coupled", 1.0)),
        *(in_proof("llama", *rule) for rule in (("greedy", 0.0), ("speculative", 1.0), ("top_k", 0.0))),
        *(in_proof("windows", "block", 1.0), in_proof("windows", "greedy", 0.0)),
        *(in_proof("odd", "speculative", 1.0), in_proof("odd", "coupled", 1.0)),
    ],
)
def test_one_that_equals_its_target_is_always_accepted(kind, verifier, temperature):
    target = target_of(**KINDS[kind])
    options: dict[str, Any] = {"max_new_tokens": 90, "temperature": temperature, "seed": 3}
    result = Decoder(target, itself(target, 4), verifier).generate(PROMPTS, **options)
    for stats in result.stats:
        assert stats.accepted == stats.drafted
        assert stats.blocks == 18
    if verifier in ("greedy", "coupled"):
        assert result.tokens == Decoder(target, None, verifier).generate(PROMPTS, **options).tokens


@pytest.mark.parametrize("kind", ["odd", *map(in_proof, ("llama", "windows"))])
def test_greedy_output_is_the_targets(kind):
    """Ragged rows, a prompt of one token, growth of the cache, streaming, and rows that end."""
    target = target_of(**KINDS[kind])
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=100, temperature=0.0).tokens
    decoder = Decoder(target, random_glide(target), "block")
    result = decoder.generate(PROMPTS, max_new_tokens=100, temperature=0.0)
    assert result.tokens == plain
    assert all(0 <= stats.accepted < stats.drafted for stats in result.stats)
    assert [t for e in decoder.stream(PROMPTS[0], max_new_tokens=100, temperature=0.0) for t in e.tokens] == plain[0]
    stops = [plain[0][30]]
    options: dict[str, Any] = {"max_new_tokens": 100, "temperature": 0.0, "stop_token_ids": stops}
    assert decoder.generate(PROMPTS, **options).tokens == Decoder(target).generate(PROMPTS, **options).tokens


def test_a_row_does_not_depend_on_the_others():
    target = target_of(num_layers=3)
    decoder = Decoder(target, random_glide(target), "block")
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0}
    together = decoder.generate(PROMPTS, seed=5, **options)
    for i, prompt in enumerate(PROMPTS):
        rows = [PROMPTS[(i + 1) % 4], prompt, PROMPTS[0], PROMPTS[0]]
        seeds = [1, together.seeds[i], 2, 3]
        again = decoder.generate(rows, seed=seeds, **options)
        assert again.tokens[1] == together.tokens[i]


@pytest.mark.proof
@pytest.mark.parametrize("verifier", ["speculative", "block", "coupled"])
def test_three_tokens_have_exactly_the_targets_joint_distribution(verifier):
    """Through the jitted loop, of a draft that is accepted in part, by chi-square against the enumerated target."""
    target = transformer(0, vocab_size=4, max_positions=64, num_layers=2)
    loaded = LoadedModel(target.spec, target.params)
    drafter = random_glide(loaded, k=2, reads=(0, 1))
    distributions.check_law(Decoder(loaded, drafter, verifier), [1, 2], 3, exact_distribution(target, [1, 2], 3))
    stats = Decoder(loaded, drafter, verifier).generate([[1, 2]] * 64, max_new_tokens=30, temperature=1.0).stats
    assert 0.1 < sum(s.accepted for s in stats) / sum(s.drafted for s in stats) < 0.9


@pytest.mark.parametrize("rows", [1, 3])
def test_no_copy_is_made_of_the_targets_cache(rows):
    """Nothing in the compiled loop has the size of a layer's keys but what names them and what writes a block."""
    target = target_of(num_layers=3)
    decoder = Decoder(target, random_glide(target, k=2), "greedy")
    state = decoder.prefilled([[1, 2, 3]] * rows, max_new_tokens=20, temperature=0.0)
    engine, params = decoder.engine(True)
    text: Any = compiled_chunk(engine).lower(params, state, jnp.int32(100)).compile().as_text()
    keys = state.cache.layers[0].keys.shape
    sizes = {tuple(sorted(shape)) for shape in (keys, (math.prod(keys[:-2]), *keys[-2:]))}
    # What is inside a fusion, or a reduction's function, is computed in registers.
    stored = "".join(part for part in re.split(r"^(?=%|ENTRY)", text, flags=re.M) if not part.startswith("%fused"))
    found = re.findall(r"^\s*(?:ROOT )?%?(\S+?)[.\d]* = f32\[([\d,]+)\]\S* ([\w-]+)\(", stored, re.M)
    made = {
        name if op == "fusion" else op for name, dims, op in found if tuple(sorted(map(int, dims.split(",")))) in sizes
    }
    assert "parameter" in made
    names = {"parameter", "get-tuple-element", "bitcast"}
    assert not [op for op in made - names if "dynamic-update-slice" not in op], made


def test_the_form_of_training_changes_no_number():
    target = target_of(**ODD)
    drafter = glide_of(target, (0, 2), 3, hidden_size=16)
    params = drafter.init_params(jax.random.key(1), target)
    text = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 16)), jnp.int32)
    batch = Batch(text, jnp.roll(text, -1, 1), jnp.ones(text.shape))

    def loss(params, form):
        return sum(jnp.sum(jnp.sin(p.logits)) for p in predicted(drafter.in_training(form), params, target, batch))

    plain, remat = (jax.grad(loss)(params, TrainingForm(remat=remat)) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), plain, remat)
    with pytest.raises(ConfigError, match="scan_layers: the layers of a glide draft read a layer of the target each"):
        drafter.in_training(TrainingForm(scan_layers=True))


def test_it_comes_back_from_its_directory(tmp_path):
    target = target_of(num_layers=3)
    drafter = random_glide(target)
    save_glide(drafter.model, tmp_path / "draft", "a card")
    for found in (specjax.load_drafter(tmp_path / "draft", target, k=3), Glide(str(tmp_path / "draft"), 3)):
        options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 1.0, "seed": 2}
        again, wanted = (Decoder(target, d, "block").generate(PROMPTS, **options) for d in (found, drafter))
        assert again.tokens == wanted.tokens
        assert again.stats == wanted.stats
    assert (tmp_path / "draft" / "README.md").read_text() == "a card"
    with pytest.raises(ModelError, match=r"is a 'glide' draft, no model; specjax\.load_drafter"):
        load_model(tmp_path / "draft")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is no glide draft"),
        ({"reads": [0]}, r"reads=\[0\] for 2 layers"),
        ({"reads": None}, "needs `reads`"),
        ({"layers": 3}, "needs `reads`"),
    ],
)
def test_a_damaged_directory_is_refused(tmp_path, change, message):
    target = target_of(num_layers=3)
    save_glide(random_glide(target).model, tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    (tmp_path / "draft" / "SHA256SUMS").unlink()
    with pytest.raises(ModelError, match=message):
        load_glide(tmp_path / "draft")


def test_what_it_cannot_read_is_refused_with_the_reason():
    target, drafter = target_of(num_layers=3), random_glide(target_of(num_layers=3))
    others = {
        "reads layer 2, and the target has 0 .. 1": target_of(num_layers=2),
        "num_kv_heads=2, and 4 of the target": target_of(num_layers=3, num_kv_heads=4),
        "layer 0 has .* which it reads, .* window 6": target_of(**WINDOWS),
        "depend on the length that a row will reach": target_of(
            num_layers=3, layers=(LayerKind(rope=Rope(scaling=LongRope((1.0,) * 4, (2.0,) * 4, 64, 1.0))),)
        ),
    }
    for message, other in others.items():
        with pytest.raises(ModelError, match=message):
            Decoder(other, drafter)
    assert isinstance(drafter.bind(target).spec, BoundGlide)
