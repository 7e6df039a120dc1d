"""Test that an exported draft is the one that was trained. It is loaded again and compared with the trained one,
setting by setting, weight by weight, and its first blocks with the training forward of the same text. A draft that came
back different still decodes exactly what its target says, only slower, so nothing else would show the difference.

Dims: B prompts, T tokens, K tokens of a block, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.data.rows import Rows
from specjax.decode.decoder import Decoder
from specjax.decode.engine import Engine, EngineParams, block_context, propose
from specjax.errors import ModelError
from specjax.interfaces import Batch, DecodeState, Draft, Drafter, Params, Target, TargetView, TrainingForm
from specjax.models.hf import LoadedModel
from specjax.models.vocabulary import NEVER
from specjax.runtime.distributed import on_one_device
from specjax.training.selection import Decoded
from specjax.training.teacher import target_output

_PLACES = 3
"""Number of depths of a block that are compared, if the drafter can propose so many."""
_CLOSE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of two logits, in standard deviations of all of them, that rounding explains."""
_NOT_OF_THE_DRAFT = ("dtype",)


_LENGTHS = (3, 9, 21, 40)


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Result of a passed self-test. ``weights``: number of equal arrays; ``positions``: number of proposed tokens with
    compared logits; ``largest_difference``: between these, in their standard deviations; ``blocks``: number of blocks
    that were decoded and counted again."""

    weights: int
    positions: int
    largest_difference: float
    blocks: int = 0

    def counting(self, again: Sequence[Decoded], before: Sequence[Decoded]) -> SelfTest:
        """The result with counts of prompts that were decoded ``again`` after, and ``before`` the export. Raises
        `ModelError` unless every prompt has the same counts."""
        for a, b in zip(again, before, strict=True):
            for i, (found, wanted) in enumerate(zip(a.by_prompt, b.by_prompt, strict=True)):
                if found != wanted:
                    raise ModelError(
                        f"self-test: prompt {i} takes {found.blocks} target calls at temperature {a.temperature:g}, "
                        f"and took {wanted.blocks} before it was exported"
                    )
        return dataclasses.replace(self, blocks=sum(d.stats.blocks for d in again))

    def __str__(self) -> str:
        counted = f", counts of {self.blocks:,} blocks equal" if self.blocks else ""
        return (
            f"{self.weights} arrays and all settings equal, logits of {self.positions} drafts within "
            f"{self.largest_difference:.0e} standard deviations{counted}"
        )


def prompts_of(rows: Rows) -> list[list[int]]:
    """A few prompts of different lengths, from the first rows."""
    lengths = [min(length, rows.length - _PLACES) for length in _LENGTHS]
    return [rows[i % len(rows)].tokens[:length].tolist() for i, length in enumerate(lengths)]


def self_test(
    trained: Any, params: Params, target: LoadedModel, loaded: Drafter, prompts: Sequence[Sequence[int]]
) -> SelfTest:
    """Compare a trained draft with its exported copy.

    Args:
        trained: a `Trainable`.
        params: all parameters that it computes with.
        target: the `LoadedModel` that it drafts for.
        loaded: the drafter read from the exported directory; its ``k`` does not matter.
        prompts: token ids.

    Returns:
        The amounts that agree.

    Raises:
        ModelError: something differs; the message names the first difference.
    """
    # As for decoding: in the target's dtype, to which `load_drafter` casts, on the device where it puts them.
    params = jax.tree.map(lambda x: x.astype(target.dtype), on_one_device(params))
    trained = trained.in_training(TrainingForm(dtype=str(target.dtype)))
    if target.spec.cache_dtype is not None:  # training reads keys and values in the dtype of the pass
        target = dataclasses.replace(target, spec=dataclasses.replace(target.spec, cache_dtype=None))
    places, _ = _predictions(trained)
    own, found = (dataclasses.replace(d, k=places) for d in (trained.to_drafter(params, target, 1), loaded))  # pyright: ignore
    _same_tokenizer(found.tokenizer, target.tokenizer)
    bound, read = own.bind(target), found.bind(target)
    if difference := _setting(bound.spec, read.spec, ""):
        raise ModelError(f"self-test: {difference}")
    count = _same_weights(bound.params, read.params)
    close = _CLOSE.get(str(target.dtype), _CLOSE["bfloat16"])
    differences = _differences(trained, params, target, found, prompts, 0)
    if not differences.max() <= close:
        raise ModelError(f"self-test: {_diagnosis(trained, params, target, found, prompts, differences, close)}")
    return SelfTest(count, differences.size, float(differences.max()))


def _predictions(trained: Any) -> tuple[int, Any]:
    """(number of depths that can be compared, trainable that predicts them)."""
    for places in range(_PLACES, 0, -1):
        if (found := trained.unrolled(places)) is not None:
            return places, found
    return 1, trained


def _same_tokenizer(own: Any, wanted: Any) -> None:
    """Raise `ModelError` if the draft has a tokenizer of its own that is not the one wanted, the target's."""
    if own is None or wanted is None:
        return
    for name, of in (("vocabulary", lambda t: t.get_vocab()), ("chat template", lambda t: t.chat_template or None)):
        if of(own) != of(wanted):
            raise ModelError(f"self-test: the {name} of its tokenizer is not the target's")


