"""Drafts that read hidden states beside the library speculators on torch: what `save` writes is what it reads, and
gives the same logits at every depth and place; and its losses, on its own targets."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import json
import math
import os
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from specjax import formats
from specjax.drafters import eagle3, mtp, p_eagle
from specjax.drafters.dflash.model import DFlashModel
from specjax.drafters.dflash.training import TrainedDFlash
from specjax.drafters.features import LoadedDraft
from specjax.drafters.token_rows import TrainedRows
from specjax.errors import ModelError
from specjax.formats import torch_file
from specjax.interfaces import Batch, FullLogits, Output
from specjax.metrics import alpha_per_position
from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.rotary import Rope
from specjax.models.vocabulary import NEVER, DraftVocabulary
from specjax.training.losses import CrossEntropy, ForwardKL

os.environ["TORCHDYNAMO_DISABLE"] = "1"
torch = pytest.importorskip("torch")
pytest.importorskip("speculators", reason="`make parity` installs it")

H, V, T, STREAMS = 32, 61, 20, 4
ROPE, WINDOW = LayerKind(Rope(10000.0)), LayerKind(Rope(10000.0), window=5)
CLOSE = 1e-4
"""Of a standard deviation of the logits."""


def layers(*kinds: LayerKind, family: str = "llama") -> ModelConfig:
    more: Any = {"qk_norm": "head"} if family == "qwen3" else {}
    return ModelConfig(
        *(V, H, 48, len(kinds), 4, 2, 8),
        layers=kinds if len(set(kinds)) > 1 else kinds[:1],
        norm=Norm(eps=1e-5),
        max_positions=64,
        tie_embeddings=False,
        **more,
    )


def weights(model: Any) -> Any:
    params = jax.jit(model.init)(jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.1 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def text() -> tuple[Batch, Output, Any]:
    """A row, what its target's forward pass gives, and its logits."""
    tokens = jax.random.randint(jax.random.key(2), (1, T), 0, V - 1, jnp.int32)
    hidden = tuple(jax.random.normal(jax.random.key(3 + i), (1, T, H)) for i in range(STREAMS))
    logits = 2 * jax.random.normal(jax.random.key(9), (1, T, V))
    return (
        Batch(tokens, jnp.roll(tokens, -1, axis=1), jnp.ones((1, T))),
        Output(logits, hidden, final=hidden[-1]),
        logits,
    )


def theirs(kind: str, model: Any, params: Any, directory: Path, module: str, name: str) -> Any:
    """The same draft, read by the library."""
    formats.save(LoadedDraft(model, params), kind, directory, target="none")
    core = importlib.import_module(f"speculators.models.{module}.core")
    settings = json.loads((directory / "config.json").read_text())
    config = getattr(core, name).config_class.from_dict(settings)
    config.transformer_layer_config._attn_implementation = "eager"
    other = getattr(core, name)(config).eval()
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    told = other.load_state_dict({n: torch.from_numpy(np.array(x)) for n, x in tensors.items()}, strict=False)
    assert not told.unexpected_keys
    # Of the ends those that are the target's, as the library leaves them out.
    saved = other.state_dict().keys() - {*other._keys_to_ignore_on_save}
    assert tensors.keys() == {n for n in saved if not n.startswith("verifier_")}
    assert all(n.startswith(("verifier_", "embed_tokens", "lm_head")) for n in told.missing_keys), told.missing_keys
    with torch.no_grad():
        other.embed_tokens.weight.copy_(as_torch(params["embedding"]))
        other.lm_head.weight.copy_(as_torch(params["head"]["kernel"]).T)
    as_the_library_writes_it(kind, model, params, other, directory.with_name("theirs"))
    return other


def as_the_library_writes_it(kind: str, model: Any, params: Any, other: Any, directory: Path) -> None:
    """What it saves is read as the draft that it is."""
    other.save_pretrained(directory)
    target = types.SimpleNamespace(config=layers(*[ROPE] * STREAMS), dtype="float32")
    found = formats.load(directory, kind, target, whole=True)
    assert found.spec == model
    for name, value in found.params.items():
        jax.tree.map(np.testing.assert_array_equal, value, params[name])


