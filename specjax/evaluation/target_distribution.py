"""Distribution that decoding must follow: one target under one set of sampling parameters, token by token. It comes
from a teacher-forced forward and `specjax.evaluation.references` in float64, and uses none of the code that decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.decode.options import NUMBERS
from specjax.evaluation.references import bias_vector, sampling_logits
from specjax.interfaces import Target
from specjax.models.vocabulary import unused_ids

_CUTS = ("top_k", "top_p", "min_p")
_LISTS = ("logit_bias", "banned_tokens", "allowed_tokens")


class TargetDistribution:
    """Exact distribution of a target. ``sampling``: arguments of `Decoder.generate`, one value each; ``new_tokens``:
    largest number of tokens after a prompt."""

    def __init__(self, target: Target, sampling: Mapping[str, Any], new_tokens: int):
        self._target, self._new_tokens = target, new_tokens
        self._numbers = {name: sampling[name] for name in NUMBERS if name in sampling and name != "temperature"}
        self._stop_ids = list(sampling.get("stop_token_ids", ()))
        lists = {name: sampling[name] for name in _LISTS if name in sampling}
        self._bias = bias_vector(target.config.vocab_size, **lists)
        self._bias[unused_ids(target)] = -np.inf

    def logits(self, prompt: Sequence[int], generated: Sequence[int]) -> np.ndarray:
        """Logits of the target before each of ``generated``, float32 ``[len(generated), V]``, by one forward padded to
        ``new_tokens``."""
        padding = [0] * (self._new_tokens - len(generated))
        found = np.asarray(self._target.logits(np.asarray([[*prompt, *generated, *padding]])))[0]
        return found[len(prompt) - 1 :][: len(generated)]

    def transformed(
        self, logits: np.ndarray, prompt: Sequence[int], generated: Sequence[int], temperature: float, cuts: bool = True
    ) -> np.ndarray:
        """Logits ``[V]`` after the sampling parameters, in float64; ``cuts``: True for top-k, top-p and min-p too."""
        numbers = {name: x for name, x in self._numbers.items() if cuts or name not in _CUTS}
        return sampling_logits(
            logits, prompt, generated, bias=self._bias, stop_ids=self._stop_ids, temperature=temperature, **numbers
        )

    def greedy_margin(self, prompt: Sequence[int], generated: Sequence[int], position: int) -> float:
        """`margin` of the choice of ``generated[position]`` at temperature 0."""
        logits = self.logits(prompt, generated)[position]
        return margin(self.transformed(logits, prompt, generated[:position], 1.0, cuts=False))


def margin(logits: np.ndarray) -> float:
    """Margin of the largest logit over the second."""
    top = np.sort(logits)[-2:]
    return float(top[1] - top[0])