def _setting(trained: Any, loaded: Any, path: str) -> str | None:
    """Sentence about the first setting that differs, by its path; None if all are equal."""
    if trained == loaded:
        return None
    if dataclasses.is_dataclass(trained) and type(trained) is type(loaded):
        for field in dataclasses.fields(trained):
            if field.name not in _NOT_OF_THE_DRAFT:
                pair = getattr(trained, field.name), getattr(loaded, field.name)
                if difference := _setting(*pair, f"{path}.{field.name}".lstrip(".")):
                    return difference
        return None
    return f"{path} is {loaded!r}, and was {trained!r} in training"


def _same_weights(trained: Params, loaded: Params) -> int:
    """Number of equal arrays. Raises `ModelError` for the first that is missing, or differs."""
    before, after = ({_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)} for tree in (trained, loaded))
    if missing := before.keys() ^ after.keys():
        name = min(missing)
        raise ModelError(f"self-test: {name} is {'missing' if name in before else 'new'}")
    for name, x in before.items():
        a, b = (np.asarray(leaf) for leaf in (x, after[name]))
        a, b = (leaf.astype(b.dtype).astype(np.float32) for leaf in (a, b))
        if a.shape != b.shape or not np.array_equal(a, b):
            how = (
                f"shape {b.shape}, and {a.shape} in training"
                if a.shape != b.shape
                else f"by up to {abs(a - b).max():.2g}"
            )
            raise ModelError(f"self-test: {name} differs: {how}")
    return len(before)


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def _diagnosis(
    trained: Any,
    params: Params,
    target: Target,
    found: Drafter,
    prompts: Sequence[Sequence[int]],
    differences: Float[np.ndarray, "B K"],
    close: float,
) -> str:
    """Likely cause of logits that differ between decoding and training where settings and weights are equal."""
    if np.isnan(differences).any():
        return "a logit of decoding is NaN, and none of training's is"
    what = f"a logit of decoding is {differences.max():.2g} standard deviations from training's"
    for shift, how in ((1, "one too few"), (-1, "one too many")):
        if trained.reads.kv_layers and _differences(trained, params, target, found, prompts, shift).max() <= close:
            return f"{what}: decoding reads {how} of the target's keys and values"
    if differences[:, 0].max() > close:
        return f"{what}, from depth 1 of a block on: a norm, a rotary table, positions or slots"
    return f"{what}, from depth 2 of a block on: its own keys and values, or their mask"


def _differences(
    trained: Any, params: Params, target: Target, found: Drafter, prompts: Sequence[Sequence[int]], shift: int
) -> Float[np.ndarray, "B K"]:
    """Largest difference of two logits by prompt and depth, in standard deviations. ``shift``: number of further slots
    of the target that the drafter is told of."""
    decoder = Decoder(target, found)
    engine, engine_params = decoder.engine(greedy=False)
    state = decoder.prefilled(prompts, max_new_tokens=1, temperature=1.0)
    draft = _drafted(engine, engine_params, state, shift)
    assert draft.logits is not None
    drawn, proposed = np.asarray(draft.tokens), np.asarray(draft.logits, np.float32)
    places, trainable = _predictions(trained)
    texts = np.zeros((len(prompts), -(-(max(map(len, prompts)) + places) // 8) * 8), np.int32)
    for text, prompt, own in zip(texts, prompts, drawn, strict=False):
        text[: len(prompt) + places] = [*prompt, *own[:places]]
    roots = jnp.asarray([len(prompt) - 1 for prompt in prompts], jnp.int32)
    forced = np.asarray(_forced(trainable, places, target.spec, params, target.params, jnp.asarray(texts), roots))
    width = min(forced.shape[-1], proposed.shape[-1])
    a, b = forced[..., :width], proposed[: len(prompts), :places, :width]
    likely = ~(b < NEVER / 2)  # other tokens have no chance on either side; NaN counts as likely
    return np.where(likely, abs(a - b), 0.0).max(-1) / a[likely].std()


@functools.partial(jax.jit, static_argnums=(0, 3))
def _drafted(engine: Engine, params: EngineParams, state: DecodeState, shift: int) -> Draft:
    context = block_context(engine, params, state)
    if not shift:
        return propose(engine, params, state, context)[0]
    view = TargetView(params.target, state.cache.view(engine.reads.kv_layers), context.lengths - 1 + shift)
    return engine.drafter.draft(params.drafter, view, state.drafter, context)[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forced(
    trainable: Any, places: int, spec: Any, params: Params, target_params: Params, texts: Array, roots: Array
) -> Float[Array, "B K V"]:
    """Logits of the training forward for the ``places`` tokens that follow ``roots``."""
    batch = Batch(texts, jnp.roll(texts, -1, axis=1), jnp.ones(texts.shape, jnp.float32))
    out = target_output(spec, target_params, batch, trainable.reads)
    predictions = trainable.predictions(params, batch, out)
    found = [(prediction.target_rows, prediction.logits.astype(jnp.float32)) for prediction in predictions]
    chosen = []
    for depth in range(places):
        rows, logits = found[min(depth, len(found) - 1)]
        at = jnp.argmax(rows == (roots + depth)[:, None], axis=1)
        chosen.append(jnp.take_along_axis(logits, at[:, None, None], axis=1)[:, 0])
    return jnp.stack(chosen, axis=1)
