from __future__ import annotations

import struct
import sys
import types

import pytest

from specjax import config
from specjax.errors import ConfigError
from specjax.jobs import distill as job
from specjax.runtime import sinks
from specjax.runtime.progress import no_bars
from tests.training import toys
from tests.training.toys import Interrupt


def trained(bars, directory, stop=None):
    """The toy stage as the job runs it, interrupted after step ``stop``."""
    with bars("distill", 12) as progress:

        def show(step, record):
            progress(step, record)
            if step == stop:
                raise Interrupt

        toys.train(directory, show)


RESTART = "restart"


class FakeRun:
    def __init__(self, calls, **settings):
        self.calls, self.settings = calls, settings

    def define_metric(self, name, step_metric):
        self.calls.append(("axis", name, step_metric))

    def log(self, values):
        self.calls.append(("log", values))

    def finish(self):
        self.calls.append(("finish",))


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package: (settings of each run, calls)."""
    runs, calls = [], []

    def init(**settings):
        runs.append(settings)
        return FakeRun(calls, **settings)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Error=RuntimeError))
    return runs, calls


def test_wandb_gets_every_record_once_under_its_stage_and_the_run_goes_on(wandb, tmp_path):
    runs, calls = wandb
    settings = config.Logging(wandb=config.Wandb(project="p"))
    with pytest.raises(Interrupt), sinks.recorded(settings, tmp_path, no_bars) as bars:
        trained(bars, tmp_path / "stage", stop=7)
    with sinks.recorded(settings, tmp_path, no_bars) as bars:
        trained(bars, tmp_path / "stage")
    assert runs[0]["id"] == runs[1]["id"]
    assert (runs[0]["project"], runs[0]["name"], runs[0]["resume"]) == ("p", tmp_path.name, "allow")
    logged = [call[1] for call in calls if call[0] == "log"]
    assert [values["distill/step"] for values in logged] == [5, 6, 6, 10, 12]
    assert {"distill/loss", "distill/tokens"} <= set(logged[0])
    assert [call for call in calls if call[0] == "axis"] == 2 * [("axis", "distill/*", "distill/step")]
    assert [call[0] for call in calls].count("finish") == 2


def test_wandb_gets_the_config_of_the_run(wandb, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "distill", lambda *args: None)
    logged = config.Logging(wandb=config.Wandb())
    target, data = config.Target(path="t"), config.Data(path="d")
    job.run(config.RunConfig(target=target, data=data, logging=logged, out=str(tmp_path)))
    ((settings,), _) = wandb
    assert settings["config"]["distill"]["optimizer"]["learning_rate"] == 3e-3
    assert (settings["config"]["target"]["path"], settings["config"]["out"]) == ("t", str(tmp_path))
    assert settings["allow_val_change"]  # `steps` may be raised


def test_tensorboard_gets_every_record_and_drops_what_an_interrupted_run_wrote(tmp_path):
    pytest.importorskip("tensorboardX")
    settings = config.Logging(tensorboard=True)
    with pytest.raises(Interrupt), sinks.recorded(settings, tmp_path, no_bars) as bars:
        trained(bars, tmp_path / "stage", stop=7)
    with sinks.recorded(settings, tmp_path, no_bars) as bars:
        trained(bars, tmp_path / "stage")
    steps = {}
    for event in sorted((tmp_path / "tensorboard" / "distill").iterdir()):
        for step, name in scalars(event):
            steps.setdefault(name, []).append(step)
    assert steps["loss"] == [5, 6, 6, 10, 12]
    assert steps["alpha"] == [6, 6, 12]
    assert steps[RESTART] == [5, 6]


def scalars(file):
    """(step, tag) of every scalar of an event file, and (step, RESTART) where TensorBoard is told to drop the rest."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    content, place = file.read_bytes(), 0
    while place < len(content):
        (size,) = struct.unpack_from("<Q", content, place)
        event = Event.FromString(content[place + 12 : place + 12 + size])
        place += size + 16
        if event.HasField("session_log"):
            yield event.step, RESTART
        for value in event.summary.value:
            yield event.step, value.tag


@pytest.mark.parametrize(
    ("module", "settings"),
    [("tensorboardX", {"tensorboard": True}), ("wandb", {"wandb": config.Wandb()})],
)
def test_a_missing_extra_is_named_before_anything_is_trained(module, settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with (
        pytest.raises(ConfigError, match=rf"logging\.{next(iter(settings))}: needs {module}.*specjax\["),
        sinks.recorded(config.Logging(**settings), tmp_path, no_bars),
    ):
        pass


def test_without_sinks_the_bars_are_those_given(tmp_path):
    with sinks.recorded(config.Logging(), tmp_path, no_bars) as bars:
        assert bars is no_bars


def test_what_is_no_stage_is_not_recorded(wandb, tmp_path):
    with sinks.recorded(config.Logging(wandb=config.Wandb()), tmp_path, no_bars) as bars, bars("evaluation", 2) as show:
        assert show is not None
        show(1, {})
    assert wandb[1] == [("finish",)]
