"""The commands of `specjax`. Heavy imports wait until a command needs them, so that `--help` and mistakes in arguments
answer at once."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from specjax.cli.entry import ConfigPath, Overrides
from specjax.cli.options import OPTION_NAMES, app, command, with_sampling_options
from specjax.config.recipe import Kind
from specjax.errors import ConfigError, SpecjaxError
from specjax.models.files import plain_json, write_atomically
from specjax.report.labels import counted
from specjax.runtime import memory

_SHARD_GB = 5.0
CheckFinite = Annotated[bool, typer.Option("--check-finite/--no-check-finite", help="Refuse NaN and infinite weights.")]


@command()
@with_sampling_options
def generate(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="Target: a Hugging Face directory, hub id or GGUF file.")],
    draft: Annotated[
        str | None, typer.Option(help="Draft: a Hugging Face directory, hub id, GGUF file or run directory.")
    ] = None,
    ngram: Annotated[
        bool,
        typer.Option(
            "--ngram", help="Draft by n-gram prompt lookup; with --draft, ask the draft only where it finds nothing."
        ),
    ] = False,
    k: Annotated[
        int | None, typer.Option("-k", min=1, max=64, help="Draft length.", show_default="5, or what the draft can")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated.")] = None,
    prompt_file: Annotated[list[Path] | None, typer.Option(help="File with one prompt; may be repeated.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message, in the target's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message before each prompt.")] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Sample as generation_config.json says, where no option does.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    verifier: Annotated[str, typer.Option(help="Which part of a block is kept.")] = "speculative",
    controller: Annotated[
        str, typer.Option(help="How much is drafted: adaptive, by measured costs; fixed, always k; others in docs.")
    ] = "adaptive",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of the weights.", show_default="float32 on CPU, bfloat16 on accelerators"),
    ] = None,
    quantize: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(help="Number format of the target's kernels; the result is another model."),
    ] = None,
    quantize_draft: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(help="Number format of the draft's kernels; the draft may be the target itself."),
    ] = None,
    kv_cache: Annotated[
        Literal["int8"] | None, typer.Option(help="Keep the target's keys and values so: another model, too.")
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each prompt fed at a time.", show_default="by the batch")
    ] = None,
    check_finite: CheckFinite = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text, with the metrics of each request.")
    ] = False,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write metrics, as JSON lines: of each request and in sum.")
    ] = None,
    price_per_hour: Annotated[
        float | None,
        typer.Option(min=0, help="Price of an hour of the machine, in any currency, for the cost of a request."),
    ] = None,
    logprobs: Annotated[
        Literal["raw", "processed"] | None,
        typer.Option(help="Log-probabilities of the tokens, with --json: before or after sampling."),
    ] = None,
    no_color: Annotated[bool, typer.Option("--no-color")] = False,
    **sampling: Any,
) -> None:
    """Continue prompts. One prompt is streamed, with every token coloured by who chose it."""
    if k is not None and draft is None and not ngram:
        raise typer.BadParameter(f"-k {k} needs a drafter; add --draft DIR or --ngram")
    if quantize_draft is not None and draft is None:
        raise typer.BadParameter(f"--quantize-draft {quantize_draft} needs --draft DIR")
    if not prompt and not prompt_file:
        raise typer.BadParameter("no prompt; add --prompt TEXT or --prompt-file FILE")
    if system is not None and not chat:
        raise typer.BadParameter("--system is a message of a chat; add --chat")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs are printed with --json only; add it")
    if price_per_hour is not None and not price_per_hour < float("inf"):
        raise typer.BadParameter(f"--price-per-hour {price_per_hour}: give a number")
    with _programs_kept():
        from specjax.jobs import generate as job

        _check_file(metrics, "--metrics")
        named = [(f"--prompt {i}", text) for i, text in enumerate(prompt or [], 1)]
        named += [(f"--prompt-file {file}", job.read_prompt(file)) for file in prompt_file or []]
        loading = {"dtype": dtype, "check_finite": check_finite, "quantize": quantize, "kv_cache": kv_cache}
        how = {"verifier": verifier, "controller": controller, "prefill_chunk": prefill_chunk}
        typed = {"max_new_tokens": max_new_tokens, **sampling, "stop": stop, "logprobs": logprobs, "seed": seed}
        typed |= {"ignore_eos": ignore_eos, "logit_bias": job.biases(sampling["logit_bias"] or [])}
        names = {option: name for name, option in OPTION_NAMES.items()} | {"stop": "stop_strings"}
        options = {names.get(option, option): value for option, value in typed.items()}
        if defaults:
            sources = {names.get(option, option): context.get_parameter_source(option) for option in typed}
            own = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
            options |= job.defaults(own, target)
        job.tell_memory(target, draft, loading, [text for _, text in named], options["max_new_tokens"])
        decoder = job.decoder(target, draft, ngram, k, how, loading, quantize_draft)
        if not chat:
            job.refuse_empty(named, decoder)
        prompts = job.Prompts([text for _, text in named], chat, system)
        job.generate(decoder, prompts, options, verifier, job.Shown(as_json, no_color, metrics, price_per_hour))


@command(resumes=True, stops=True)
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Distill a draft for a target, as train_draft.py does. Resumable; leaves the draft in the config's `out`/draft.

    Exit status: 2 for errors that you can correct, 130 after Ctrl-C, 143 after SIGTERM, which saves the step under way
    first."""
    from specjax.jobs.train import train

    train(config, overrides or [])


