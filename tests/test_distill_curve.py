"""The curve of `specjax distill` (experiments/distill_curve.py), from runs that are made up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import distill_curve
import yaml


def finished(run, minutes, speedups):
    """The files of a run that are read. ``speedups``: (drafter, k, speedup) at batch 1, greedily."""
    run.mkdir()
    (run / "config.yaml").write_text(
        yaml.safe_dump({"data": {"self_chat": {"chats": 128 * minutes}}, "distill": {"steps": 10 * minutes}})
    )
    points = [("autoregressive", None, 1.0), *speedups, ("draft_after", 9, 99.0)]
    rows = [
        {"drafter": name, "k": k, "speedup": speed, "temperature": 0.0, "batch_size": 8 if k == 9 else 1}
        for name, k, speed in points
    ]
    (run / "results.json").write_text(json.dumps({"decoding": rows, "summary": {"alpha_after": 0.5}}))
    return [*distill_curve.rows_of(run, "eagle3", minutes)]


def test_the_best_length_of_each_drafter_is_a_point(tmp_path):
    rows = finished(tmp_path / "a", 15, [("draft_after", 1, 1.1), ("draft_after", 2, 1.05), ("hybrid", 3, 1.3)])
    assert [(r["drafter"], r["k"], r["speedup"]) for r in rows] == [("draft_after", 1, 1.1), ("hybrid", 3, 1.3)]
    assert {(r["kind"], r["minutes"], r["chats"], r["steps"], r["alpha"]) for r in rows} == {
        ("eagle3", 15, 1920, 150, 0.5)
    }


def test_the_curve_is_drawn_and_replaced(tmp_path):
    rows = [
        row for i in (1, 2) for row in finished(tmp_path / str(i), i, [("draft_after", 1, 1.0 + i), ("hybrid", 2, 2.0)])
    ]
    for count in (2, 4):
        distill_curve.draw(rows[:count], tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [*tmp_path.glob(".curve*")] == []


def test_a_job_that_stands_in_the_results_is_not_run_again(tmp_path, monkeypatch):
    results, asked = tmp_path / "curve.json", []
    results.write_text(json.dumps({"rows": finished(tmp_path / "a", 15, [("draft_after", 1, 1.1)])}))

    def job(target, run, minutes, kind, chats):
        asked.append((kind, minutes))
        shutil.rmtree(run, ignore_errors=True)
        finished(Path(run), 15, [("draft_after", 1, 1.2)])

    monkeypatch.setattr(distill_curve, "distill_target", job)
    options = ["--out", str(tmp_path), "--kinds", "eagle3", "glide", "--minutes", "15", "--results", str(results)]
    monkeypatch.setattr("sys.argv", ["distill_curve.py", "target", *options])
    distill_curve.main()
    assert asked == [("glide", 15.0)]
    kept = json.loads(results.read_text())["rows"]
    assert [(row["kind"], row["speedup"]) for row in kept] == [("eagle3", 1.1), ("glide", 1.2)]
