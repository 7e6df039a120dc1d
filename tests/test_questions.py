"""Figures of drafts on questions (experiments/questions.py), from answers that are made up."""

from __future__ import annotations

import argparse
import hashlib
import io

import numpy as np
import pytest
import question_figures
import questions
from prompts import Question
from question_figures import ALL, BEST, CONTROL, PLAIN, Answer, Prompt
from rich.console import Console

from specjax.errors import DataError
from specjax.interfaces import Calibration
from specjax.metrics import DecodeStats


def answer(seconds: float, tokens: int, blocks: int) -> Answer:
    accepted = tokens - blocks
    stats = DecodeStats(blocks, tokens, (blocks,), (blocks,), (accepted,))
    return Answer(list(range(tokens)), stats, seconds, first=0.5)


PROMPTS = [Prompt("code", [1], 0), Prompt("code", [2], 1), Prompt("prose", [3], 2)]
ANSWERS = {
    PLAIN: [answer(2.0, 10, 10), answer(4.0, 20, 20), answer(2.0, 10, 10)],
    CONTROL: [answer(2.0, 10, 10), answer(4.0, 20, 20), answer(2.0, 10, 10)],
    "draft": [answer(1.0, 10, 5), answer(2.0, 20, 15), answer(4.0, 10, 10)],
}


def test_figures_of_categories_and_of_all():
    rows = {(r["drafter"], r["category"]): r for r in question_figures.rows_of(ANSWERS, PROMPTS, 0.0)}
    code, prose, whole = (rows["draft", name] for name in ("code", "prose", ALL))
    assert code["tokens_a_call"] == 30 / 20
    assert code["tokens_a_call_mean"] == pytest.approx((2 + 4 / 3) / 2)
    assert (code["speedup"], prose["speedup"], whole["speedup"]) == (2.0, 0.5, 1.25)
    assert code["low"] == code["high"] == 2.0
    assert whole["low"] == whole["high"] == 1.25  # prompts are drawn within their category
    assert (code["identical"], code["prompts"], whole["tokens"]) == (2, 2, 40)
    assert {rows[CONTROL, name]["speedup"] for name in ("code", "prose", ALL)} == {1.0}


def test_the_time_up_to_the_first_token_is_told_apart():
    rows = {(r["drafter"], r["category"]): r for r in question_figures.rows_of(ANSWERS, PROMPTS, 0.0)}
    code, prose, whole = (rows["draft", name] for name in ("code", "prose", ALL))
    assert {r["first_token_s"] for r in rows.values()} == {0.5}
    assert code["speedup_after_first_token"] == pytest.approx((6.0 - 1.0) / (3.0 - 1.0))
    assert prose["speedup_after_first_token"] == pytest.approx(1.5 / 3.5)
    mean = (code["speedup_after_first_token"] + prose["speedup_after_first_token"]) / 2
    assert whole["speedup_after_first_token"] == pytest.approx(mean)


def test_a_speedup_is_that_of_equal_tokens():
    ratio, _ = question_figures.speedup([answer(2.0, 10, 10)], [answer(2.0, 20, 20)], [0])
    assert ratio == 2.0


def test_the_interval_of_the_mean_is_that_of_its_categories():
    uneven = [answer(0.5, 10, 5), answer(4.0, 20, 15), answer(4.0, 10, 10)]
    rows = {
        r["category"]: r
        for r in question_figures.rows_of({**ANSWERS, "draft": uneven}, PROMPTS, 0.0)
        if r["drafter"] == "draft"
    }
    assert rows["code"]["low"] < rows["code"]["speedup"] < rows["code"]["high"]
    for end in ("low", "speedup", "high"):
        assert rows[ALL][end] == pytest.approx((rows["code"][end] + rows["prose"][end]) / 2)


