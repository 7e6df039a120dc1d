"""What `specjax train` and `specjax demo` do, where they find configs (beside a clone, or in the package), and what
`specjax generate` is made of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.errors import ConfigError, DataError, ModelError, SpecjaxError

if TYPE_CHECKING:
    import typer

    from specjax.config import RunConfig

_REPOSITORY = "https://github.com/specjax/specjax"
_DEMO_TARGET = "models/demo-target"
_DEMO_FILES = (f"{_DEMO_TARGET}/config.json", "configs/demo.yaml", "experiments/run.py")


def train(config: Path, overrides: Sequence[str]) -> None:
    """The distillation job of a config, and what it measured. Several processes of one job all call it."""
    from rich.console import Console
    from rich.table import Table

    from specjax.distill import teacher_cache
    from specjax.jobs import distill as job
    from specjax.report.terminal import comparison_table
    from specjax.runtime import distributed
    from specjax.runtime.compile_cache import programs_kept
    from specjax.runtime.progress import console_bars, no_bars

    settings = load(config, overrides)
    console = Console()
    with programs_kept(settings.compile_cache):
        distributed.start(settings.distributed)
        result = job.run(settings, console_bars(console) if distributed.is_first() else no_bars)
    if not distributed.is_first():
        return
    measures = result.measures
    table = Table("held out", "loss (nats a token)", "alpha", title=f"{measures.positions:,} positions")
    table.add_row("target", f"{measures.target_nll:.4f}", "")
    table.add_row("draft before", f"{measures.draft_nll:.4f}", f"{measures.alpha_before:.4f}")
    table.add_row("draft distilled", f"{measures.draft_nll_after:.4f}", f"{measures.alpha_after:.4f}")
    if measures.alpha_ce_control is not None:
        table.add_row("cross-entropy control", "", f"{measures.alpha_ce_control:.4f}")
    console.print(table)
    if result.comparison:
        console.print(comparison_table(result.comparison))
    for cache in sorted(Path(settings.out).glob("*/teacher/provenance.json")):
        console.print(f"cached logits: {teacher_cache.summary(cache.parent)}", soft_wrap=True)
    console.print(f"draft: {Path(settings.out) / 'draft'}", soft_wrap=True)


def demo_command(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """(folder, command) of the demo: what `make demo` runs, in the clone that this package or the working directory is
    in. Raises `SpecjaxError` without a clone, whose target of 49 MB is no part of the package."""
    root = next((folder for folder in _folders() if all((folder / file).is_file() for file in _DEMO_FILES)), None)
    if root is None:
        raise SpecjaxError(
            f"demo: no clone of specjax here ({Path.cwd()}), and its target of 49 MB is no part of the package; "
            f"`git clone {_REPOSITORY}` and run `specjax demo` in it, or train a small target from nothing with "
            "`specjax train demo_from_scratch`"
        )
    return root, [sys.executable, "experiments/run.py", "configs/demo.yaml", *overrides]


def run_demo(overrides: Sequence[str]) -> None:
    """Becomes the demo's process, so that signals and the exit status are its own."""
    root, command = demo_command(overrides)
    os.chdir(root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    sys.stdout.flush()
    os.execv(command[0], command)


def load(config: Path, overrides: Sequence[str]) -> RunConfig:
    """The settings of a config (`config_file`). Raises `ConfigError` if its target is the demo's, outside of a clone:
    as the id of a hub it would be nobody's."""
    from specjax.config import load_config

    file = config_file(config)
    settings = load_config(file, overrides)
    if settings.target.path == _DEMO_TARGET and not Path(_DEMO_TARGET).exists():
        raise ConfigError(
            f"{file}: target.path {_DEMO_TARGET}, of 49 MB, is in clones of specjax only, and not here ({Path.cwd()}); "
            f"`git clone {_REPOSITORY}` and run this in its folder, or give your own: target.path=DIR"
        )
    return settings


def config_file(config: Path) -> Path:
    """``config`` if it is there; else the config of that name that comes with specjax, as in `train tiny`. Raises
    `ConfigError` with the names there are."""
    if config.is_file() or config.parent != Path() or config.suffix not in ("", ".yaml"):
        return config
    shipped = {file.stem: file for file in sorted(_shipped_configs())}
    if config.stem not in shipped:
        if config.exists():  # a directory, which says so when it is read
            return config
        known = f"; configs that come with specjax are {', '.join(shipped)}" if shipped else ""
        raise ConfigError(f"{config}: no such config file{known}")
    print(f"config: {shipped[config.stem]}", file=sys.stderr)
    return shipped[config.stem]


def _shipped_configs() -> Iterator[Path]:
    package = Path(__file__).parents[1]
    for folder in (package / "configs", package.parent / "configs"):  # of a wheel, of a clone
        if (folder / "schema.json").is_file():
            yield from folder.glob("*.yaml")
            return


def _folders() -> list[Path]:
    return [Path.cwd(), *Path.cwd().parents, Path(__file__).resolve().parents[2]]


# --- of `specjax generate` -------------------------------------------------------------------------------------------


def read_prompt(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"--prompt-file {path}: not UTF-8 (byte {error.start}); convert it, for example with iconv"
        ) from None


def refuse_empty(named: Sequence[tuple[str, str]], decoder: Any) -> None:
    """A prompt without a token, by the name that the user gave it; a tokenizer may begin every text with one."""
    for name, text in named:
        if not text and not decoder.target.tokenizer(text)["input_ids"]:
            raise DataError(f"{name}: empty, and a prompt needs at least one token; put text there, or leave it out")


def biases(given: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in (text.split("=") for text in given)}
    except ValueError:
        raise DataError(f"--logit-bias {' '.join(given)}: give ID=VALUE, as in --logit-bias 42=-1.5") from None


def decoder(target: str, draft: str | None, ngram: bool, k: int, verifier: str, loading: dict[str, Any]) -> Any:
    """For prompts of text; ``loading``: options of `specjax.load_model`."""
    import specjax

    drafter: Any = None
    if draft is not None:
        from specjax.models.hf import draft_of

        model = specjax.load_model(draft_of(draft), **loading)
        model.free_originals()
        drafter = specjax.DraftModel(model, k=k)
    elif ngram:
        drafter = specjax.NGram(k=k)
    model = specjax.load_model(target, **loading)
    if model.tokenizer is None:
        raise ModelError(
            f"{target}: holds no tokenizer, which a prompt of text needs; put its tokenizer.json and "
            "tokenizer_config.json there"
        )
    model.free_originals()
    return specjax.Decoder(model, drafter=drafter, verifier=verifier)


def defaults(context: typer.Context, target: str) -> dict[str, Any]:
    """What generation_config.json says and the command line does not; told on stderr."""
    from specjax.data.chat_template import generation_defaults

    found = generation_defaults(target)
    sources = {name: context.get_parameter_source(name) for name in found.values}
    own = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    applied = {name: value for name, value in found.values.items() if name not in own}
    told = ", ".join(f"{name} {value:g}" for name, value in applied.items()) or "nothing to apply"
    kept = f" (as given on the command line: {', '.join(own)})" if own else ""
    print(f"note: from {found.source}: {told}{kept}", file=sys.stderr)
    return applied