def as_torch(x: Any) -> Any:
    return torch.from_numpy(np.array(x))


@contextlib.contextmanager
def seen_by(module: Any):
    """What a module gives, call by call."""
    found: list[Any] = []
    hook = module.register_forward_hook(lambda _, __, out: found.append(out.detach().numpy()))
    yield found
    hook.remove()


def eager(loss: str) -> Any:
    """Its losses without kernels."""
    return importlib.import_module("speculators.losses").resolve_loss_config(loss, "eager")


def alike(ours: Any, found: Any) -> None:
    ours = np.asarray(ours)
    np.testing.assert_allclose(ours, found, atol=CLOSE * float(np.std(found)), rtol=0)
    np.testing.assert_array_equal(ours.argmax(-1), found.argmax(-1))


FEWER = DraftVocabulary([0, 3, 4, 9, 20, 21, 40, 60], V)
EAGLES = {
    "plain": {"norm_before_residual": False},
    "normed": {"norm_before_fc": True},
    "3.1": {"norm_output": True, "fc_norm": True},
    "all": {"norm_before_residual": False, "norm_output": True, "fc_norm": True, "norm_before_fc": False},
    "fewer_ids": {"kept": FEWER},
    "windows": {"kinds": (WINDOW, ROPE)},
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", EAGLES)
def test_eagle3(name, family, tmp_path):
    """Row r of theirs has the token behind that of its features: row r + 1 of ours. A window of theirs stays where it
    was at the first depth, and no cache does so."""
    options = dict(EAGLES[name])
    kept, kinds = options.pop("kept", None), options.pop("kinds", (ROPE, ROPE))
    sizes, ids_of_draft = layers(*kinds, family=family), np.arange(V) if kept is None else kept.ids
    model = eagle3.Eagle3Model(sizes, (1, 2, 3), H, vocabulary=kept, options=eagle3.Options(**options))
    params, (batch, out, _) = weights(model), text()
    captured = dataclasses.replace(out, hidden=out.hidden[1:])
    other = theirs("eagle3", model, params, tmp_path / "draft", "eagle3", "Eagle3DraftModel")
    read = torch.cat([as_torch(x) for x in captured.hidden], dim=-1)[:, :-1]
    ids = as_torch(batch.tokens)[:, 1:].long()
    targets = as_torch(jax.random.normal(jax.random.key(5), (1, T, H)))
    with torch.no_grad():
        other.verifier_norm.weight.fill_(1.0)
        other.verifier_lm_head.weight.copy_(as_torch(params["head"]["kernel"]).T)
    with seen_by(other.lm_head) as found, seen_by(other.verifier_lm_head) as teacher, torch.no_grad():
        _, _, metrics = other(
            read,
            ids,
            torch.zeros_like(ids),
            loss_mask=torch.ones_like(ids),
            verifier_last_hidden_states=targets[:, 1:],
            ttt_steps=3,
            loss_config=eager("kl_div"),
        )
    trained = TrainedRows(model, depths=1 if any(sizes.windows) else 3)
    for depth, prediction in enumerate(trained.predictions(params, batch, captured)):
        ours = np.asarray(prediction.logits)[:, 1 + depth :, ids_of_draft]
        alike(ours, found[depth][:, : T - 1 - depth])
        # Of a position t they compare with what the target says after it, ours with `rows`: the same.
        of_target = FullLogits(jnp.asarray(teacher[0][:, depth:]))
        loss = ForwardKL()(jnp.asarray(ours), of_target, batch.labels[:, 1 + depth :])
        assert float(loss.mean()) == pytest.approx(float(metrics[f"loss_{depth}_sum"]), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["published", "plain", "normed", "3.1", "fewer_ids"])
def test_p_eagle(name, family, tmp_path):
    options = {"norm_before_residual": True, **EAGLES.get(name, {})}
    kept = options.pop("kept", None)
    ids_of_draft = np.arange(V) if kept is None else kept.ids
    more: Any = {"vocabulary": kept, "options": eagle3.Options(**options)}
    model = p_eagle.PEagleModel(layers(ROPE, ROPE, family=family), (1, 2, 3), H, mask_token=V - 1, **more)
    params, (batch, out, _) = weights(model), text()
    captured = dataclasses.replace(out, hidden=out.hidden[1:])
    other = theirs("p_eagle", model, params, tmp_path / "draft", "peagle", "PEagleDraftModel")
    core: Any = importlib.import_module("speculators.models.peagle.core")
    depths, rows = 3, T - 1
    anchors = torch.cat([torch.arange(rows - d) for d in range(depths)])
    which = torch.cat([torch.full((rows - d,), d) for d in range(depths)])
    ids = as_torch(batch.tokens)[:, 1:].long()
    read = torch.cat([as_torch(x) for x in captured.hidden], dim=-1)[:, :-1]
    with torch.no_grad():
        other.verifier_norm.weight.fill_(1.0)
        other.verifier_lm_head.weight.copy_(as_torch(params["head"]["kernel"]).T)
    seen = seen_by(other.lm_head), seen_by(other.verifier_lm_head)
    with pytest.MonkeyPatch.context() as patch, seen[0] as found, seen[1] as teacher, torch.no_grad():
        patch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, which))
        loss = other(
            read,
            ids,
            torch.zeros_like(ids),
            verifier_last_hidden_states=read[..., :H],
            num_depths=depths,
            loss_config=eager("kl_div"),
        )[1]
    trained, total = TrainedRows(model, depths=depths), 0.0
    for depth, prediction in enumerate(trained.predictions(params, batch, captured)):
        ours = np.asarray(prediction.logits)[:, 1 + depth :, ids_of_draft]
        alike(ours, found[0][:, which.numpy() == depth])
        of_target = FullLogits(jnp.asarray(teacher[0][:, depth:]))
        total += float(jnp.sum(ForwardKL()(jnp.asarray(ours), of_target, batch.labels[:, 1 + depth :])))
    assert total / len(anchors) == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3"])