@command(resumes=True, stops=True)
def distill(
    target: Annotated[str, typer.Argument(help="Chat model: directory, hub id or GGUF file.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory of all that the job leaves.")],
    minutes: Annotated[float, typer.Option(min=1, help="Time to take on this machine.")] = 60,
    kind: Annotated[Kind, typer.Option(help="Kind of draft.")] = "eagle3",
    data: Annotated[str | None, typer.Option(metavar="PATH", help="Chats or text of your own to mix in.")] = None,
    share: Annotated[float, typer.Option(min=0.01, max=0.99, help="Share of that text.")] = 0.5,
    chats: Annotated[
        str | None, typer.Option(metavar="DIR", help="The target's chats, which several jobs may share.")
    ] = None,
) -> None:
    """Make a draft for a chat model from nothing but the model: let it write chats, distill, decode, report. Resumable.

    Exit status: 2 for errors that you can correct, 130 after Ctrl-C, 143 after SIGTERM."""
    from specjax.jobs.recipe import distill_target

    distill_target(target, str(out), minutes, kind, data, share, chats)


@command(resumes=True, stops=True)
def run(config: ConfigPath, overrides: Overrides = None) -> None:
    """Distill a draft, decode with it, and report: the whole job. Resumable; leaves everything in the config's `out`.

    Exit status: 2 for errors that you can correct, 130 after Ctrl-C, 143 after SIGTERM."""
    from specjax.jobs.sweep import run_one

    run_one(_load(config, overrides))


@command(resumes=True, stops=True)
def sweep(config: ConfigPath, overrides: Overrides = None) -> int:
    """Run every point of a config's `sweep`, each into `out`/ID; `out`/results.jsonl has one line a run. Resumable.

    Exit status: 1 if a run failed, 2 for errors that you can correct, 130 after Ctrl-C, 143 after SIGTERM."""
    from specjax.jobs.sweep import run_or_sweep

    return run_or_sweep(config, overrides or [])


@command(resumes=True, stops=True)
def demo(overrides: Overrides = None) -> None:
    """Distill a draft for the shipped target, decode with it, and report, as `make demo` does in a clone."""
    from specjax.jobs.demo import run_demo

    run_demo(overrides or [])


@command()
def bench(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Also write the results to this file, as JSON.")] = None,
) -> None:
    """Time the decoding of held-out prompts over the config's grid, against the autoregressive loop."""
    settings = _load(config, overrides)
    _check_file(out)
    from specjax.jobs.bench import run_bench
    from specjax.report.terminal import decoding_table

    results = _with_bars(settings, run_bench)
    console = Console()
    console.print(decoding_table(results["decoding"]))
    figures = results.get("figures", {})
    shown = [f"{name} {figures[name]:.2f}" for name in ("speedup_greedy", "speedup_t1") if name in figures]
    console.print(", ".join(shown) or "no temperature of 0 or 1: no headline speedup")
    rule = results.get("verifier", {})
    if rule.get("lossless") is False:
        far = f"total variation {rule['total_variation']:.3f} from the target's distribution over 16 cells"
        console.print(f"verifier {rule['kind']!r} is lossy: {far}", soft_wrap=True)
    if out is not None:
        _write_json(out, results)


