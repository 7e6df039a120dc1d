"""First weights of a smaller draft, cut from its target. The residual stream is rotated onto its principal directions
and cut (2401.15024). Some of the layers stay, and in each the heads and neurons that matter most (2407.14679). On the
demo this start is worth more than 600k tokens of training from random weights.

A norm's scale along the old directions has no counterpart along the new ones. It becomes part of the kernels that read
through the norm, and one number is left of it. This holds on average for a norm of what attention or MLP give (Gemma 2,
OLMo 2), and for the last norm before a tied head, of which the diagonal stays. A LayerNorm takes the mean away: there
the new directions have no mean.

The target is read a layer at a time, twice, and cut a kernel at a time. Memory holds it, its activations on the
calibration text, the draft, and a few float64 copies of one kernel or of [D, D]. (With 254M parameters, 970 MiB in
float32: at most 693 MiB beside them, of which the draft is 155; 1,024 tokens, 2 CPU cores, 2026-11-22.)

Dims: B rows, T tokens, D target hidden, d draft hidden, F target neurons, R reads of the stream in a layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.errors import ConfigError
from specjax.interfaces import Params, Target
from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.hf import refuse_quantised
from specjax.models.training import block_of
from specjax.models.transformer import Model, normed
from specjax.runtime.distributed import whole
from specjax.training.init.shape import spread

_ROWS = 8192
"""Number of rows of an embedding or head that are computed with at a time."""


@flax.struct.dataclass
class _Seen:
    """Statistics of one layer on the calibration text. ``stream`` [D, D]: sum of the covariances of the normalised
    stream where attention and MLP read it. The others need the new directions: ``kept`` [R], the share of the stream's
    energy along them; ``written`` [2], the mean square along them of what attention and MLP give to a norm of their
    own; ``neurons`` [F], the energy of each; ``queries`` and ``keys``, the mean square of each normalised feature, if
    all heads are normalised together."""

    stream: Any = None
    kept: Any = None
    written: Any = None
    neurons: Any = None
    queries: Any = None
    keys: Any = None


def prune(
    target: Target, shape: ModelConfig, tokens: Int[np.ndarray, "B T"], layers: Sequence[int] | None = None
) -> Params:
    """Parameters of a draft of ``shape`` (`specjax.training.init.shape`) cut from ``target`` (a `LoadedModel`),
    calibrated on ``tokens``. ``layers``: numbers of the target's layers that are cut; None: those of `spread`.

    Raises `ConfigError` if the target cannot be cut, if ``shape`` is larger than it, or if its heads cannot be a subset
    of the target's.
    """
    full = target.config
    check_cuttable(full)
    refuse_quantised(target.params, "draft.init: a draft cut from its target")
    _check(full, shape)
    basis = _principal(target, tokens, shape.hidden_size)
    # The draft's RMS is over d directions with a share of the energy, the target's over all D.
    ratio = full.hidden_size / shape.hidden_size
    kept = spread(full.num_layers, shape.num_layers) if layers is None else layers
    wanted = {old: new for new, old in enumerate(kept)}
    cut, seen = {}, _Seen()
    for old, seen in enumerate(_seen(target, tokens, jnp.asarray(basis, jnp.float32))):
        if old in wanted:
            cut[wanted[old]] = _cut_layer(whole(target.params["layers"][old]), seen, basis, full, shape)
    params = {name: whole(target.params[name]) for name in ("embedding", "norm", "head") if name in target.params}
    scale, of_norm = _scale(params["norm"], full.norm), np.sqrt(float(seen.kept[0]) * ratio)
    # A family may multiply its embedding by the root of the hidden size.
    multiplied = full.embedding_multiplier / shape.embedding_multiplier
    pruned: dict[str, Any] = {"embedding": _times(params["embedding"], basis * multiplied), "layers": cut}
    if full.tie_embeddings:
        diagonal = np.einsum("id,i,id->d", basis, scale, basis) / np.square(basis).sum(0)
        pruned["norm"] = _norm(of_norm * diagonal / multiplied, full.norm)
    else:
        pruned["norm"] = _norm(np.full(shape.hidden_size, of_norm), full.norm)
        pruned["head"] = {"kernel": _times(params["head"]["kernel"].T, scale[:, None] * basis).T}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), pruned)


def _cut_layer(layer: Params, seen: _Seen, basis: np.ndarray, full: ModelConfig, shape: ModelConfig) -> Params:
    attention, mlp, groups = layer["attention"], layer["mlp"], full.num_kv_heads
    wide = functools.partial(np.asarray, dtype=np.float64)
    value = wide(attention["v_proj"]["kernel"]).reshape(full.hidden_size, groups, -1)
    out = wide(attention["o_proj"]["kernel"]).reshape(groups, -1, full.hidden_size)
    strength = [np.linalg.norm(value[:, g]) * np.linalg.norm(out[g]) for g in range(groups)]
    del value, out
    heads = np.sort(np.argsort(strength)[::-1][: shape.num_kv_heads])
    neurons = np.sort(np.argsort(np.asarray(seen.neurons))[::-1][: shape.intermediate_size])
    constants = np.sqrt(np.asarray(seen.kept, np.float64) * (full.hidden_size / shape.hidden_size))
    cut: dict[str, Any] = {}

    def norm(name: str, value: float) -> None:
        if name in layer:
            cut[name] = _norm(np.full(shape.hidden_size, value), full.norm)

    norm("attention_norm", constants[0])
    norm("mlp_norm", constants[-1])
    for name, written in zip(("attention_post_norm", "mlp_post_norm"), seen.written, strict=True):
        norm(name, float(written) ** 0.5)

    def of_heads(x: np.ndarray) -> np.ndarray:
        """``x`` without the heads that are cut away; its last axis has the features of all heads."""
        return x.reshape(*x.shape[:-1], groups, -1)[..., heads, :].reshape(*x.shape[:-1], -1)

    def reads(linear: Params, norm: str, choose: Any) -> Params:
        kernel = choose(wide(linear["kernel"]))
        kernel = kernel if norm not in layer else _scale(layer[norm], full.norm)[:, None] * kernel
        return {"kernel": basis.T @ kernel} | ({"bias": choose(linear["bias"])} if "bias" in linear else {})

    def writes(linear: Params, norm: str, choose: Any) -> Params:
        to = basis if norm not in layer else _scale(layer[norm], full.norm)[:, None] * basis
        bias = {"bias": wide(linear["bias"]) @ to} if "bias" in linear else {}
        return {"kernel": choose(wide(linear["kernel"]).T).T @ to} | bias

    mlp_reads = "mlp_norm" if full.residual != "parallel_one_norm" else "attention_norm"
    cut["attention"] = {
        **{name: reads(attention[name], "attention_norm", of_heads) for name in ("q_proj", "k_proj", "v_proj")},
        **_head_norms(attention, seen, heads, full, of_heads),
        "o_proj": writes(attention["o_proj"], "attention_post_norm", of_heads),
    }
    cut["mlp"] = {
        **{name: reads(mlp[name], mlp_reads, lambda x: x[..., neurons]) for name in ("gate_proj", "up_proj")},
        "down_proj": writes(mlp["down_proj"], "mlp_post_norm", lambda x: x[..., neurons]),
    }
    # Cast to float32 layer by layer, so that no float64 array waits for the other layers.
    return jax.tree.map(lambda x: np.asarray(x, np.float32), cut)


def _head_norms(attention: Params, seen: _Seen, heads: np.ndarray, full: ModelConfig, of_heads: Any) -> Params:
    """Norms of queries and keys, for the heads that stay."""
    if full.qk_norm == "none":
        return {}
    scales = {name: np.asarray(attention[name]["scale"], np.float64) for name in ("q_norm", "k_norm")}
    if full.qk_norm == "each_head":
        groups, features = full.num_kv_heads, full.head_dim
        scales = {n: x.reshape(groups, -1, features)[heads].reshape(-1, features) for n, x in scales.items()}
    if full.qk_norm == "projection":
        # One norm spans the features of all heads: fewer of them have another mean square.
        for name, squares in (("q_norm", seen.queries), ("k_norm", seen.keys)):
            kept = of_heads(np.asarray(squares, np.float64))
            scales[name] = of_heads(scales[name]) * np.sqrt(kept.mean())
    return {name: {"scale": scale} for name, scale in scales.items()}


def _scale(norm: Params, settings: Norm) -> Float[np.ndarray, " D"]:
    """Factors that a norm multiplies the normalised stream by."""
    return np.asarray(norm["scale"], np.float64) + settings.offset


def _norm(scale: np.ndarray, settings: Norm) -> Params:
    return {"scale": scale - settings.offset}


def _times(matrix: Any, other: np.ndarray) -> np.ndarray:
    """``matrix @ other`` in float32. ``matrix`` is never in float64 as a whole."""
    pieces = [np.asarray(matrix[i : i + _ROWS], np.float64) @ other for i in range(0, len(matrix), _ROWS)]
    return np.concatenate([piece.astype(np.float32) for piece in pieces])


def _principal(target: Target, tokens: Int[np.ndarray, "B T"], size: int) -> Float[np.ndarray, "D d"]:
    """Directions of the most energy, over all reads of the stream: orthonormal, the strongest first. For a LayerNorm
    they are one fewer, and the new coordinates add up to zero."""
    full, params = target.config, target.params
    total, count = np.zeros((full.hidden_size, full.hidden_size)), 0
    for seen in _seen(target, tokens, None):
        total += np.asarray(seen.stream, np.float64)
        count += 1
    count = (count - 1) * (2 if full.residual == "sequential" else 1) + 1
    head = whole(params["embedding"] if full.tie_embeddings else params["head"]["kernel"])
    scale = _scale(whole(params["norm"]), full.norm)
    # The head reads through the last norm's scale; its covariance stands for the directions that tell tokens apart.
    covariance = np.zeros_like(total)
    for begin in range(0, full.vocab_size, _ROWS):
        part = slice(begin, begin + _ROWS)
        read = np.asarray(head[part] if full.tie_embeddings else head[:, part].T, np.float64) * scale
        covariance += read.T @ read
    total += count * covariance * (len(covariance) / np.trace(covariance))
    if full.norm.kind == "rms":
        return np.linalg.eigh(total)[1][:, ::-1][:, :size]
    without_mean = np.eye(full.hidden_size) - 1 / full.hidden_size
    directions = np.linalg.eigh(without_mean @ total @ without_mean)[1][:, ::-1][:, : size - 1]
    adding_to_zero = np.linalg.qr(np.column_stack([np.ones(size), np.eye(size)[:, 1:]]))[0][:, 1:]
    return directions @ adding_to_zero.T


def _seen(target: Target, tokens: Int[np.ndarray, "B T"], basis: Float[Array, "D d"] | None) -> Iterator[_Seen]:
    """Statistics of every layer in turn, then of the stream that the head reads: `_Seen.stream` without a ``basis``,
    the others with one."""
    full, params = target.config, target.params
    x, contexts = whole(_enter(target.spec, params, jnp.asarray(tokens)))
    contexts = dict(zip(dict.fromkeys(full.layers), contexts, strict=True))
    for i in range(full.num_layers):
        kind = full.layer(i)
        x, seen = _through(full, kind, whole(params["layers"][i]), x, contexts[kind], basis)
        yield jax.device_get(seen)
    yield jax.device_get(jax.jit(_read, static_argnums=0)(full.norm, [x], basis))


@functools.partial(jax.jit, static_argnums=0)
def _enter(spec: Model, params: Params, tokens: Int[Array, "B T"]):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    x, contexts = spec.module(params).embed(tokens, positions, None, None, None)
    return x, [*contexts.values()]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _through(
    config: ModelConfig,
    kind: LayerKind,
    layer: Params,
    x: Float[Array, "B T D"],
    context: Any,
    basis: Float[Array, "D d"] | None,
) -> tuple[Float[Array, "B T D"], _Seen]:
    """Output and statistics of one layer: `specjax.models.transformer.Block` part by part, because it does not return
    what its parts read and write."""
    block, (rotary, kv) = block_of(config, kind, layer), context
    read = normed(block.attention_norm, x)
    streams, attended = [x], block.attention(read, rotary, kv)[0]
    change = normed(block.attention_post_norm, attended)
    if config.residual == "sequential":
        x = block.add(x, change)
        streams.append(x)
        read = normed(block.mlp_norm, x)
    mlp: Any = block.mlp
    neurons = mlp.neurons(read if config.residual != "parallel" else normed(block.mlp_norm, x))
    fed = mlp.down_proj(neurons)
    forward = normed(block.mlp_post_norm, fed)
    after = block.add(x, forward if config.residual == "sequential" else change + forward)
    seen = _read(config.norm, streams, basis)
    if basis is None:
        return after, seen
    to_residual = jnp.sum(jnp.square(layer["mlp"]["down_proj"]["kernel"].astype(jnp.float32)), axis=1)
    pairs = ((attended, "attention_post_norm"), (fed, "mlp_post_norm"))
    found: dict[str, Any] = {
        "neurons": jnp.mean(jnp.square(neurons.astype(jnp.float32)), axis=(0, 1)) * to_residual,
        "written": jnp.stack([_written(config.norm, y, layer.get(name), basis) for y, name in pairs]),
    }
    if config.qk_norm == "projection":
        queries, keys, _ = block.attention.projections(normed(block.attention_norm, streams[0]))
        squares = [jnp.mean(jnp.square(_normalised(config.norm, y)), axis=(0, 1)) for y in (queries, keys)]
        found |= dict(zip(("queries", "keys"), squares, strict=True))
    return after, dataclasses.replace(seen, **found)


def _normalised(norm: Norm, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """``x`` normalised, without the norm's scale."""
    x = x.astype(jnp.float32)
    if norm.kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm.eps)


