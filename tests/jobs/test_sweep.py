from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import check_summary
import pytest

from specjax.errors import ConfigError, DataError, TrainingError
from specjax.jobs import sweep as sweeps
from specjax.runtime.artifact import exclusive
from tests import processes

BASE = "target: {path: models/target}\ndata: {path: python-stdlib}\n"
GOOD = {
    "target_nll": 1.5, "draft_nll": 2.0, "alpha_before": 0.7, "alpha_after": 0.8, "alpha_ce_control": 0.72,
    "alpha_after_at_5": 0.79,
    "alpha_positions": 50_000, "greedy_identical": True, "recompiles": 0, "peak_rss_gb": 3.2, "speedup_greedy": 1.2,
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path):
    """A sweep of three runs over the seed."""
    path = tmp_path / "sweep.yaml"
    path.write_text(f"{BASE}out: {tmp_path / 'out'}\nsweep: {{seed: [0, 1, 2]}}\n")
    return path


class Recorder:
    """Stands for the pipeline; fails for the seeds it is told to."""

    def __init__(self, failing=()):
        self.failing, self.seeds = set(failing), []

    def __call__(self, config):
        self.seeds.append(config.seed)
        if config.seed in self.failing:
            raise RuntimeError(f"seed {config.seed}\nwas unlucky")
        return {"alpha_after": 0.5 + config.seed, "out": config.out}


def results(sweep) -> list[dict]:
    return [json.loads(line) for line in (sweep.parent / "out/results.jsonl").read_text().splitlines()]


def test_every_run_leaves_one_line_with_its_summary(sweep):
    assert sweeps.run_or_sweep(sweep, [], Recorder()) == 0
    lines = results(sweep)
    assert [line["overrides"] for line in lines] == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert [line["summary"]["alpha_after"] for line in lines] == [0.5, 1.5, 2.5]
    assert all(line["status"] == "ok" and line["error"] is None and line["seconds"] >= 0 for line in lines)
    assert [line["summary"]["out"] for line in lines] == [str(sweep.parent / "out" / line["id"]) for line in lines]


def test_a_failing_run_is_recorded_and_does_not_stop_the_rest(sweep):
    recorder = Recorder(failing=[1])
    assert sweeps.run_or_sweep(sweep, [], recorder) == 1
    assert recorder.seeds == [0, 1, 2]
    first, failed, last = results(sweep)
    assert (first["status"], failed["status"], last["status"]) == ("ok", "failed", "ok")
    assert failed["error"] == "RuntimeError: seed 1 was unlucky"
    assert "Traceback" in (sweep.parent / "out" / failed["id"] / "error.txt").read_text()


def test_a_second_start_skips_finished_runs_and_retries_failed_ones(sweep):
    sweeps.run_or_sweep(sweep, [], Recorder(failing=[1]))
    again = Recorder()
    assert sweeps.run_or_sweep(sweep, [], again) == 0
    assert again.seeds == [1]
    assert [line["status"] for line in results(sweep)] == ["ok"] * 3
    assert not list((sweep.parent / "out").glob("*/error.txt"))


def test_an_exit_inside_a_run_is_a_failure_of_that_run(sweep):
    def leave(config):
        raise SystemExit(3)

    assert sweeps.run_or_sweep(sweep, [], leave) == 1
    assert [line["status"] for line in results(sweep)] == ["failed"] * 3


@pytest.mark.parametrize("line", [b'{"id": "\xff"}', b"5", b"{}", b'{"id'])
def test_a_damaged_record_is_named(line, tmp_path):
    (tmp_path / "results.jsonl").write_bytes(line + b"\n")
    with pytest.raises(DataError, match=r"results\.jsonl, line 1: not a record of a run; delete the line to run"):
        sweeps.read_records(tmp_path / "results.jsonl")


def test_ctrl_c_keeps_what_is_finished(sweep):
    def interrupted(config):
        if config.seed == 1:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        sweeps.run_or_sweep(sweep, [], interrupted)
    assert [line["overrides"] for line in results(sweep)] == [{"seed": 0}]
    again = Recorder()
    assert sweeps.run_or_sweep(sweep, [], again) == 0
    assert again.seeds == [1, 2]


def test_an_invalid_point_is_recorded_as_failed(sweep):
    sweep.write_text(sweep.read_text().replace("[0, 1, 2]", "[0, -1, 2]"))
    recorder = Recorder()
    assert sweeps.run_or_sweep(sweep, [], recorder) == 1
    assert recorder.seeds == [0, 2]
    assert "seed: found -1" in results(sweep)[1]["error"]