@command()
def calibrate(
    config: ConfigPath,
    overrides: Overrides = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what is known.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the costs as JSON instead of a table.")] = False,
) -> None:
    """Measure the costs of passes of target and drafters here, and store them for plans and adaptive runs."""
    settings = _load(config, overrides)
    from specjax.jobs.calibrate import run_calibrate
    from specjax.report.planning import calibration_table

    found = _with_bars(settings, run_calibrate, again)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, default=plain_json))
        return
    console = Console(highlight=False)
    console.print(calibration_table(found.model, found.kept))
    console.print(found.summary, soft_wrap=True)


@command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.yaml", help="Preset or description.", show_default="this one")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also decode the grid, and train a few steps.")] = False,
    alpha: Annotated[
        float | None, typer.Option(min=0, max=1, help="Assume this acceptance.", show_default="counted by decoding")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write plan.json and plan.png there.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Only what fits: bytes of every job, nothing loaded.")
    ] = False,
) -> None:
    """Predict, for this device or another, the fastest drafter and length, and how good a draft must be to pay."""
    if measure and device is not None:
        raise typer.BadParameter(f"--measure decodes here, not on --device {device}; leave one of them out")
    settings = _load(config, overrides)
    _check_directory(out, "plan")
    if memory:
        _print_memory(settings, device, as_json)
        return
    from specjax.jobs.plan import run_plan
    from specjax.report.planning import print_plan, write_plan

    found = _with_bars(settings, run_plan, device, measure, alpha)
    if as_json:
        print(json.dumps(found.to_json(), indent=1, default=plain_json))
    else:
        print_plan(found, Console(highlight=False))
    if out is not None:
        write_plan(found, out)


def _print_memory(settings: Any, device: str | None, as_json: bool) -> None:
    from specjax.costs.devices import device_of
    from specjax.jobs.memory import run_budget
    from specjax.report.planning import memory_table

    found = run_budget(settings, None if device is None else device_of(device))
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        Console(highlight=False).print(memory_table(found.footprints, found.limit))
    found.check()


@command()
def numerics(
    config: ConfigPath,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens a prompt.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Also write the results to this file, as JSON.")] = None,
) -> None:
    """Compare the target's logits between ways to compute them: dtype, batch size, single tokens or blocks."""
    settings = _load(config, overrides)
    _check_file(out)
    from specjax.jobs.numerics import run_numerics
    from specjax.report.terminal import numerics_table

    results = _with_bars(settings, run_numerics, prompts, tokens)
    Console().print(numerics_table(results["comparisons"]))
    if out is not None:
        _write_json(out, results)


@command()
def certify(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for certificate.json and certificate.md.", show_default="the run's")
    ] = None,
) -> int:
    """Prove, for the config's target, drafter, verifier and sampling parameters, that the output is the target's.

    Exit status 1 if a check fails."""
    settings = _load(config, overrides)
    directory = Path(settings.out) if out is None else out
    _check_directory(directory, "certificate")
    from specjax.jobs.certify import run_certify

    certificate = _with_bars(settings, run_certify)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "certificate.json", certificate.to_json())
    write_atomically(directory / "certificate.md", certificate.to_markdown())
    console = Console(highlight=False)
    for check in certificate.checks:
        mark = {True: "pass", False: "FAIL", None: "    "}[check.passed]
        console.print(f"{mark}  {check.name}: {check.summary}", soft_wrap=True)
    console.print(f"{certificate.verdict}  ({directory / 'certificate.md'})", soft_wrap=True)
    return int(certificate.verdict == "FAIL")


@command("generate-data", resumes=True)
def generate_data(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the shards.", show_default="the run's")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft that helps: a directory or hub id.", show_default="the run's, if any")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Of the target's chats, write only part I of N, counted from 1.", show_default="all"
        ),
    ] = None,
) -> None:
    """Let the target write the data that the config's distillation trains on. Resumable."""
    from specjax.data.self_chat import summary
    from specjax.jobs.generate_data import make_chats, make_data, writes_chats

    settings = _load(config, overrides)
    if writes_chats(settings, shard):
        made = _with_bars(settings, make_chats, out, _share(shard))
        missing = ", ".join(map(str, made["missing"]))
        told = f"shards that other parts write, or missing: {missing}" if missing else summary(made)
        print(f"{made['directory']}: {told}")
        return
    made = _with_bars(settings, make_data, out, draft)
    shards = counted(len(made["shards"]), "shard")
    counts = f"{counted(made['sequences'], 'sequence')}, {made['emitted']:,} tokens in {shards}"
    print(f"{made['directory']}: {counts}, block efficiency {made['block_efficiency']:.2f}")