def _read(norm: Norm, streams: list[Float[Array, "B T D"]], basis: Float[Array, "D d"] | None) -> _Seen:
    normalised = [_normalised(norm, x) for x in streams]
    if basis is None:
        covariances = [jnp.einsum("btd,bte->de", x, x) / (x.shape[0] * x.shape[1]) for x in normalised]
        return _Seen(stream=sum(covariances[1:], covariances[0]))
    energies = [[jnp.sum(jnp.square(y)) for y in (jnp.einsum("btd,de->bte", x, basis), x)] for x in normalised]
    return _Seen(kept=jnp.stack([inside / of_all for inside, of_all in energies]))


def _written(norm: Norm, y: Float[Array, "B T D"], own: Params | None, basis: Float[Array, "D d"]) -> Float[Array, ""]:
    if own is None:
        return jnp.float32(0)
    scaled = _normalised(norm, y) * (norm.offset + own["scale"].astype(jnp.float32))[None, None]
    return jnp.mean(jnp.square(jnp.einsum("btd,de->bte", scaled, basis)))


_REMEDY = "keep some of its layers ({kind: layers, keep: [...]}), drop draft.init, or give the path of a draft"


def check_cuttable(full: ModelConfig, remedy: str = _REMEDY) -> None:
    """Raises `ConfigError` with the reason if no draft can be cut from a target."""
    reasons = {
        "its MLPs are mixtures of experts": full.experts is not None,
        "its MLPs have no gate": not full.gated,
        "its positions are learned": full.learned_positions,
        "its norms have biases": full.norm.bias,
        "its projections are fused": full.fused_projections,
        "it has LayerNorms of what attention and MLP give": full.norm.kind == "layer" and full.norm.placement != "pre",
    }
    for reason in (text for text, holds in reasons.items() if holds):
        raise ConfigError(f"draft.init: no draft can be cut from this target, {reason}; {remedy}")


def _check(full: ModelConfig, shape: ModelConfig) -> None:
    where = "draft.architecture, cut from the target"
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads"):
        if getattr(shape, name) > getattr(full, name):
            raise ConfigError(
                f"{where}: {name}={getattr(shape, name)} exceeds the target's {getattr(full, name)}; "
                "give at most that, or drop draft.init"
            )
    group, wanted = full.num_heads // full.num_kv_heads, shape.num_heads // shape.num_kv_heads
    if shape.head_dim != full.head_dim:
        raise ConfigError(f"{where}: head_dim={shape.head_dim}, the target's heads have {full.head_dim}; set that")
    if group != wanted:
        raise ConfigError(
            f"{where}: {wanted} query heads a key-value head, the target has {group}; "
            f"set num_heads={group * shape.num_kv_heads} or another num_kv_heads"
        )