def test_mtp(family, tmp_path):
    """At the first depth: behind it they attend within a step, which no cache does."""
    model = mtp.MTPModel(layers(ROPE, family=family), (STREAMS,), H)
    params, (batch, out, _) = weights(model), text()
    last = dataclasses.replace(out, hidden=out.hidden[-1:])
    other = theirs("mtp", model, params, tmp_path / "draft", "mtp", "MTPDraftModel")
    with seen_by(other.lm_head) as found, torch.no_grad():
        _, _, metrics = other(as_torch(batch.tokens), as_torch(last.hidden[0]))
    [prediction] = TrainedRows(model, depths=1).predictions(params, batch, last)
    count = found[0].shape[1]
    ours = np.asarray(prediction.logits)[:, 1 : 1 + count]
    alike(ours, found[0])
    loss = CrossEntropy()(jnp.asarray(ours), None, batch.tokens[:, 2 : 2 + count])
    assert float(loss.mean()) == pytest.approx(float(metrics["loss_step_0"]), abs=1e-5)


MARKOV = {"from_root": True, "markov_rank": 8}
SELECTOR = {"taps": 2, "group": 8, "candidates": 5, "selector_rank": 8, "causal_window": False}
BLOCKS = {
    "dflash": ("dflash", (ROPE, ROPE), {}),
    "dflash_from_anchor": ("dflash", (ROPE,), {"from_root": True}),
    "dflash_windows": ("dflash", (WINDOW, ROPE), {}),
    "dflash_windows_both_ways": ("dflash", (WINDOW,), {"causal_window": False}),
    "dflash_fewer_ids": ("dflash", (ROPE,), {"vocabulary": FEWER}),
    "dflash2": ("dflash2", (WINDOW, ROPE), SELECTOR),
    "dflash2_from_anchor": ("dflash2", (ROPE,), {**SELECTOR, "taps": 3, "from_root": True}),
    "dspark_vanilla": ("dspark", (ROPE,), MARKOV),
    "dspark_gated": ("dspark", (ROPE,), {**MARKOV, "markov": "gated", "confident": True}),
    "dspark_rnn": ("dspark", (ROPE,), {**MARKOV, "markov": "rnn", "confident": True, "confident_of_markov": True}),
    "dspark_fewer_ids": ("dspark", (ROPE,), {**MARKOV, "vocabulary": FEWER, "confident": True}),
    "dspark_rnn_behind": ("dspark", (ROPE,), {"markov_rank": 8, "markov": "rnn"}),
}
CLASSES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
SLOTS, ANCHORS = 4, np.asarray([2, 7, 11, 14])


