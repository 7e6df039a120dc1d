"""A target in, the starting weights of a smaller draft out: the residual stream is rotated onto its principal
directions and cut (2401.15024), some of the layers are kept, and in each the heads and neurons that matter most
(2407.14679). On the demo this start is worth more than 600k tokens of training from random weights.

Dims: B rows, T tokens, D target hidden, d draft hidden, F target neurons.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.errors import ConfigError
from specjax.models import transformer
from specjax.models.config import LayerKind, ModelConfig, Norm
from specjax.models.rotary import Rope, rotary_table
from specjax.types import Params


@dataclasses.dataclass(frozen=True)
class _Stream:
    """What the calibration text shows of the residual stream where a norm reads it, in reading order: attention and
    MLP of every layer, then the head. ``covariance[i]`` is of the normalised stream."""

    covariance: list[np.ndarray]
    neuron_energy: list[np.ndarray]


def prune(target: Any, shape: ModelConfig, tokens: Int[np.ndarray, "B T"]) -> Params:
    """Parameters of a draft of ``shape`` cut from ``target`` (a `LoadedModel`), calibrated on ``tokens``.

    Raises `ConfigError` where the target is no Llama, where ``shape`` is larger than it, or where its heads cannot be a
    subset of the target's.
    """
    full = target.config
    _check_llama(full)
    _check(full, shape)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), target.params)
    stream = _measure(target, tokens)
    head = params["embedding"] if full.tie_embeddings else params["head"]["kernel"].T
    # The head reads through the last norm's scale; its covariance stands for the directions that tell tokens apart.
    read = head * params["norm"]["scale"]
    basis = _principal([*stream.covariance, len(stream.covariance) * _normalised(read.T @ read)], shape.hidden_size)

    def norm(i: int) -> np.ndarray:
        # RMS over d directions that keep a share of the energy, against RMS over all D.
        covariance = stream.covariance[i]
        kept = np.trace(basis.T @ covariance @ basis) / np.trace(covariance)
        return np.full(shape.hidden_size, np.sqrt(kept * full.hidden_size / shape.hidden_size))

    layers = {}
    for new, old in enumerate(_spread(full.num_layers, shape.num_layers)):
        cut = _cut_layer(params["layers"][old], stream.neuron_energy[old], basis, full, shape)
        cut["attention_norm"], cut["mlp_norm"] = {"scale": norm(2 * old)}, {"scale": norm(2 * old + 1)}
        layers[new] = cut
    pruned: dict[str, Any] = {"embedding": params["embedding"] @ basis, "layers": layers}
    if full.tie_embeddings:
        # A tied head has no place for the old scale, which acts in the old directions: its diagonal in the new ones.
        diagonal = np.einsum("id,i,id->d", basis, params["norm"]["scale"], basis)
        pruned["norm"] = {"scale": norm(-1) * diagonal}
    else:
        pruned |= {"norm": {"scale": norm(-1)}, "head": {"kernel": (read @ basis).T}}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), pruned)


def _cut_layer(layer: dict, energy: np.ndarray, basis: np.ndarray, full: ModelConfig, shape: ModelConfig) -> dict:
    attention, mlp, groups = layer["attention"], layer["mlp"], full.num_kv_heads
    out = attention["o_proj"]["kernel"].reshape(groups, -1, full.hidden_size)
    value = attention["v_proj"]["kernel"].reshape(full.hidden_size, groups, -1)
    strength = [np.linalg.norm(value[:, g]) * np.linalg.norm(out[g]) for g in range(groups)]
    heads = np.sort(np.argsort(strength)[::-1][: shape.num_kv_heads])
    neurons = np.sort(np.argsort(energy)[::-1][: shape.intermediate_size])

    def reads(kernel: np.ndarray, norm: str) -> dict:
        return {"kernel": basis.T @ (layer[norm]["scale"][:, None] * kernel)}

    def grouped(name: str) -> np.ndarray:
        kernel = attention[name]["kernel"].reshape(full.hidden_size, groups, -1)
        return kernel[:, heads].reshape(full.hidden_size, -1)

    return {
        "attention": {
            **{name: reads(grouped(name), "attention_norm") for name in ("q_proj", "k_proj", "v_proj")},
            "o_proj": {"kernel": out[heads].reshape(-1, full.hidden_size) @ basis},
        },
        "mlp": {
            **{name: reads(mlp[name]["kernel"][:, neurons], "mlp_norm") for name in ("gate_proj", "up_proj")},
            "down_proj": {"kernel": mlp["down_proj"]["kernel"][neurons] @ basis},
        },
    }


def _measure(target: Any, tokens: Int[np.ndarray, "B T"]) -> _Stream:
    covariances, energies = jax.device_get(_calibrate(target.spec, target.params, jnp.asarray(tokens)))
    return _Stream([np.asarray(c, np.float64) for c in covariances], energies)


@functools.partial(jax.jit, static_argnums=0)
def _calibrate(spec: transformer.Model, params: Params, tokens: Int[Array, "B T"]):
    module = spec.module(params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    visible = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    x = module.embedding[...][tokens]
    (rope,) = spec.config.ropes
    rotary = rotary_table(positions, rope, spec.config.head_dim, x.dtype, tokens.shape[1])
    covariances, energies = [], []
    # The forward pass again, layer by layer: the stream between attention and MLP is no output of the model.

    def covariance(x: Float[Array, "B T D"]) -> Float[Array, "D D"]:
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + spec.config.norm.eps)
        return jnp.einsum("btd,bte->de", x, x) / tokens.size

    for block in module.layers:
        covariances.append(covariance(x))
        x = x + block.attention(transformer.normed(block.attention_norm, x), rotary, positions, None, visible)[0]
        covariances.append(covariance(x))
        neurons = block.mlp.neurons(transformer.normed(block.mlp_norm, x))
        down = block.mlp.down_proj
        energies.append(jnp.mean(jnp.square(neurons), axis=(0, 1)) * jnp.sum(jnp.square(down.kernel[...]), axis=1))
        x = x + down(neurons)
    return [*covariances, covariance(x)], energies


def _principal(covariances: list[np.ndarray], size: int) -> Float[np.ndarray, "D d"]:
    """Orthonormal directions of the most energy over all the covariances, the strongest first."""
    _, vectors = np.linalg.eigh(sum(covariances))
    return vectors[:, ::-1][:, :size]


def _normalised(covariance: np.ndarray) -> np.ndarray:
    return covariance * (len(covariance) / np.trace(covariance))


def _spread(layers: int, kept: int) -> list[int]:
    """The first layer, the last one, and others evenly between them."""
    return [0] if kept == 1 else [round(i * (layers - 1) / (kept - 1)) for i in range(kept)]


def _check_llama(full: ModelConfig) -> None:
    """Sizes, rotary settings, eps and tying may be any; everything else must be as in a Llama."""
    norm, layers = Norm(eps=full.norm.eps), (LayerKind(full.layer(0).rope or Rope()),)
    sizes = [field.name for field in dataclasses.fields(ModelConfig) if field.default is dataclasses.MISSING]
    free = (*sizes, "max_positions", "tie_embeddings")
    llama = ModelConfig(**{name: getattr(full, name) for name in free}, norm=norm, layers=layers)
    others = [f.name for f in dataclasses.fields(full) if getattr(full, f.name) != getattr(llama, f.name)]
    if others:
        raise ConfigError(
            f"draft.init: cuts a draft from a Llama-shaped target only, this one differs in {', '.join(others)}; "
            "drop draft.init, or give the path of a draft"
        )


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
