"""Destinations of a run's training records besides its JSON lines: TensorBoard, Weights & Biases. Each is an extra,
imported when the config asks for it."""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from specjax import config
from specjax.errors import ConfigError
from specjax.models.files import write_atomically
from specjax.runtime.progress import Bars, StepProgress


class Sink(Protocol):
    """Destination of the records of `specjax.runtime.log.read_log`, one stage after the other."""

    def begin(self, stage: str, step: int) -> None:
        """Announce the records of ``stage`` from ``step`` on; those that an interrupted run wrote are void."""
        ...

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in ``directory``, with one of TensorBoard's runs for each stage."""

    def __init__(self, directory: Path):
        self._writer = _extra("tensorboardX", "logging.tensorboard", "tensorboard").SummaryWriter
        self._directory = directory
        self._open: Any = None

    def begin(self, stage: str, step: int) -> None:
        self.close()
        # Files are named by the second, and one of the same name would be overwritten.
        self._open = self._writer(str(self._directory / stage), purge_step=step, filename_suffix=f".{step}")

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._open.add_scalar(name, value, step)
        self._open.flush()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


class Wandb:
    """One run of Weights & Biases for all stages, with its files in ``directory``; it resumes under the same id.
    ``run``: its config, in which a few fields may differ when it resumes."""

    def __init__(self, settings: config.Wandb, directory: Path, run: Mapping[str, Any]):
        wandb = _extra("wandb", "logging.wandb", "wandb")
        file = directory / "wandb.id"
        if not file.exists():
            write_atomically(file, uuid.uuid4().hex, alone=True)
        again = {"id": file.read_text(), "resume": None if settings.mode == "offline" else "allow"}
        name = settings.name or directory.name
        where = {"project": settings.project, "name": name, "mode": settings.mode, "dir": str(directory)}
        try:
            self._run = wandb.init(**where, **again, config=dict(run), allow_val_change=True)
        except wandb.Error as error:
            what = str(error).rstrip(".")
            raise ConfigError(f"logging.wandb: {what}; run `wandb login`, or set mode=offline") from None

    def begin(self, stage: str, step: int) -> None:
        # A step that is written twice is drawn once: the axis is the stage's own step.
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{stage}/{name}": value for name, value in {"step": step, **values}.items()})

    def close(self) -> None:
        self._run.finish()


@contextlib.contextmanager
def recorded(
    settings: config.Logging, directory: Path, bars: Bars, run: Mapping[str, Any] | None = None
) -> Iterator[Bars]:
    """``bars`` that also send the records of stages to the destinations in ``settings``; files go under ``directory``.
    ``run``: the whole config, for destinations that show it.

    Raises `ConfigError` naming the extra that is not installed.
    """
    sinks: list[Sink] = []
    with contextlib.ExitStack() as stack:
        if settings.tensorboard:
            sinks.append(TensorBoard(directory / "tensorboard"))
        if settings.wandb is not None:
            sinks.append(Wandb(settings.wandb, directory, run or {}))
        for sink in sinks:
            stack.callback(sink.close)
        yield _recording(bars, sinks) if sinks else bars


def _recording(bars: Bars, sinks: list[Sink]) -> Bars:
    @contextlib.contextmanager
    def recording(name: str, steps: int) -> Iterator[StepProgress]:
        begun = False
        with bars(name, steps) as progress:

            def show(step: int, record: dict[str, float]) -> None:
                nonlocal begun
                # A record is shown until the next one; the evaluation, which is no stage, has none.
                if record.get("step") == step:
                    for sink in sinks:
                        if not begun:
                            sink.begin(name, step)
                        sink.write(name, step, {key: value for key, value in record.items() if key != "step"})
                    begun = True
                if progress is not None:
                    progress(step, record)

            yield show

    return recording


def _extra(module: str, field: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"{field}: needs {module}, which is not installed; pip install 'specjax[{extra}]'") from None
