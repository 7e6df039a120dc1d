"""The benchmark (`specjax.evaluation.bench`) on a run's held-out text, and the figures from it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import metrics, registry
from specjax.config import Bench, RunConfig
from specjax.costs.devices import this_device
from specjax.costs.prediction import Shape
from specjax.costs.roofline import Pass, Work, storage_of
from specjax.data.corpus import Document
from specjax.data.prompts import HeldOutPrompt, cut_prompts, for_benchmark
from specjax.decode import request
from specjax.decode.decoder import Decoder
from specjax.decode.request import LEAST_SLOTS, bucket
from specjax.drafters.base import refuse_longer
from specjax.drafters.hybrid import Hybrid
from specjax.errors import ConfigError, DataError
from specjax.evaluation import bench as bench_lib
from specjax.evaluation import certify as certify_lib
from specjax.evaluation import figures as figures_lib
from specjax.formats.loading import asked_kind, load_drafter
from specjax.interfaces import Drafter, Verifier
from specjax.jobs import inputs
from specjax.models.hf import LoadedModel
from specjax.runtime.progress import Bars, StepProgress, no_bars

GREEDY, SAMPLED = 0.0, 1.0
_TUNING = 3
"""Number of tuning prompts for each timed one. Greedy acceptance varies by a quarter from prompt to prompt, so the
prediction of the speedup needs more prompts than the choice of k."""


def run_bench(config: RunConfig, bars: Bars = no_bars) -> dict[str, Any]:
    """Decode with the drafts that `train_draft.py` left in ``config.out``. Returns the dict of `decoding_figures`."""
    out = Path(config.out)
    if not (out / "draft").is_dir():
        raise DataError(f"out: {out} holds no draft; run `specjax train` with this config first, or give its `out`")
    prepared = inputs.prepare(config, bars)
    directories = {"draft_before": out / "draft-before", "draft_after": out / "draft"}
    kind = asked_kind(config.draft)
    drafts = {name: load_drafter(at, prepared.target, kind=kind) for name, at in directories.items() if at.is_dir()}
    prepared.target.free_originals()
    return decoding_figures(config, prepared.target, drafts, prepared.corpus.held_out, bars)


def decoding_figures(
    config: RunConfig,
    target: LoadedModel,
    drafts: dict[str, Drafter],
    held_out: Sequence[Document],
    bars: Bars = no_bars,
) -> dict[str, Any]:
    """Benchmark ``drafts``, drafters of any k, on held-out prompts. Returns ``decoding`` (one dict for each cell of the
    grid), ``figures`` (the flat summary, about the last draft), ``sample`` (one generation in pieces),
    ``compile_seconds`` and more."""
    settings = config.bench
    cut = _prompts(held_out, target, settings.prompt_tokens, (1 + _TUNING) * settings.prompts)
    prompts = [prompt.tokens for prompt in cut]
    bench, factories, verifier = bench_of(config, target, drafts, prompts)
    timed, primary, sampling = prompts[: settings.prompts], list(drafts)[-1], config.sampling.options()
    with bars("decoding", bench.num_ticks) as progress:
        measured = bench.measure(primary, counting(progress))
    recompiles = bench_lib.count_recompiles(target, factories[primary](max(settings.ks)), verifier)
    figures, distance = _figures(measured, target), {}
    if not verifier.lossless:
        drafter = factories[primary](next(reversed(measured["best_k"].values())))
        options = dataclasses.replace(config.certify, new_tokens=settings.new_tokens)
        subject = certify_lib.Subject(target, drafter, verifier, timed, sampling, options, config.seed)
        found = certify_lib.sampled_distribution(subject).details
        distance = {name: found[name] for name in ("total_variation", "total_variation_of_exact_sampling")}
    return {
        "decoding": measured["decoding"],
        "comparison": comparison(measured, [prompt.source for prompt in cut[: settings.prompts]]),
        "figures": {**figures, "recompiles": recompiles, "peak_rss_gb": bench_lib.peak_rss_gb()},
        "compile_seconds": bench.compile_seconds,
        "roofline": [found.to_json() for found in passes(bench, settings, primary, measured["headline"], target)],
        "verifier": {"kind": verifier.kind, "lossless": verifier.lossless, **distance},
        "sample": _sample(
            bench, primary, measured["best_k"], timed[0], target, settings.new_tokens, sampling, config.seed
        ),
    }


def bench_of(
    config: RunConfig, target: LoadedModel, drafts: Mapping[str, Drafter], prompts: Sequence[Sequence[int]]
) -> tuple[bench_lib.Bench, dict[str, bench_lib.DrafterFactory], Verifier]:
    """The benchmark of ``drafts``, `bench.drafts` and `bench.drafters`, with its drafters by name and its verifier.
    ``prompts``: `bench.prompts` of them are timed, the others tune."""
    settings, loaded = config.bench, {**drafts, **_from_disk(config, target)}
    for draft in loaded.values():
        refuse_longer(draft, settings.max_k, "bench.ks, bench.batch_ks")
    factories = {name: _of_length(draft) for name, draft in loaded.items()}
    factories |= {kind: registered(kind, [*(drafts or loaded).values()]) for kind in settings.drafters}
    verifier = registry.build(registry.VERIFIERS, config.verifier, "verifier")
    rest = (verifier, config.sampling.options(), config.seed)
    timed, tuning = prompts[: settings.prompts], prompts[settings.prompts :]
    return bench_lib.Bench(target, factories, settings, timed, tuning, *rest), factories, verifier


def counting(progress: StepProgress | None) -> Callable[[], None]:
    """A function without arguments that tells ``progress`` how often it was called."""
    done = itertools.count(1)
    return (lambda: progress(next(done), {})) if progress else (lambda: None)


def passes(
    bench: bench_lib.Bench,
    settings: Bench,
    primary: str,
    headlines: Mapping[float, Mapping[str, Any]],
    target: LoadedModel,
) -> Iterator[Pass]:
    """Passes beside the device's roofline, at the first temperature: those of batch 1, and whole blocks of every batch
    that was decoded with chosen lengths."""
    temperature, headline = next(iter(headlines.items()))
    device, own = this_device(target), Shape(target.config)
    longest = {size: max(settings.ks_of(size)) for size in settings.batch_sizes}
    k = headline["k"]
    engine, params = bench.decoder(primary, k).engine(temperature == 0)
    draft, storage = Shape.of_drafter(engine, params), storage_of(params.target, engine.target.init_cache(1, 16))

    def work(batch: int, k: int) -> tuple[Work, Work]:
        slots = bucket(settings.prompt_tokens + settings.new_tokens + k + 1, LEAST_SLOTS)
        return own.work(batch, k + 1, slots, storage), draft.work(batch, 1, slots, storage) * k

    yield Pass("target, 1 token", 1, work(1, 0)[0], device, headline["ar_costs"]["target"])
    of_target, of_draft = work(1, k)
    yield Pass(f"target, {k + 1} tokens", 1, of_target, device, headline["costs"]["target"])
    yield Pass(f"draft of {k}", 1, of_draft, device, headline["costs"]["draft"])
    for size, most in longest.items() if settings.adaptive else ():
        rows = bucket(size)
        known = bench.decoder(bench_lib.ADAPTIVE, most).calibrations[temperature == 0, rows]
        for k in (0, most):
            of_target, of_draft = work(rows, k)
            name = f"block of {k}" if k else "block without a draft"
            yield Pass(name, size, of_target + of_draft, device, float(known.seconds[k]))


def num_ticks(config: RunConfig) -> int:
    """Number of times that `decoding_figures` reports progress, for a run's two drafts and all that is compared."""
    settings, prompts = config.bench, config.bench.prompts
    drafters = 2 + len(settings.drafts) + len(settings.drafters)
    return bench_lib.num_ticks(config.bench, drafters, prompts, _TUNING * prompts)