def measured(kind: str, other: Any, captured: Output, batch: Batch) -> tuple[float, dict[str, Any]]:
    """The loss of their forward pass over `ANCHORS`, and what it was made of, ``[anchors, slots, ...]``."""
    backbone: Any = importlib.import_module("speculators.models.dflash.core")
    own: Any = importlib.import_module(f"speculators.models.{kind}.core")
    anchors, given, real = torch.from_numpy(ANCHORS), {}, own.compute_metrics

    def seen(*args: Any, **options: Any) -> Any:
        given.update(options, **dict(zip(("logits", "targets", "confidence"), args, strict=False)))
        return real(*args, **options)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(backbone, "select_anchors", lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool)))
        patch.setattr(own, "compute_metrics", seen)
        other.verifier_norm.weight.fill_(1.0)
        other.verifier_lm_head.weight.copy_(other.lm_head.weight)
        ids = as_torch(batch.tokens).long()
        read = torch.cat([as_torch(x) for x in captured.hidden], dim=-1)
        more = {} if kind == "dflash" else {"tv_loss_fn": eager("tv")["tv"][0]}
        loss = other(
            *(read, ids, torch.ones_like(ids), read[..., :H], torch.zeros_like(ids)),
            **{"max_anchors": len(anchors), "loss_config": eager("kl_div"), **more},
        )[1]
    shape = len(anchors), SLOTS
    tensors = {n: x for n, x in given.items() if hasattr(x, "numpy")}
    return float(loss), {n: x.numpy().reshape(*shape, *x.shape[2:]) for n, x in tensors.items()}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, tmp_path):
    """Logits of every slot, what they are compared with, confidence, and the loss of all."""
    kind, kinds, options = BLOCKS[name]
    model = DFlashModel(layers(*kinds, family="qwen3"), (1, 2, 3), H, slots=SLOTS, mask_token=V - 1, **options)
    params, (batch, out, _) = weights(model), text()
    captured = dataclasses.replace(out, hidden=out.hidden[1:])
    other = theirs(kind, model, params, tmp_path / "draft", kind, CLASSES[kind])
    loss, found = measured(kind, other, captured, batch)
    ids = options["vocabulary"].ids if "vocabulary" in options else np.arange(V)
    read = captured.hidden[0]
    of_target = (read * jax.lax.rsqrt(jnp.mean(read**2, -1, keepdims=True) + 1e-5)) @ params["head"]["kernel"]
    total = 0.0
    for place, prediction in enumerate(TrainedDFlash(model, anchors=None).predictions(params, batch, captured)):
        slot, rows = model.slot_of(place), np.asarray(prediction.target_rows)[0, ANCHORS]
        alike(np.asarray(of_target)[0, rows][:, : found["targets"].shape[-1]], found["targets"][:, slot])
        ours = np.asarray(prediction.logits)[0, ANCHORS]
        if kind == "dflash2":
            chosen_alike(ours, {n: x[:, slot] for n, x in found.items()})
            continue
        alike(ours[:, ids], found["logits"][:, slot])
        p, q = (jnp.asarray(x)[None] for x in (found["targets"][:, slot], ours[:, ids]))
        slot_of = ForwardKL()(q, FullLogits(p), jnp.zeros((1, len(ANCHORS)), jnp.int32))[0]
        if prediction.confidence is not None:
            said = prediction.confidence(prediction.hidden)[0, ANCHORS]
            alike(said, found["confidence"][:, slot])
            slot_of += optax.sigmoid_binary_cross_entropy(said, alpha_per_position(p, q)[0])
        total += float(np.mean(slot_of)) * math.exp(-place / 4)
    if kind != "dflash2":  # theirs takes the target's choice for right, ours its whole distribution
        # Theirs is divided by the number of all slots that count, ours by what they weigh.
        assert total / model.most == pytest.approx(loss, abs=1e-5)


