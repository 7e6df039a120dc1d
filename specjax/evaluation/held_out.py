"""Decoding of fixed held-out prompts with a draft, in training and after: tokens per target call, prompt by prompt."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specjax import config, registry
from specjax.config import RunConfig
from specjax.data.corpus import Document
from specjax.data.prompts import PLACES, HeldOutPrompt, cut_prompts, for_selection
from specjax.decode.decoder import Decoder
from specjax.decode.result import GenerationResult, check_finite
from specjax.errors import ConfigError, DataError
from specjax.evaluation.simulated import simulated_block_efficiency
from specjax.interfaces import Drafter, Params, Trainable
from specjax.models.hf import LoadedModel
from specjax.runtime import fingerprint
from specjax.runtime.log import note
from specjax.training.layout import make_layout
from specjax.training.selection import Decoded, DraftEvaluator, affects_selection
from specjax.training.teacher import with_shared_params


@dataclasses.dataclass(frozen=True)
class HeldOutDecoding(DraftEvaluator):
    """Decoding of the same prompts with the same seed and programs at every call. The draft's weights are an argument
    of the programs, so a further evaluation compiles nothing. Over a mesh, draft and target decode where they are
    stored."""

    rule: config.Selection
    target: LoadedModel
    drafter: Trainable
    prompts: Sequence[HeldOutPrompt]
    temperatures: Sequence[float]
    verifier: Any
    sampling: Mapping[str, Any]
    seed: int

    def __call__(self, params: Params, loaded: Drafter | None = None) -> list[Decoded]:
        """Results, one a temperature. ``loaded``: drafter that decodes, instead of the one made of ``params``."""
        params = with_shared_params(self.drafter, params, self.target.params)
        # Another handle of the same weights: the copy laid out for decoding is freed with it, and not held in training.
        target = dataclasses.replace(self.target)
        verifier = registry.build(registry.VERIFIERS, self.verifier, "verifier")
        drafter = self.drafter.to_drafter(params, target, self.rule.k) if loaded is None else loaded
        decoder = Decoder(target, drafter, verifier)
        return [self._decode(decoder, params, verifier.kind, temperature) for temperature in self.temperatures]

    def _decode(self, decoder: Decoder, params: Params, rule: str, temperature: float) -> Decoded:
        prompts = [prompt.tokens for prompt in self.prompts]
        options = {**self.sampling, "stop_token_ids": (), "temperature": temperature}
        options |= {"max_new_tokens": self.rule.new_tokens}
        decoder.compile(prompts, **options)
        began = time.perf_counter()
        found = decoder.generate(prompts, seed=self.seed, ignore_eos=True, **options)
        seconds = time.perf_counter() - began
        check_finite(found, "the draft in training", f"target {self.target.name!r}")
        return Decoded(temperature, found.stats, seconds, self._simulated(params, found, temperature, rule))

    def _simulated(self, params: Params, found: GenerationResult, temperature: float, rule: str) -> float | None:
        if dict(self.sampling) != config.Sampling().options():
            return None  # the simulation knows no sampling parameter but the temperature
        texts = [[*prompt.tokens, *row] for prompt, row in zip(self.prompts, found.tokens, strict=True)]
        lengths = [len(prompt.tokens) for prompt in self.prompts]
        how = (self.rule.k, temperature, rule)
        return simulated_block_efficiency(self.drafter, params, self.target, texts, lengths, *how)

    @property
    def identity(self) -> str:
        prompts = [prompt.tokens for prompt in self.prompts]
        sizes = (self.rule.new_tokens, self.rule.k, self.seed)
        parts = (prompts, list(self.temperatures), self.verifier, dict(self.sampling), *sizes)
        return fingerprint.of_json(parts)


def held_out_decoding(
    config: RunConfig, target: LoadedModel, drafter: Trainable, held_out: Sequence[Document]
) -> HeldOutDecoding | None:
    """Decoding that ``config.selection`` asks for; None if nothing is to be decoded. The prompts are of documents that
    no benchmark sees. Raises `DataError` if there is no prompt, or if the target has too few positions, `ConfigError`
    as `decoding_enabled` does."""
    rule = config.selection
    if not decoding_enabled(config):
        if rule.prompts:
            note(
                "selection: several processes do not decode, so nothing is said of block efficiency; `specjax bench` "
                "measures it afterwards, in one process"
            )
        return None
    needed = rule.prompt_tokens + rule.new_tokens + rule.k + 1
    if needed > target.config.max_positions:
        raise DataError(
            f"selection: prompt_tokens={rule.prompt_tokens}, new_tokens={rule.new_tokens} and k={rule.k} need {needed} "
            f"positions, the target has {target.config.max_positions}; lower one of them, or set selection.prompts=0"
        )
    prompts = cut_prompts(for_selection(held_out), target.tokenizer, rule.prompt_tokens, rule.prompts, PLACES[::-1])
    if not prompts:
        raise DataError(
            f"the held-out text has no prompt of selection.prompt_tokens={rule.prompt_tokens}; give more text, "
            "a larger data.held_out or fewer prompt_tokens, or set selection.prompts=0"
        )
    temperatures = config.bench.temperatures if rule.temperatures is None else rule.temperatures
    where = (prompts, temperatures, config.verifier, config.sampling.options(), config.seed)
    return HeldOutDecoding(rule, target, drafter, *where)


def with_median_seconds(turns: Sequence[Sequence[Decoded]]) -> list[Decoded]:
    """Results of several turns as one, with the median of their seconds; nothing else differs between turns."""
    return [
        dataclasses.replace(same[0], seconds=statistics.median(d.seconds for d in same))
        for same in zip(*turns, strict=True)
    ]


def decoding_enabled(config: RunConfig) -> bool:
    """True if a run decodes: it has prompts to decode, and one process. Raises `ConfigError` if decoding is to select
    the draft and cannot, or for a mesh that does not fit."""
    rule, several = config.selection, jax.process_count() > 1
    make_layout(config.mesh)
    if affects_selection(rule) and several:
        raise ConfigError(
            f"selection: select={rule.select} and patience={rule.patience}, but several processes do not decode; set "
            "select=last and no patience, or run in one process, over any mesh"
        )
    return bool(rule.prompts) and not several