def _share(shard: str | None) -> tuple[int, int]:
    """(number of the part from 0, number of parts) of an option such as 2/8."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", shard or "1/1")
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--shard: {shard!r}; give the part and the number of parts, from 1/8 to 8/8")
    return int(found[1]) - 1, int(found[2])


@command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a finished run.")],
) -> None:
    """Write a run's report anew: summary.json, report.md and a self-contained report.html."""
    from specjax.report import build

    print(build(run_dir))


@command()
def export(
    source: Annotated[str, typer.Argument(help="Model directory, hub id, GGUF file, or run directory (its draft).")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of the weights.", show_default="as stored"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model directory that is there.")] = False,
    check_finite: CheckFinite = True,
    max_shard_gb: Annotated[float, typer.Option(min=0.001, help="Most gigabytes of weights in a file.")] = _SHARD_GB,
    format: Annotated[
        str | None,
        typer.Option(
            help="Form of a draft that reads hidden states: speculators, sglang, z-lab, deepspec, medusa or specjax."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="With --format: the draft's target, a directory or hub id.")
    ] = None,
) -> None:
    """Write a model as a directory that transformers, vLLM and SGLang load. A model card that is there is kept.

    With --format, a draft that reads its target's hidden states, as other projects store it."""
    from specjax.formats import convert, refuse_without_form
    from specjax.models.export import export_model

    if format is not None:
        from specjax.errors import ConfigError
        from specjax.models.hf import load_model

        if target is None:
            raise ConfigError("--target: missing; with --format it names the model that the draft was made for")
        if max_shard_gb != _SHARD_GB:
            raise ConfigError("--max-shard-gb: is for models; a draft that reads hidden states is written as it is")
        of_source: dict[str, Any] = {"dtype": dtype, "revision": revision, "check_finite": check_finite}
        kind = convert(source, directory, load_model(target), format, overwrite, **of_source)
        print(f"{directory}: {kind} draft, as {format}")
        return

    refuse_without_form(source)
    size = int(max_shard_gb * 10**9)
    options = {"dtype": dtype, "revision": revision, "overwrite": overwrite, "max_shard_bytes": size}
    model = export_model(source, directory, check_finite=check_finite, **options)
    files = counted(len(list(directory.glob("*.safetensors"))), "file")
    print(f"{directory}: {model.parameter_count:,} parameters in {dtype or model.dtype}, weights in {files}")


@command()
def doctor() -> int:
    """Say what specjax runs on here: versions, devices, memory, the compile cache, and what is missing for which extra.

    Exit status 1 if something is missing that specjax itself needs."""
    from specjax.jobs.doctor import doctor

    return int(not doctor(Console(highlight=False, markup=False)))


@command()
def schema() -> None:
    """Print the JSON Schema of config files, for editors."""
    from specjax.config import json_schema

    print(json.dumps(json_schema(), indent=2))


def main() -> None:
    """The `specjax` console script."""
    memory.one_heap()
    app(prog_name="specjax")


def _load(config: Path, overrides: list[str] | None) -> Any:
    from specjax.config.shipped import load

    return load(config, overrides or [])


def _with_bars(settings: Any, job: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a job, with progress bars on stderr; compiled programs are kept if the config says so."""
    from specjax.runtime.progress import console_bars

    with _programs_kept(settings.compile_cache):
        return job(settings, *arguments, console_bars(Console(stderr=True)))


def _write_json(file: Path, value: Any) -> None:
    write_atomically(file, json.dumps(value, indent=1, default=plain_json) + "\n")


def _check_directory(out: Path | None, what: str) -> None:
    """Refuse, before anything is measured, an ``--out`` that is no directory."""
    if out is not None and out.exists() and not out.is_dir():
        raise SpecjaxError(f"--out {out}: not a directory; the {what} goes there, give another")


def _check_file(out: Path | None, option: str = "--out") -> None:
    """Refuse, before anything is measured, a file of an ``option`` that cannot be written."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise SpecjaxError(f"{option} {out}: not a file in an existing directory; nothing could be written there")


@contextlib.contextmanager
def _programs_kept(wanted: bool = True) -> Iterator[None]:
    from specjax.runtime.compile_cache import programs_kept

    with programs_kept(wanted):
        yield


if __name__ == "__main__":
    main()
