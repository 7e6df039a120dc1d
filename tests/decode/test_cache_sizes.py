"""What a cache need not hold: of a layer with a window no more than it sees, which changes neither tokens nor what they
are worth; and of numbers no more than 8 bits, which is another model, the same however it decodes."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax.decode import programs
from specjax.decode.decoder import Decoder
from specjax.decode.programs import compiled_chunk, slide
from specjax.decode.request import prepare
from specjax.decode.scheduler import Scheduler
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.ngram import NGram
from specjax.errors import ModelError
from specjax.interfaces import Reads
from specjax.models.attention.stored import LayerKV, Sliding
from specjax.models.cache import KVCache
from specjax.models.config import LayerKind
from specjax.models.hf import LoadedModel, load_model, save_model
from specjax.models.transformer import Model
from specjax.testing.inhabitants import Tree
from tests.cases import in_proof, transformer

ROOM = 32
PROMPTS = [[int(x) for x in np.random.default_rng(i).integers(0, 16, size)] for i, size in enumerate((1, 50, 120))]
NEW = 150


@functools.cache
def windowed(*windows: int | None, seed: int = 0) -> LoadedModel:
    config = transformer(0, num_layers=len(windows)).spec.config
    kinds = tuple(LayerKind(config.layers[0].rope, window) for window in windows)
    model = Model(dataclasses.replace(config, layers=kinds, max_positions=2048))
    return LoadedModel(model, model.init(jax.random.key(seed)))


DRAFTERS = {
    "plain": lambda target: None,
    "ngram": lambda target: NGram(3),
    "model": lambda target: DraftModel(windowed(24, 24, seed=1), 3),
    "tree": lambda target: Tree(target, 2, 2),
}


def narrow(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Room for few tokens, so that layers slide often; what was compiled for another is forgotten."""
    programs.free_programs()
    monkeypatch.setattr(programs, "_ROOM", room)


@pytest.fixture(autouse=True)
def _programs():
    yield
    programs.free_programs()


def generated(target: LoadedModel, kind: str, piece: int | None = None):
    decoder = Decoder(target, DRAFTERS[kind](target), "coupled", prefill_chunk=piece)
    new = 60 if kind == "tree" else NEW
    return decoder.generate(PROMPTS, max_new_tokens=new, ignore_eos=True, temperature=1.0, logprobs=True)


