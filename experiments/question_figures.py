"""Figures of drafts on questions (`questions.py`), from the answers of all decoders."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from prompts import Question, doubts
from rich.table import Table

from specjax.interfaces import Calibration
from specjax.metrics import DecodeStats

PLAIN, CONTROL, BEST, ALL = "plain", "control", "best", "all"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """``question``: number of its question, which all turns of a conversation share."""

    category: str
    tokens: list[int]
    question: int


@dataclasses.dataclass
class Answer:
    """``stats``: None for another library's. ``seconds``: the least of the repeats; ``first``: those of them up to the
    first token, None if no one tells."""

    tokens: list[int]
    stats: DecodeStats | None
    seconds: float
    first: float | None = None


def speedup(plain: Sequence[Answer], drafted: Sequence[Answer], questions: Sequence[int]) -> tuple[float, np.ndarray]:
    """(seconds a token of plain decoding over those with a draft; the same of drawn sets of as many questions).
    ``questions``: number of each answer's question; the same questions are drawn the same way for every draft."""
    counts = np.array(
        [(a.seconds, len(a.tokens), b.seconds, len(b.tokens)) for a, b in zip(plain, drafted, strict=True)]
    )
    numbers, of_question = np.unique(questions, return_inverse=True)
    sums = np.zeros((len(numbers), 4))
    np.add.at(sums, of_question, counts)

    def ratio(sums: np.ndarray) -> Any:
        return sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2]

    # Categories are drawn independently of each other.
    drawn = np.random.default_rng(numbers).integers(0, len(sums), (5_000, len(sums)))
    return float(ratio(sums.sum(axis=0))), ratio(sums[drawn].sum(axis=1))


def interval(drawn: np.ndarray) -> dict[str, float]:
    """Ends of the 95% interval."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"low": float(low), "high": float(high)}


def row(
    name: str, category: str, temperature: float, plain: list[Answer], drafted: list[Answer], questions: Sequence[int]
) -> dict[str, Any]:
    """Figures of a drafter in a category."""
    ratio, drawn = speedup(plain, drafted, questions)
    identical = sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)) if temperature == 0 else None
    return {
        "drafter": name,
        "category": category,
        "temperature": temperature,
        "prompts": len(drafted),
        "tokens": sum(len(answer.tokens) for answer in drafted),
        "tokens_per_s": sum(len(answer.tokens) for answer in drafted) / sum(answer.seconds for answer in drafted),
        **({} if drafted[0].stats else {"library": name.split()[0]}),
        **acceptance([answer.stats for answer in drafted if answer.stats is not None]),
        "speedup": ratio,
        **interval(drawn),
        **times(plain, drafted),
        "identical": identical,
    }


def times(plain: Sequence[Answer], drafted: Sequence[Answer]) -> dict[str, Any]:
    """Mean seconds up to the first token, and the speedup of the tokens after it."""

    def parts(answers: Sequence[Answer]) -> tuple[float, float] | None:
        firsts = [answer.first for answer in answers if answer.first is not None]
        behind = sum(len(answer.tokens) - 1 for answer in answers)
        if len(firsts) < len(answers) or not behind:
            return None
        return sum(firsts) / len(firsts), (sum(answer.seconds for answer in answers) - sum(firsts)) / behind

    own, of_plain = parts(drafted), parts(plain)
    return {
        "first_token_s": None if own is None else own[0],
        "speedup_after_first_token": None if own is None or of_plain is None else of_plain[1] / own[1],
    }


def acceptance(stats: Sequence[DecodeStats]) -> dict[str, Any]:
    """Figures of accepted tokens, of all answers together; of another library's answers it is not known who accepted
    them."""
    if not stats:
        return {"tokens_a_call": None, "tokens_a_call_mean": None, "acceptance_at": None}
    pooled = functools.reduce(operator.add, stats)
    return {
        "tokens_a_call": pooled.block_efficiency,
        "tokens_a_call_mean": float(np.mean([each.block_efficiency for each in stats])),
        "acceptance_at": pooled.conditional_acceptance_at,
    }


def marks_of(
    chosen: Mapping[str, Sequence[Question]],
    decoders: Collection[str],
    eos_ids: Collection[int],
    calibrated: bool = True,
) -> dict[str, list[str]]:
    """Reasons why the figures of each category say less than they seem to. ``calibrated``: False if lengths should have
    been chosen by costs, and were not."""
    of_all = [*([] if CONTROL in decoders else ["no control"]), *([] if eos_ids else ["no end of sequence"])]
    of_all += [] if calibrated else ["lengths not calibrated"]
    return {category: [*doubts(questions), *of_all] for category, questions in chosen.items()}


def rows_of(
    answers: Mapping[str, list[Answer]],
    prompts: Sequence[Prompt],
    temperature: float,
    marks: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Figures of each drafter in each category, and the mean of its categories. ``marks``: see `marks_of`; the mean has
    those of all its categories."""
    marks = marks or {}
    of_all = list(dict.fromkeys(mark for category in sorted(marks) for mark in marks[category]))
    categories = sorted({prompt.category for prompt in prompts})
    for name in answers:
        if name == PLAIN:
            continue
        ratios, afterwards = [], []
        for category in categories:
            of_it = [i for i, prompt in enumerate(prompts) if prompt.category == category]
            plain, drafted = ([answers[side][i] for i in of_it] for side in (PLAIN, name))
            questions = [prompts[i].question for i in of_it]
            found = row(name, category, temperature, plain, drafted, questions)
            yield found | {"marks": list(marks.get(category, ()))}
            ratios.append(speedup(plain, drafted, questions))
            afterwards.append(found["speedup_after_first_token"])
        mean, drawn = (np.mean(each, axis=0) for each in zip(*ratios, strict=True))
        questions = [prompt.question for prompt in prompts]
        whole = row(name, ALL, temperature, answers[PLAIN], answers[name], questions)
        after = None if None in afterwards else float(np.mean(afterwards))
        means = {"speedup": float(mean), **interval(drawn), "speedup_after_first_token": after}
        yield whole | means | {"marks": of_all}