def test_categories_are_drawn_independently_and_turns_together():
    """Alike categories of many questions: their mean varies by less than each of them does. Two turns that always take
    the same time are one question, not two."""
    each = 60
    seconds = np.random.default_rng(1).uniform(1.0, 3.0, each)
    names = ["a", "b", "c", "d"]
    prompts = [Prompt(name, [1], each * i + j) for i, name in enumerate(names) for j in range(each)]
    plain, drafted = [answer(2.0, 10, 10)] * len(prompts), [answer(s, 10, 5) for s in seconds] * 4
    answers = {PLAIN: plain, CONTROL: plain, "draft": drafted}
    rows = {r["category"]: r for r in question_figures.rows_of(answers, prompts, 0.0) if r["drafter"] == "draft"}
    widths = {name: r["high"] - r["low"] for name, r in rows.items()}
    assert widths[ALL] == pytest.approx(np.mean([widths[name] for name in names]) / 2, rel=0.2)
    one, two = ([answer(s, 10, 5) for s in np.repeat(seconds, turns)] for turns in (1, 2))
    of_turns = np.repeat(np.arange(each), 2)
    _, alone = question_figures.speedup(plain[:each], one, range(each))
    _, turns = question_figures.speedup(plain[: 2 * each], two, of_turns)
    np.testing.assert_allclose(alone, turns)


def test_questions_that_are_left_out_choose_the_lengths(tiny_chat):
    every = [Question(str(i), "ab"[i % 2], (f"say {i}",)) for i in range(8)]
    found = questions.Asked.of(tiny_chat, every, limit=2, offset=1, new_tokens=4)
    assert {name: [q.id for q in of_it] for name, of_it in found.chosen.items()} == {"a": ["2", "6"], "b": ["3", "7"]}
    assert [(p.category, p.question) for p in found.prompts] == [("a", 0), ("a", 1), ("b", 2), ("b", 3)]
    assert found.tuning == every[0]
    assert questions.Asked.of(tiny_chat, every, limit=4, offset=0, new_tokens=4).tuning is None


