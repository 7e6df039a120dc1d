"""A model whose layers run as a loop decodes what it decodes layer by layer, bit for bit."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import backend
from specjax.decode.decoder import Decoder
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.glide import GlideModel, TrainedGlide
from specjax.models import kernels
from specjax.models.attention.stored import LayerKV
from specjax.models.config import Experts, LayerKind
from specjax.models.decode_layout import DecodeLayout
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.kernels import Narrow, Transposed
from specjax.models.kernels.quantised import SCHEMES
from specjax.testing.toys import ToyModel
from tests.cases import in_proof, transformer

PROMPTS = [[1, 2, 3], [7], list(range(20)), [5] * 11]
MANY = [[i + 1, 2] for i in range(backend.UNROLLED_ROWS_CPU + 1)]


def narrow(model: Any) -> Any:
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), model.params)
    return dataclasses.replace(model, params=rounded)


def target(looped: bool, monkeypatch, **changes) -> ToyModel:
    """Of random weights that bfloat16 holds; its layers run as a loop, or one by one."""
    monkeypatch.setattr(backend, "LEAST_SCANNED", 3 if looped else 100)
    model = narrow(transformer(0, num_layers=3, **changes))
    assert model.layout().spec.looped is looped
    return model


def test_the_layers_of_a_loop_keep_their_order(monkeypatch):
    """Also if the parameters have another, as those of a file may have."""
    monkeypatch.setattr(backend, "LEAST_SCANNED", 2)
    model = transformer(0, num_layers=12)
    order = sorted(model.params["layers"], key=str)
    model.params["layers"] = {i: model.params["layers"][i] for i in order}
    layout = model.layout()
    assert layout.spec.looped
    jax.tree.map(np.testing.assert_array_equal, layout.originals(), model.params)
    tokens = np.arange(9, dtype=np.int32)[None]
    found = model.logits(tokens)
    monkeypatch.setattr(backend, "LEAST_SCANNED", 100)
    np.testing.assert_array_equal(found, transformer(0, num_layers=12).logits(tokens))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("rows", [1, 3, len(MANY)])
def test_each_row_is_written_where_it_ends(rows, layer, together):
    old = LayerKV(jnp.zeros((2, 2 * rows, 9, 4)), jnp.zeros((2, 2 * rows, 4, 9)))
    start = jnp.arange(rows, dtype=jnp.int32) * 5 % 7
    keys = jax.random.normal(jax.random.key(0), (rows, 2, 2, 4))
    given = old if layer is not None else jax.tree.map(lambda x: x[0], old)
    found = given.write(start, LayerKV.of(keys, -keys), together, layer)
    expected = np.zeros((2, 2 * rows, 9, 4), np.float32)
    for row in range(rows):
        for head in range(2):
            expected[1, 2 * row + head, start[row] : start[row] + 2] = keys[row, :, head]
    expected = expected if layer is not None else expected[1]
    np.testing.assert_array_equal(found.keys, expected)
    np.testing.assert_array_equal(found.values, -expected.swapaxes(-1, -2))


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS, in_proof(MANY)], ids=["one", "few", "many"])
@pytest.mark.parametrize("cache", [None, "int8"])
def test_it_decodes_the_same(prompts, cache, monkeypatch):
    """Past the first bucket of the cache, with a draft and without, sampled and greedy."""
    found = []
    for looped in (False, True):
        model = target(looped, monkeypatch)
        model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, cache_dtype=cache))
        draft = narrow(transformer(1))
        for drafter in (None, DraftModel(draft, 3)):
            made = Decoder(model, drafter).generate(
                prompts, max_new_tokens=70, temperature=[0.0, 0.8] * (len(prompts) // 2) + [0.8] * (len(prompts) % 2)
            )
            found.append(made.tokens)
    assert found[:2] == found[2:]


def test_rows_that_come_and_go_get_the_same(monkeypatch):
    requests = [{"prompt": prompt, "max_new_tokens": 5 + 3 * i, "seed": i} for i, prompt in enumerate(PROMPTS)]
    found = []
    for looped in (False, True):
        decoder = Decoder(target(looped, monkeypatch), DraftModel(narrow(transformer(1)), 2))
        done = dict(decoder.generate_each(requests, rows=2, most_tokens=64))
        found.append([done[i].tokens for i in range(len(requests))])
    assert found[0] == found[1]


def test_a_draft_that_reads_its_keys_and_values_proposes_the_same(monkeypatch):
    found = []
    for looped in (False, True):
        model = target(looped, monkeypatch)
        loaded = LoadedModel(model.spec, model.params)
        one = transformer(2, num_layers=1)
        made = TrainedGlide(GlideModel(one.spec, (2,))).to_drafter(one.params, loaded, 3)
        result = Decoder(loaded, made).generate(PROMPTS, max_new_tokens=24, temperature=0.0)
        found.append((result.tokens, result.stats))
    assert found[0] == found[1]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 200])
def test_a_kernel_among_those_of_all_layers_is_the_kernel_of_its_layer(rows, wide):
    rng = np.random.default_rng(0)
    matrices = [jnp.asarray(rng.normal(size=(12, 24)), jnp.bfloat16) for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(rows, 24)), jnp.float32)
    for kind, values in ((Narrow, matrices), (Transposed, [m.astype(jnp.float32) for m in matrices])):
        alone = [kind(value) for value in values]
        together = kernels.together(
            [{"kernel": kernel, "scale": value[0]} for kernel, value in zip(alone, values, strict=True)]
        )
        for i, kernel in enumerate(alone):
            layer = kernels.layer_of(together, i)
            np.testing.assert_array_equal(layer["kernel"](x, wide), kernel(x, wide))
            np.testing.assert_array_equal(layer["kernel"].dense(), kernel.dense())
            np.testing.assert_array_equal(layer["scale"], values[i][0])


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (LayerKind(), LayerKind(window=4), LayerKind())},
        {"layers": (LayerKind(window=4),)},
        {"experts": Experts(4, 2, 8, True)},
    ],
    ids=["other layers", "a window", "experts"],
)
def test_what_a_loop_would_copy_or_cannot_do_runs_layer_by_layer(changes, monkeypatch):
    monkeypatch.setattr(backend, "LEAST_SCANNED", 2)
    model = transformer(0, num_layers=3, **changes)
    assert not model.layout().spec.looped
    Decoder(model).generate(PROMPTS[:1], max_new_tokens=4)


def test_kernels_in_few_bits_run_layer_by_layer(monkeypatch):
    monkeypatch.setattr(backend, "LEAST_SCANNED", 2)
    model = transformer(0, num_layers=3)
    model.params["layers"][1]["mlp"]["down_proj"]["kernel"] = kernels.Quantised.of(
        model.params["layers"][1]["mlp"]["down_proj"]["kernel"], SCHEMES["int8"]
    )
    assert not DecodeLayout.of(model.spec, model.params).spec.looped


def test_a_file_in_bfloat16_decodes_the_same_when_it_stays_so(tmp_path, monkeypatch):
    model = target(True, monkeypatch)
    save_model(LoadedModel(model.spec, model.params), tmp_path / "model", dtype="bfloat16")
    whole, once = load_model(tmp_path / "model"), load_model(tmp_path / "model", decoding_only=True)
    assert once.layout().spec.looped
    found, expected = (Decoder(m).generate(PROMPTS, max_new_tokens=12).tokens for m in (once, whole))
    assert found == expected
    jax.tree.map(np.testing.assert_array_equal, once.params, whole.params)


def test_no_layer_of_a_model_that_only_decodes_is_there_twice(monkeypatch):
    model = target(True, monkeypatch, tie_embeddings=False)
    model = dataclasses.replace(model)  # without its layout
    kernel = weakref.ref(model.params["layers"][0]["mlp"]["up_proj"]["kernel"])
    model.free_originals()
    assert kernel() is None
    assert model.layout().spec.looped