def differences(
    answers: Mapping[str, list[Answer]],
    prompts: Sequence[Prompt],
    margin_of: Callable[[Sequence[int], list[int], int], float],
) -> list[dict[str, Any]]:
    """The first token of each of our answers that is not plain decoding's. ``margin_of``: margin of the choice of a
    token, given the prompt, the answer and the token's place in it."""
    found = []
    for name, of_it in answers.items():
        for prompt, plain, answer in zip(prompts, answers[PLAIN], of_it, strict=True):
            pairs = itertools.zip_longest(plain.tokens, answer.tokens)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if answer.stats is not None and at is not None and at < len(plain.tokens):
                margin = margin_of(prompt.tokens, plain.tokens, at)
                found.append({"drafter": name, "category": prompt.category, "position": at, "margin": margin})
    return found


def block_costs(drafter: str, temperature: float, known: Calibration) -> dict[str, Any]:
    """Measured seconds of a block at each draft length over those of a block without proposed tokens."""
    seconds = np.asarray(known.seconds, float)
    return {"drafter": drafter, "temperature": temperature, "over_plain": (seconds / seconds[0]).round(3).tolist()}


def with_best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and those of the best draft once more under that name."""
    whole = [r for r in rows if r["category"] == ALL and r["drafter"] != CONTROL and "library" not in r]
    greedy = [r for r in whole if r["temperature"] == 0] or whole
    best = max(greedy, key=lambda r: r["speedup"])["drafter"]
    return [*rows, *({**r, "drafter": BEST, "of": best} for r in rows if r["drafter"] == best)]


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    names = ("drafter", "category", "T", "prompts", "tokens a call", "mean", "speedup", "low", "high")
    names += ("after first token", "first token, s", "identical", "marks")
    table = Table(*names, box=None)
    for r in rows:
        same = "-" if r["identical"] is None else f"{r['identical']} of {r['prompts']}"
        of_calls = [r[name] for name in ("tokens_a_call", "tokens_a_call_mean")]
        figures = ["-" if value is None else f"{value:.2f}" for value in of_calls]
        values = [r[name] for name in ("speedup", "low", "high", "speedup_after_first_token", "first_token_s")]
        figures += ["-" if value is None else f"{value:.3f}" for value in values]
        first = (r["drafter"], r["category"], f"{r['temperature']:g}", str(r["prompts"]))
        table.add_row(*first, *figures, same, ", ".join(r["marks"]))
    return table


def by_prompt(answers: Mapping[str, Sequence[Answer]], temperature: float) -> Iterator[dict[str, Any]]:
    """Times and lengths of all answers, a record a decoder."""
    for name, of_it in answers.items():
        yield {
            "drafter": name,
            "temperature": temperature,
            "seconds": [round(answer.seconds, 4) for answer in of_it],
            "first_token_s": [None if answer.first is None else round(answer.first, 4) for answer in of_it],
            "tokens": [len(answer.tokens) for answer in of_it],
        }