@pytest.mark.parametrize(
    ("windows", "kind", "piece"),
    [
        ((24, None), "plain", None),
        ((24, 24), "model", 16),
        in_proof((24, 40), "ngram", 7),
        in_proof((None, 24), "tree", 16),
    ],
)
def test_what_is_decoded_is_what_a_whole_cache_gives(monkeypatch, windows, kind, piece):
    """Through growth, slides at other times in each row, pieces of a prompt, and a tree that is cut back."""
    target = windowed(*windows)
    narrow(monkeypatch, 10**6)
    whole = generated(target, kind)
    narrow(monkeypatch, ROOM)
    found = generated(target, kind, piece)
    assert found.tokens == whole.tokens
    assert found.logprobs is not None
    assert whole.logprobs is not None
    for a, b in zip(found.logprobs, whole.logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


def test_layers_hold_what_they_see_and_room_for_some_tokens(monkeypatch):
    narrow(monkeypatch, ROOM)
    decoder = Decoder(windowed(24, None))
    state = decoder.prefilled(PROMPTS, max_new_tokens=NEW, temperature=0.0)
    windowed_layer, whole = state.cache.layers
    assert isinstance(windowed_layer, Sliding)
    assert windowed_layer.keys.shape[2] == 24 + ROOM
    assert isinstance(whole, LayerKV)
    assert whole.keys.shape[2] == state.cache.num_slots == 512
    np.testing.assert_array_equal(windowed_layer.base, [0, 50 - 24, 120 - 24, 0])
    engine, params = decoder.engine(True, 4)
    state = compiled_chunk(engine)(params, state, 1000)
    # As long as every row has room, whatever the host asks for.
    np.testing.assert_array_equal(state.lengths[:3], np.array([1, 50, 120]) + ROOM)
    state = slide(state)
    np.testing.assert_array_equal(state.cache.layers[0].base[:3], np.maximum(state.lengths[:3] - 24, 0))


def test_a_layer_that_a_drafter_reads_is_kept_whole():
    reader: Any = types.SimpleNamespace(num_nodes=3, reads=Reads(kv_layers=(1,)))
    cache = programs.empty_cache(windowed(24, 24).spec, reader, 1, 1024, 16)
    assert [type(layer) for layer in cache.layers] == [Sliding, LayerKV]
    assert cache.view((1,))[0][0].shape[2] == 1024
    with pytest.raises(ValueError, match="layer 0 of the cache slides"):
        cache.view((0,))


def test_requests_that_come_later_are_inserted_among_rows_that_slid(monkeypatch):
    narrow(monkeypatch, ROOM)
    target = windowed(24, None)
    engine, params = Decoder(target).engine(True)
    batches = [
        prepare(target, 0, [p], 60 + 40 * (i % 3), 0, True, {"temperature": 0.0}) for i, p in enumerate(PROMPTS * 2)
    ]
    together = dict(Scheduler(engine, params, 2).run(batches))
    for number, batch in enumerate(batches):
        ((_, alone),) = Scheduler(engine, params, 1).run([batch])
        end = int(alone.lengths[0])
        np.testing.assert_array_equal(together[number].tokens[0, :end], alone.tokens[0, :end])


def test_a_cache_slides_row_by_row():
    """What is kept is at new slots, and what is written next follows it."""
    model = windowed(4, None).spec
    cache = model.init_cache(2, 64, room=8)
    layer = cache.layers[0]
    assert isinstance(layer, Sliding)
    numbers = jnp.broadcast_to(jnp.arange(12.0)[None, None, :, None], layer.keys.shape)
    filled = layer._replace(slots=LayerKV(numbers, numbers.swapaxes(2, 3)))
    cache = dataclasses.replace(cache, layers=(filled, cache.layers[1]))
    assert [int(cache.room(jnp.array(lengths))) for lengths in ([0, 12], [12, 3], [0, 3])] == [0, 0, 9]
    cache = cache.slid(jnp.array([3, 10]))
    slid: Any = cache.layers[0]
    np.testing.assert_array_equal(slid.base, [0, 6])
    np.testing.assert_array_equal(slid.keys[0, 0, :12, 0], np.arange(12))
    np.testing.assert_array_equal(slid.keys[1, 0, :6, 0], np.arange(6, 12))
    np.testing.assert_array_equal(slid.values[1, 0, 0, :6], np.arange(6, 12))
    assert [int(cache.room(jnp.array(lengths))) for lengths in ([0, 12], [12, 3])] == [6, 0]


def in_8_bits(target: Any) -> LoadedModel:
    return LoadedModel(dataclasses.replace(target.spec, cache_dtype="int8"), target.params)


@pytest.mark.parametrize(("kind", "piece"), [("ngram", 16), ("tree", None)])
def test_in_8_bits_what_is_decoded_depends_on_no_block_and_no_piece(monkeypatch, kind, piece):
    narrow(monkeypatch, ROOM)
    target = in_8_bits(windowed(24, None))
    plain, found = generated(target, "plain"), generated(target, kind, piece)
    assert plain.logprobs is not None
    assert found.logprobs is not None
    for a, b, c, d in zip(plain.tokens, found.tokens, plain.logprobs, found.logprobs, strict=True):
        assert a[: len(b)] == b
        np.testing.assert_allclose(c[: len(d)], d, rtol=0, atol=1e-4)


def test_a_cache_in_8_bits_is_a_quarter_and_reads_as_what_was_written():
    """To half a step of each vector's own scale; and what is read without a cache is what is read from one."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.integers(-3, 3, (2, 3, 2, 1))
    keys, values = (jnp.asarray(rng.normal(size=(2, 3, 2, 8)) * sizes, jnp.float32) for _ in range(2))
    keys = keys.at[0, 0, 0].set(0.0)
    start, empty = jnp.array([4, 0]), KVCache.zeros(1, 2, 16, 2, 8, "int8").layers[0]
    read = empty.write(start, LayerKV.of(keys, values, folded=False)).read()
    by_token = read[0].transpose(0, 2, 1, 3), read[1].transpose(0, 3, 1, 2)
    for found, new, alone in zip(by_token, (keys, values), empty.as_read(keys, values), strict=True):
        for row, first in enumerate((4, 0)):
            written = found[row, first : first + 3]
            np.testing.assert_array_equal(written, alone[row])
            step = jnp.max(jnp.abs(new[row]), axis=-1, keepdims=True) / 127
            assert bool(jnp.all(jnp.abs(written - new[row]) <= 0.501 * step))
        assert int(jnp.sum(jnp.any(found != 0, axis=-1))) == 12 - (new is keys)
    plain, small = (
        sum(x.nbytes for x in jax.tree.leaves(KVCache.zeros(1, 2, 16, 2, 128, dtype))) for dtype in ("float32", "int8")
    )
    assert small == plain * (128 + 4) / (4 * 128)


def test_keys_of_a_token_that_overflowed_are_seen_as_such():
    """As in a plain cache: its keys read as NaN, so that who sees them knows."""
    keys = jnp.ones((1, 2, 1, 4)).at[0, 1].set(jnp.nan)
    empty = KVCache.zeros(1, 1, 4, 1, 4, "int8").fold().layers[0]
    layer = empty.write(jnp.array([0]), LayerKV.of(keys, jnp.ones_like(keys)))
    read = np.asarray(layer.read()[0])[0]
    np.testing.assert_array_equal(np.isnan(read).all(-1), [False, True, False, False])
    assert np.isfinite(read[[0, 2, 3]]).all()


def test_a_loaded_target_says_so(tmp_path):
    save_model(dataclasses.replace(windowed(None), family="llama"), tmp_path / "target")
    target = load_model(tmp_path / "target", kv_cache="int8")
    assert target.name == "target-kv-int8"
    assert target.spec.init_cache(1, 16).layers[0].keys.dtype == jnp.int8
    with pytest.raises(ModelError, match="kv_cache='int4' is unknown; use 'int8', or None"):
        load_model(tmp_path / "target", kv_cache="int4")


@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_over_devices_rows_slide_as_on_one(monkeypatch, tmp_path, kv_cache):
    narrow(monkeypatch, ROOM)
    save_model(dataclasses.replace(windowed(24), family="mistral"), tmp_path / "target")
    options: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 1.0}
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    alone, over = (
        Decoder(load_model(tmp_path / "target", mesh=where, kv_cache=kv_cache), NGram(3), "coupled", prefill_chunk=16)
        for where in (None, mesh)
    )
    assert over.generate(PROMPTS, **options).tokens == alone.generate(PROMPTS, **options).tokens
    state = over.prefilled(PROMPTS, max_new_tokens=100, temperature=0.0)
    assert isinstance(state.cache.layers[0], Sliding)
    assert jax.tree.leaves(slide(state).cache.layers[0])[0].sharding.spec == PartitionSpec("data", "tensor")
