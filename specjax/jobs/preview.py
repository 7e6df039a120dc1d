"""A first look at a run's target, before anything is trained: one prompt, decoded plainly and with a finished draft."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from rich.console import Console

from specjax.config import RunConfig
from specjax.decode.decoder import Decoder
from specjax.formats.loading import load_drafter
from specjax.jobs import inputs
from specjax.jobs.bench import held_out_prompts
from specjax.report.terminal import legend, render_pieces


def preview(config: RunConfig, prepared: inputs.Prepared, console: Console) -> None:
    """Print a greedy continuation of a held-out prompt, its tokens coloured by who chose them, and how fast the first
    of `bench.drafts` makes it beside plain decoding. Nothing is printed for a config without finished drafts."""
    settings = config.bench
    if not settings.drafts or prepared.target.tokenizer is None:
        return
    name, directory = next(iter(settings.drafts.items()))
    target = dataclasses.replace(prepared.target)  # whose layout for decoding goes with it
    [prompt] = held_out_prompts(prepared.corpus.held_out, target, settings.prompt_tokens, 1)
    drafter: Any = load_drafter(directory, target)
    drafter = dataclasses.replace(drafter, k=min(max(settings.ks), drafter.longest or max(settings.ks)))
    console.print(f"first, a look at {target.name} and the draft in {directory}:", highlight=False)
    plain, _ = _decoded(Decoder(target), prompt, settings.new_tokens)
    drafted, result = _decoded(Decoder(target, drafter, config.verifier, "fixed"), prompt, settings.new_tokens)
    console.print(render_pieces(result.pieces(0)), soft_wrap=True)
    console.print(legend())
    speeds = f"{plain:,.0f} tokens/s without a draft, {drafted:,.0f} with {name}, {drafter.k} tokens a block"
    per_call = result.stats[0].block_efficiency
    console.print(f"{speeds}: {drafted / plain:.2f}x, {per_call:.1f} tokens a target call\n", highlight=False)


def _decoded(decoder: Decoder, prompt: list[int], new_tokens: int) -> tuple[float, Any]:
    """Tokens a second of a greedy generation that is compiled already, and its result."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}
    decoder.generate([prompt], **options)
    began = time.perf_counter()
    result = decoder.generate([prompt], **options)
    return len(result.tokens[0]) / (time.perf_counter() - began), result