def chosen_alike(ours: np.ndarray, theirs: dict[str, np.ndarray]) -> None:
    """Candidates and their scores, but for the target's choice, which their training puts in place of the last."""
    for logits, ids, scores, own in zip(
        ours, theirs["training_candidate_ids"], theirs["candidate_logits"], theirs["contains_target"], strict=True
    ):
        count = len(ids) if own else len(ids) - 1
        assert np.isfinite(logits[ids[:count]]).all()
        assert set(ids[:count]) <= set(np.flatnonzero(logits > NEVER / 2))
        np.testing.assert_allclose(logits[ids[:count]], scores[:count], atol=CLOSE * float(np.std(scores)), rtol=0)
        assert np.sum(logits > NEVER / 2) == len(ids)
        if own:
            assert logits.argmax() == ids[scores.argmax()]


def test_a_file_that_torch_saved_is_read_without_it(tmp_path):
    """Views, transposes and every width."""
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {"a": whole[1:, ::2], "b": whole.T.to(torch.bfloat16), "c": whole.half(), "d": whole[:, 0].double()}
    torch.save(collections.OrderedDict(tensors), tmp_path / "tensors.pt")
    found = torch_file.read_tensors(tmp_path / "tensors.pt")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name].astype(np.float64), tensor.double().numpy())
    torch.save({"a": whole, "b": slice(0, 1)}, tmp_path / "more.pt")
    with pytest.raises(ModelError, match=r"__builtin__\.slice"):
        torch_file.read_tensors(tmp_path / "more.pt")


def test_a_draft_vocabulary_and_parameters_that_torch_saved_are_read(tmp_path):
    """As training code saves a draft: its tables are whole numbers and truth values, and its weights parameters."""
    tensors = {"d2t": torch.arange(5), "t2d": torch.arange(5) > 2, "i": torch.arange(3, dtype=torch.int32)}
    tensors["w"] = torch.nn.Parameter(torch.ones(2, 3))
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    found = torch_file.read_tensors(tmp_path / "pytorch_model.bin")
    assert torch_file.tensor_names(tmp_path / "pytorch_model.bin") == found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.detach().numpy().dtype
        np.testing.assert_array_equal(found[name], tensor.detach().numpy())


def test_a_file_that_is_written_without_torch_is_what_torch_loads(tmp_path):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {"a": whole, "again": whole, "b": whole.T, "c": whole.astype(np.float16), "d": np.arange(4)}
    torch_file.write_tensors(tmp_path / "medusa_lm_head.pt", arrays)
    found = torch.load(tmp_path / "medusa_lm_head.pt", weights_only=True)
    assert isinstance(found, collections.OrderedDict)
    for name, array in arrays.items():
        assert found[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(found[name].numpy(), array)
    assert found["a"].data_ptr() == found["again"].data_ptr()
    bfloat16 = np.asarray(jnp.asarray(whole, jnp.bfloat16))
    torch_file.write_tensors(tmp_path / "bfloat16.pt", {"a": bfloat16})
    [one] = torch.load(tmp_path / "bfloat16.pt", weights_only=True).values()
    assert one.dtype == torch.bfloat16
    np.testing.assert_array_equal(one.float().numpy(), whole)