def test_a_wrong_sweep_leaves_nothing_behind(sweep):
    with pytest.raises(ConfigError):
        sweeps.run_or_sweep(sweep, ["distil.steps=3"], Recorder())
    assert not (sweep.parent / "out").exists()


def test_a_second_sweep_in_the_same_directory_is_refused(sweep):
    with exclusive(sweep.parent / "out"), pytest.raises(TrainingError, match="in use"):
        sweeps.run_or_sweep(sweep, [], Recorder())


def test_a_damaged_results_file_is_named_and_kept(sweep):
    damaged = sweep.parent / "out/results.jsonl"
    damaged.parent.mkdir()
    damaged.write_text("{}\n")
    with pytest.raises(DataError, match=r"results\.jsonl, line 1"):
        sweeps.run_or_sweep(sweep, [], Recorder())
    assert damaged.read_text() == "{}\n"


def test_without_sweep_the_run_goes_to_out_itself_and_its_figures_are_shown(sweep, capsys):
    seen = []
    assert sweeps.run_or_sweep(sweep, ["sweep=null"], lambda config: seen.append(config.out) or GOOD) == 0
    assert seen == [str(sweep.parent / "out")]
    assert not (sweep.parent / "out/results.jsonl").exists()
    assert "alpha_after" in capsys.readouterr().out


def test_the_script_answers_a_bad_config_with_one_line_and_status_2(sweep):
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "experiments/run.py"), str(sweep), "distill.steps=x"]
    done = processes.run(command, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def checked(tmp_path, *options: str, **changes) -> int:
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    return check_summary.main([*options, str(path)])


def test_a_summary_that_meets_every_bound_passes_whatever_its_timings(tmp_path, capsys):
    assert checked(tmp_path, speedup_greedy=0.3, tokens_a_call_t1_k3=2.9) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "speedup_greedy" in line] == ["missed"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"draft_nll": 1.69}, "nll_gap"),
        ({"alpha_after": 0.77}, "alpha_after"),
        ({"alpha_after": 0.799, "alpha_before": 0.6}, "alpha_after"),
        ({"alpha_after_at_5": 0.77}, "alpha_after_at_5"),
        ({"alpha_ce_control": 0.76}, "alpha_after"),
        ({"alpha_after": float("nan")}, "alpha_after"),
        ({"alpha_positions": 49_999}, "alpha_positions"),
        ({"greedy_identical": False}, "greedy_identical"),
        ({"greedy_identical": 1}, "greedy_identical"),
        ({"recompiles": 1}, "recompiles"),
        ({"recompiles": False}, "recompiles"),
        ({"recompiles": None}, "recompiles"),
        ({"peak_rss_gb": 6.1}, "peak_rss_gb"),
    ],
)
def test_a_missed_bound_fails_and_is_named(tmp_path, capsys, changes, named):
    assert checked(tmp_path, **changes) == 1
    assert f"error: {named} is" in capsys.readouterr().err


def test_a_short_demo_has_bounds_of_its_own(tmp_path, capsys):
    short = {"alpha_before": 0.74, "alpha_after": 0.795, "alpha_ce_control": 0.76, "alpha_after_at_5": 0.775}
    short["alpha_positions"] = 16_000
    assert checked(tmp_path, **short) == 1
    assert checked(tmp_path, "--short", **short) == 0
    capsys.readouterr()
    for name, value in {"alpha_after": 0.789, "alpha_before": 0.746, "alpha_ce_control": 0.766}.items():
        assert checked(tmp_path, "--short", **{**short, name: value}) == 1
        assert "error: alpha_after is" in capsys.readouterr().err


def test_a_whole_demo_needs_no_control_and_the_short_one_of_a_study_does(tmp_path, capsys):
    assert checked(tmp_path, alpha_ce_control=None) == 0
    assert "alpha_ce_control" not in capsys.readouterr().out
    assert checked(tmp_path, "--short", alpha_ce_control=None) == 1
    assert "alpha_ce_control was not measured; run configs/demo_full.yaml" in capsys.readouterr().err


def test_a_summary_that_cannot_be_read_is_an_error_of_its_own(tmp_path):
    assert check_summary.main([str(tmp_path / "none.json")]) == 2
    with pytest.raises(SystemExit, match="2"):
        check_summary.main([])
