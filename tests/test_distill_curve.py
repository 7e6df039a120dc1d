"""The curve of `specjax distill` (experiments/distill_curve.py), of jobs that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import distill_curve
import pytest
import question_figures
import questions
import yaml
from question_figures import ALL

from specjax.drafters.draft_model import DraftModel


def finish(run: Path, minutes: float = 15) -> None:
    """The files of a job that are read."""
    run.mkdir(parents=True)
    sections = {"data": {"self_chat": {"chats": 128}}, "distill": {"steps": 10 * minutes}}
    (run / "config.yaml").write_text(yaml.safe_dump(sections))
    results = {"summary": {"alpha_after": 0.5}, "stage_seconds": {"decoding": 2.0}, "machine": {"cpu": "some"}}
    (run / "results.json").write_text(json.dumps(results))


def test_the_curve_has_a_point_a_job_and_is_replaced(tmp_path, monkeypatch):
    drawn = []

    def errorbar(self, at, speeds, ends, **options):
        drawn.append((options["label"], at, speeds, ends))

    monkeypatch.setattr("matplotlib.axes.Axes.errorbar", errorbar)
    names = ["ngram", "control", "eagle3-15", "eagle3-15+ngram", "eagle3-7.5", "draft_model-15", "best"]
    rows = [
        {"drafter": name, "category": category, "temperature": 0.0, "speedup": s, "low": s - 0.25, "high": s + 0.5}
        for s, name in enumerate(names, 1)
        for category in ("code", ALL)
    ]
    for _ in range(2):
        drawn.clear()
        monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *_, **__: None)
        distill_curve.draw(rows, tmp_path / "curve.png")
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert drawn == [
        ("eagle3", [7.5, 15.0], [5, 3], [[0.25, 0.25], [0.5, 0.5]]),
        ("eagle3, behind n-gram lookup", [15.0], [4], [[0.25], [0.5]]),
        ("draft_model", [15.0], [6], [[0.25], [0.5]]),
    ]
    assert [*tmp_path.glob(".curve*")] == []


def test_finished_jobs_are_not_run_again_and_all_drafts_decode_in_one_run(tiny_chat, tiny_draft, tmp_path, monkeypatch):
    made, decoded, file = [], [], tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"question": f"say {i}"}) + "\n" for i in range(4)))
    finish(tmp_path / "eagle3-15")
    finish(tmp_path / "draft_model-60")  # of an earlier call
    (tmp_path / "dspark-15").mkdir()  # which was interrupted

    def job(target, run, minutes, kind, chats):
        made.append((kind, minutes, chats))
        finish(Path(run), minutes)

    def figures(target, asked, decoders, temperatures, repeats, new_tokens):
        decoded.append(([*decoders], [question.id for question in asked.chosen["arithmetic"]]))
        names = [name for name in decoders if name != question_figures.PLAIN]
        rows = [{"drafter": name, "category": ALL, "temperature": 0.0} for name in names]
        return {"rows": [row | {"speedup": 1.5, "low": 1.0, "high": 2.0} for row in rows]}

    monkeypatch.setattr(distill_curve, "distill_target", job)
    monkeypatch.setattr(distill_curve, "keep_programs", lambda: None)
    monkeypatch.setattr(distill_curve.specjax, "load_model", lambda target: tiny_chat)
    monkeypatch.setattr(distill_curve.specjax, "load_drafter", lambda run, target, k: DraftModel(tiny_draft, k))
    for name, fake in {
        "figures_of": figures,
        "tell": lambda found: None,
        "checksums": lambda _, models: models,
    }.items():
        monkeypatch.setattr(questions, name, fake)
    results, figure = tmp_path / "curve.json", tmp_path / "curve.png"
    options = ["--target", "x", "--out", str(tmp_path), "--kinds", "eagle3", "glide", "--minutes", "30", "15"]
    options += ["--limit", "1", "--offset", "2", "--results", str(results), "--figure", str(figure)]
    monkeypatch.setattr("sys.argv", ["distill_curve.py", str(file), *options])
    monkeypatch.setattr(distill_curve.record, "write", lambda file, found: results.write_text(repr(found)))
    distill_curve.main()
    chats = str(tmp_path / "self-chat")
    assert made == [("glide", 15.0, chats), ("eagle3", 30.0, chats), ("glide", 30.0, chats)]
    names = ["draft_model-60", "eagle3-15", "eagle3-30", "glide-15", "glide-30"]
    both = [each for name in names for each in (name, f"{name}+ngram")]
    assert decoded == [([question_figures.PLAIN, question_figures.CONTROL, "ngram", *both], ["3"])]
    assert "'job': 'glide-30'" in results.read_text()
    assert figure.exists()


def test_questions_that_cannot_be_read_are_refused_before_hours_of_training(tmp_path, monkeypatch):
    monkeypatch.setattr(distill_curve, "distill_target", lambda *_, **__: pytest.fail("a job was run"))
    monkeypatch.setattr("sys.argv", ["distill_curve.py", str(tmp_path / "no.jsonl"), "--target", "x", "--out", "y"])
    with pytest.raises(distill_curve.specjax.SpecjaxError, match="cannot be read"):
        distill_curve.main()