def test_everything_that_is_measured_is_stored(tiny_chat, monkeypatch):
    monkeypatch.setattr(questions, "CALIBRATION_SECONDS", 0.1)
    every = [Question(str(i), "ab"[i % 2], (f"say {i}", "again")[: 1 + i // 2 % 2]) for i in range(8)]
    found = questions.Asked.of(tiny_chat, every, limit=1, offset=1, new_tokens=4)
    decoders = questions.with_controls(tiny_chat, {}, ngram=2)
    assert [*decoders] == [PLAIN, CONTROL, "ngram"]
    made = questions.figures_of(tiny_chat, found, decoders, [0.0, 1.0], repeats=1, new_tokens=4)
    assert made["questions"] == {"a": ["2"], "b": ["3"]}
    assert [(r["drafter"], r["temperature"]) for r in made["answers"]] == [(n, t) for t in (0.0, 1.0) for n in decoders]
    assert {len(r["seconds"]) for r in made["answers"]} == {4}
    assert made["floor"]["share"] > 0
    assert made["differences"] == []
    assert {r["category"] for r in made["rows"]} == {"a", "b", ALL}
    assert all(r["tokens_per_s"] > 0 for r in made["rows"])
    questions.tell(made | {"rows": question_figures.with_best(made["rows"])})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--limit", "0"], "are at least 1"),
        (["--ngram", "0"], "nothing to measure"),
        (["--drafts", "models/x"], "give NAME=DIR"),
        (["--columns", "turn=q"], "--columns turn=q: give OURS=THEIRS, where OURS is one of turns, category, id"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_is_loaded(options, told, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["questions.py", "no.jsonl", "--target", "nowhere", *options])
    with pytest.raises((SystemExit, DataError)) as refused:
        questions.main()
    assert told in capsys.readouterr().err + str(refused.value)


def test_an_answer_that_differs_is_counted():
    other = answer(1.0, 10, 5)
    other.tokens[3] = 99
    rows = list(question_figures.rows_of({**ANSWERS, "draft": [other, *ANSWERS["draft"][1:]]}, PROMPTS, 0.0))
    assert {r["category"]: r["identical"] for r in rows if r["drafter"] == "draft"} == {"code": 1, "prose": 1, ALL: 2}


def test_an_answer_that_differs_is_told_with_the_margin_of_its_first_other_token():
    other, shorter = answer(1.0, 10, 5), answer(2.0, 18, 15)
    other.tokens[3] = other.tokens[5] = 99
    theirs = Answer([99] * 10, None, 1.0)
    answers = {**ANSWERS, "draft": [other, shorter, ANSWERS["draft"][2]], "llama.cpp": [theirs] * 3}
    found = question_figures.differences(answers, PROMPTS, lambda prompt, tokens, at: prompt[0] + tokens[at] / 100)
    assert found == [
        {"drafter": "draft", "category": "code", "position": 3, "margin": 1.03},
        {"drafter": "draft", "category": "code", "position": 18, "margin": 2.18},
    ]


def test_the_best_draft_is_the_fastest_greedy_one_and_not_the_control():
    slow = [answer(9.0, 10, 10), answer(9.0, 20, 20), answer(9.0, 10, 10)]
    answers = {PLAIN: ANSWERS[PLAIN], CONTROL: ANSWERS[CONTROL], "slow": slow, "draft": ANSWERS["draft"]}
    rows = [*question_figures.rows_of(answers, PROMPTS, 0.0), *question_figures.rows_of(answers, PROMPTS, 1.0)]
    best = [r for r in question_figures.with_best(rows) if r["drafter"] == BEST]
    assert {r["of"] for r in best} == {"draft"}
    assert sorted((r["category"], r["temperature"]) for r in best) == [
        (name, t) for name in (ALL, "code", "prose") for t in (0.0, 1.0)
    ]


def test_another_library_has_a_speedup_and_is_never_the_best():
    fast = [Answer(a.tokens, None, a.seconds / 10) for a in ANSWERS[PLAIN]]
    rows = question_figures.with_best([*question_figures.rows_of({**ANSWERS, "llama.cpp F16": fast}, PROMPTS, 0.0)])
    theirs = next(r for r in rows if (r["drafter"], r["category"]) == ("llama.cpp F16", ALL))
    assert theirs["speedup"] == pytest.approx(10)
    assert (theirs["first_token_s"], theirs["speedup_after_first_token"]) == (None, None)
    assert (theirs["tokens_a_call"], theirs["identical"], theirs["library"]) == (None, 3, "llama.cpp")
    assert {r["of"] for r in rows if r["drafter"] == BEST} == {"draft"}
    assert question_figures.table_of(rows).row_count == len(rows)


def test_results_name_the_weights_of_the_target_and_of_every_draft(tiny_target, tmp_path):
    for part in ("a", "b"):
        (tmp_path / f"{part}.safetensors").write_bytes(part.encode())
    (tmp_path / "x.gguf").write_bytes(b"x")
    given = argparse.Namespace(
        target="models/x", drafts=[f"mine={tmp_path}"], peer_draft=tmp_path, llama_cpp=[tmp_path / "x.gguf"]
    )
    (tmp_path / "config.json").write_text("{}")
    models = questions.models_of(given)
    assert models.pop("target") == "models/x"
    sums = questions.checksums(tiny_target, models)
    expected = {f"{x}.safetensors": hashlib.sha256(x.encode()).hexdigest() for x in "ab"}
    assert sums["mine"] == sums["transformers' draft"] == expected
    assert sums["llama.cpp x"] == {"x.gguf": hashlib.sha256(b"x").hexdigest()}
    assert len(sums[PLAIN]) == 64


def test_what_makes_a_category_say_less_is_marked_in_its_rows():
    chosen = {
        "code": [Question(str(i), "code", (f"question {i}",)) for i in range(20)],
        "prose": [Question("1", "prose", ("the same",)), Question("2", "prose", ("the same",))],
    }
    marks = question_figures.marks_of(chosen, ANSWERS, [2])
    assert marks == {"code": [], "prose": ["fewer than 20 questions", "1 repeated"]}
    rows = [r for r in question_figures.rows_of(ANSWERS, PROMPTS, 0.0, marks) if r["drafter"] == "draft"]
    assert {r["category"]: r["marks"] for r in rows} == {**marks, ALL: marks["prose"]}
    drawn = io.StringIO()
    Console(file=drawn, width=300).print(question_figures.table_of(rows))
    assert drawn.getvalue().count("fewer than 20 questions, 1 repeated") == 2
    alone = {name: found for name, found in ANSWERS.items() if name != CONTROL}
    assert question_figures.marks_of(chosen, alone, [])["code"] == ["no control", "no end of sequence"]
    assert question_figures.marks_of(chosen, ANSWERS, [2], calibrated=False)["code"] == ["lengths not calibrated"]


def test_what_blocks_cost_is_told_over_plain_decoding():
    known = Calibration(np.array([0.01, 0.012, 0.0151], np.float32), np.array([0.5, 0.4], np.float32))
    found = question_figures.block_costs("draft", 1.0, known)
    assert found == {"drafter": "draft", "temperature": 1.0, "over_plain": [1.0, 1.2, 1.51]}
