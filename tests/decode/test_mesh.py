"""Decoding over four devices: the tokens of one device, caches where their heads are, and no message that the weights'
places do not ask for."""

from __future__ import annotations

import collections
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax.decode.decoder import Decoder
from specjax.decode.programs import compiled_chunk
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.glide import Glide, LoadedGlide
from specjax.drafters.ngram import NGram
from specjax.models import cache as cache_lib
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.testing.inhabitants import Tree
from tests.cases import in_proof, transformer

SIZES: dict[str, Any] = {"vocab_size": 64, "num_kv_heads": 4, "num_heads": 8, "head_dim": 8, "tie_embeddings": False}
PROMPTS = [[1, 2, 3], [7], list(range(20)), [5] * 11]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
MESHES = {
    "tensor": {"tensor": 4},
    "data": {"data": 4},
    "both": {"data": 2, "tensor": 2},
    "stored": {"fsdp": 2, "tensor": 2},
}
_TALK = r"(all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter|infeed|outfeed|send|recv)(?:-start)?\("


def mesh_of(name: str) -> jax.sharding.Mesh:
    axes = MESHES[name]
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


def saved_models(where: Path) -> Path:
    """``where``, with a target and a draft that is its first layer."""
    for name, toy in (("target", transformer(0, **SIZES)), ("draft", transformer(0, num_layers=1, **SIZES))):
        save_model(LoadedModel(toy.spec, toy.params), where / name)
    return where


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return saved_models(tmp_path_factory.mktemp("models"))


def drafter_of(kind: str, directories, target: LoadedModel, mesh=None) -> Any:
    if kind == "glide":
        return Glide(LoadedGlide(*_plain(target), (0, 1)), 3)
    draft: Any = load_model(directories / "draft", mesh=mesh)
    return {"plain": None, "ngram": NGram(3), "draft": DraftModel(draft, 3), "tree": Tree(draft, 2, 2)}[kind]


def _plain(target: LoadedModel) -> tuple[Any, Any]:
    """A glide draft of the target's own weights, on one device."""
    return target.spec, jax.tree.map(np.asarray, target.params)


# Each kind, each mesh, each temperature.
QUICK = [("tensor", "plain", 0.0), ("tensor", "draft", 1.0), ("both", "glide", 1.0)]
ALL = list(itertools.product(("tensor", "both"), ("plain", "draft", "glide"), (0.0, 1.0)))


@pytest.mark.parametrize(
    ("name", "kind", "temperature"),
    [
        *QUICK,
        *(in_proof(*case) for case in ALL if case not in QUICK),
        *(in_proof("both", kind, temperature) for kind in ("ngram", "tree") for temperature in (0.0, 1.0)),
        *(in_proof("data", "draft", temperature) for temperature in (0.0, 1.0)),
        *(in_proof("stored", "glide", temperature) for temperature in (0.0, 1.0)),
    ],
)
def test_tokens_are_those_of_one_device(directories, name, kind, temperature):
    """The draft whole on every device."""
    verifier = "coupled" if kind == "tree" else "speculative"
    one, many = (load_model(directories / "target", mesh=mesh) for mesh in (None, mesh_of(name)))
    found, expected = (
        Decoder(model, drafter_of(kind, directories, model), verifier, "fixed").generate(
            PROMPTS, temperature=temperature, **OPTIONS
        )
        for model in (many, one)
    )
    assert found.tokens == expected.tokens
    assert [stats.accepted for stats in found.stats] == [stats.accepted for stats in expected.stats]


def test_a_draft_may_be_split_as_well(directories):
    mesh = mesh_of("tensor")
    target = load_model(directories / "target", mesh=mesh)
    options = {"temperature": 1.0, **OPTIONS}
    whole, split = (
        Decoder(target, drafter_of("draft", directories, target, mesh=m), controller="fixed") for m in (None, mesh)
    )
    assert split.generate(PROMPTS, **options).tokens == whole.generate(PROMPTS, **options).tokens
    for decoder, spec in ((whole, PartitionSpec()), (split, PartitionSpec(None, "tensor"))):
        state = decoder.prefilled(PROMPTS, max_new_tokens=4, temperature=1.0)
        keys = cache_lib.first(state.drafter).layers[0].keys
        assert keys.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, spec), keys.ndim)


def tokens_of(models: Path, mesh: str | None = None) -> list[list[list[int]]]:
    """Of both temperatures, over a mesh of `MESHES` or on one device: tests/training/test_scale.py compares them in two
    processes."""
    target = load_model(models / "target", mesh=None if mesh is None else mesh_of(mesh))
    decoder = Decoder(target, drafter_of("draft", models, target), controller="fixed")
    return [decoder.generate(PROMPTS, temperature=t, **OPTIONS).tokens for t in (0.0, 1.0)]


def talk(decoder: Decoder, rows: int = 4) -> tuple[dict[str, int], Any]:
    """What the devices say to each other in a compiled loop, and its first state."""
    engine, params = decoder.engine(True, rows)
    state = decoder.prefilled(PROMPTS[:rows], max_new_tokens=8, temperature=0.0)
    text: Any = compiled_chunk(engine).lower(params, state, np.int32(5)).compile().as_text()
    assert "callback" not in text
    return dict(collections.Counter(re.findall(_TALK, text))), state


@pytest.mark.parametrize("kind", ["plain", "draft", "glide"])
def test_one_device_talks_to_nobody(directories, kind):
    target = load_model(directories / "target")
    assert talk(Decoder(target, drafter_of(kind, directories, target)))[0] == {}


def test_devices_talk_about_sums_and_logits_alone(directories):
    """One sum for what is embedded, two a layer, one exchange of logits a pass; the draft, whole on every device, is
    silent. And the cache lies as its heads do."""
    target = load_model(directories / "target", mesh=mesh_of("tensor"))
    layers = target.config.num_layers
    for kind in ("plain", "draft"):
        decoder = Decoder(target, drafter_of(kind, directories, target), controller="fixed")
        found, state = talk(decoder)
        assert found == {"all-reduce": 2 * layers + 1, "all-gather": 1}
        for leaf in jax.tree.leaves(cache_lib.first(state.cache).layers):
            assert leaf.sharding.spec == PartitionSpec(None, "tensor")


def test_rows_over_devices_agree_on_the_end_alone(directories):
    """Whether all are done, and whether the cache has room; after the loop the host is told of all rows."""
    target = load_model(directories / "target", mesh=mesh_of("data"))
    engine, params = Decoder(target).engine(True, 4)
    state = Decoder(target).prefilled(PROMPTS, max_new_tokens=8, temperature=0.0)
    text: Any = compiled_chunk(engine).lower(params, state, np.int32(5)).compile().as_text()
    inside = [line.strip() for line in text.splitlines() if re.search(_TALK, line) and "while/" in line]
    large = [line for line in inside if not re.search(r"(pred|s32)\[\]", line)]
    assert not large, large
    for leaf in jax.tree.leaves(cache_lib.first(state.cache).layers):
        assert leaf.sharding.spec[0] == "data"


def test_what_is_fused_comes_apart_again(directories):
    target = load_model(directories / "target", mesh=mesh_of("both"))
    originals = jax.tree.map(np.asarray, target.params)
    target.free_originals()
    jax.tree.map(np.testing.assert_array_equal, originals, target.params)
    assert target.layout().spec.config.fused_shards == 2