def check(config: RunConfig, prepared: inputs.Prepared) -> None:
    """Refuse, before any training, a config that `decoding_figures` could not decode."""
    settings, target = config.bench, prepared.target
    for drafter in _from_disk(config, target).values():
        drafter.bind(target)
    held_out_prompts(prepared.corpus.held_out, target, settings.prompt_tokens, (1 + _TUNING) * settings.prompts)
    needed = settings.prompt_tokens + settings.new_tokens + settings.max_k
    if needed > target.config.max_positions:
        raise DataError(
            f"bench: prompt_tokens={settings.prompt_tokens}, new_tokens={settings.new_tokens} and k={settings.max_k} "
            f"need {needed} positions, the target has {target.config.max_positions}; lower one of them"
        )
    request.prepare(target, settings.max_k, [[0]], settings.new_tokens, 0, True, config.sampling.options())


def held_out_prompts(documents: Sequence[Document], target: LoadedModel, length: int, count: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens from inside held-out documents, in the order of their content hashes:
    first from the middle of each, then from other positions. Raises `DataError` if there is too little text."""
    return [prompt.tokens for prompt in _prompts(documents, target, length, count)]


def most_prompts(documents: Sequence[Document], target: LoadedModel, length: int, most: int) -> int:
    """Number of prompts, up to ``most``, that a benchmark on these documents can time beside those that tune."""
    found = cut_prompts(for_benchmark(documents), target.tokenizer, length, (1 + _TUNING) * most)
    return len(found) // (1 + _TUNING)


def _prompts(documents: Sequence[Document], target: LoadedModel, length: int, count: int) -> list[HeldOutPrompt]:
    found = cut_prompts(for_benchmark(documents), target.tokenizer, length, count)
    if len(found) < count:
        raise DataError(
            f"the held-out text gives {len(found)} prompts of {length} tokens, bench needs {count}; use more text, "
            "a larger data.held_out, or a smaller bench.prompts or bench.prompt_tokens"
        )
    return found


def _from_disk(config: RunConfig, target: LoadedModel) -> dict[str, Drafter]:
    return {name: load_drafter(at, target) for name, at in config.bench.drafts.items()}


def _of_length(drafter: Any) -> bench_lib.DrafterFactory:
    return lambda k: dataclasses.replace(drafter, k=k)


def registered(kind: str, drafts: Sequence[Drafter] = ()) -> bench_lib.DrafterFactory:
    """Factory, k -> drafter, of a registered kind; a hybrid asks the last of ``drafts``. Raises `ConfigError` for an
    unknown kind, and for a hybrid without a draft."""
    drafter = registry.resolve(registry.DRAFTERS, kind, "bench.drafters")
    if not issubclass(drafter, Hybrid):
        return lambda k: drafter(k=k)
    if not drafts:
        raise ConfigError("bench.drafters: a hybrid needs a draft; train one, or give bench.drafts={name: DIRECTORY}")
    of_length = _of_length(drafts[-1])
    return lambda k: drafter(of_length(k), k)


def _figures(measured: Mapping[str, Any], target: LoadedModel) -> dict[str, Any]:
    """The flat summary of a benchmark. Overheads and prediction errors are the worst over the measured temperatures."""
    greedy, sampled = (measured["headline"].get(t) for t in (GREEDY, SAMPLED))
    figures: dict[str, Any] = {}
    for suffix, headline in (("greedy", greedy), ("t1", sampled)):
        if headline is not None:
            tail = "" if suffix == "greedy" else "_t1"
            figures |= {
                f"speedup_{suffix}": headline["speedup"],
                f"speedup_predicted_{suffix}": headline["speedup_predicted"],
                f"best_k_{suffix}": headline["k"],
                f"{suffix}_top_k": headline["top_k"],
                f"{suffix}_top_speedup": headline["top_speedup"],
                f"ar_tokens_per_s{tail}": headline["ar_tokens_per_s"],
                f"spec_tokens_per_s{tail}": headline["spec_tokens_per_s"],
                f"ar_overhead_{suffix}": headline["ar_overhead"],
                f"step_overhead_{suffix}": headline["step_overhead"],
                f"step_overhead_apart_{suffix}": headline["step_overhead_apart"],
                f"costs_ms_{suffix}": {
                    "autoregressive": _milliseconds(headline["ar_costs"]),
                    "speculative": _milliseconds(headline["costs"]),
                },
            }
    figures |= {f"pass_of_{tokens}": ratio for tokens, ratio in measured["passes"].items()}
    headlines = measured["headline"].values()
    figures["ar_overhead"] = max(h["ar_overhead"] for h in headlines)
    figures["step_overhead"] = max(h["step_overhead"] for h in headlines)
    figures["step_overhead_apart"] = max(h["step_overhead_apart"] for h in headlines)
    # With tau of the tuning prompts, then of the timed ones: the second error is that of the costs alone.
    for tail in ("", "_in_sample"):
        predicted = f"speedup_predicted{tail}"
        figures[predicted.replace("predicted", "predicted_error")] = max(
            abs(h[predicted] / h["speedup"] - 1) for h in headlines
        )
    compared = [row for row in measured["decoding"] if row["identical"] is not None]
    differences = [found for row in compared for found in row["differences"]]
    if compared:
        figures["greedy_identical"] = all(row["identical"] for row in compared)
        figures["greedy_differences"] = len(differences)
        figures["greedy_largest_margin"] = max((d["margin"] for d in differences), default=0.0)
    if greedy is not None:
        share, bandwidth = bench_lib.memory_floor_share(target, greedy["ar_tokens_per_s"])
        figures |= {"memory_floor_share": share, "stream_gb_per_s": bandwidth}
    return figures


def comparison(measured: Mapping[str, Any], sources: Sequence[str]) -> list[dict[str, Any]]:
    """Rows that compare all drafters, at the best k of the last draft, with plain decoding at batch 1, by source."""
    by_prompt: Mapping[bench_lib.Cell, Any] = measured["by_prompt"]
    found = []
    for source in figures_lib.shown(sources):
        chosen = [i for i, own in enumerate(sources) if source in (own, figures_lib.ALL)]
        for temperature, k in measured["best_k"].items():
            for cell in by_prompt:
                adaptive = cell.drafter == bench_lib.ADAPTIVE
                if (cell.temperature, cell.batch_size) == (temperature, 1) and (cell.k in (0, k) or adaptive):
                    seconds, stats = zip(*(by_prompt[cell][i] for i in chosen), strict=True)
                    # The median turn, as in the grid: over all prompts it is the grid's number.
                    turn = float(np.median(np.sum(seconds, axis=0)))
                    speed = metrics.tokens_per_s(sum(s.emitted for s in stats), turn)
                    row = figures_lib.compared(
                        source, temperature, cell.drafter, None if adaptive else cell.k or None, stats, speed, None
                    )
                    found.append(dataclasses.asdict(row))
    return found


def _milliseconds(costs: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * seconds for name, seconds in costs.items()}


def _sample(
    bench: bench_lib.Bench,
    primary: str,
    best_k: Mapping[float, int],
    prompt: Sequence[int],
    target: LoadedModel,
    new_tokens: int,
    sampling: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    temperature, k = list(best_k.items())[-1]
    decoder: Decoder = bench.decoder(primary, k)
    options = {"temperature": temperature, **sampling}
    result = decoder.generate([prompt], max_new_tokens=new_tokens, seed=seed, ignore_eos=True, **options)
    return {
        "prompt": target.tokenizer.decode(prompt),
        "pieces": [dataclasses.asdict(piece) for piece in result.pieces(0)],
        "drafter": primary,
        "k": k,
        "temperature": temperature,
        "backend": jax.default_backend(),
    }
