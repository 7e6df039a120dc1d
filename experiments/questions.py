"""Decoding with drafts over plain decoding, on questions that users bring, by category, in one run.

    python experiments/questions.py FILE ... --target MODEL [--drafts NAME=DIR ...] [--ngram 5] [-k 3] [--fixed]
        [--quantize-draft int8] [--limit 10] [--new-tokens 128] [--temperatures 0 1] [--repeats 3]
        [--peers float32 bfloat16] [--peer-draft DIR] [--llama-cpp FILE.gguf ...] [--results FILE]

Each question is asked in the target's chat template (`prompts.py`); of several turns each is a prompt, after the
target's own greedy answers. Lengths are chosen by costs and acceptance measured on a question that is not asked; with
--fixed every block proposes k tokens, which compares drafts and not their speed. All decoders take a prompt in turn;
its time is the least of the repeats, of which the first one may compile. A speedup is plain decoding's seconds over
those of the same number of tokens with the draft, summed over the prompts of a category, with a 95% interval over
prompts (bootstrap); `speedup_after_first_token` leaves out the prompt, which no draft makes faster. `tokens_a_call`:
tokens of all prompts over all target calls; `tokens_a_call_mean`: the mean of the prompts' own. `control`: plain
decoding once more, which says what a ratio of one looks like here. `best`: the draft with the largest greedy speedup
over all prompts. `all`: the mean of the categories. Each draft also decodes as a hybrid with n-gram lookup, named
`NAME+ngram`, unless --ngram is 0. With --peers, transformers on torch decodes the same prompts in turn, and with
--llama-cpp that library (`peers.py`). Their rows have a `library`, and are never the best.
`block_costs`: seconds of a block of 0, 1, .. k proposed tokens over those of none, by which lengths were chosen;
of a hybrid those that its draft's model makes.
`differences`: the first token of each greedy answer of ours that is not plain decoding's, and how far its logit, the
largest, was above the second.
`marks` are what makes a category say less than it seems to: fewer than 20 prompts, repeated ones, filler
(`prompts.py`), a target without an end of sequence, whose answers are all as long as they may be, and no control.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import operator
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers import REST, llama_cpp_of, transformers_of
from prompts import Question, by_category, doubts, read_questions, tokens_of
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specjax
from specjax.drafters.ngram import NGram
from specjax.evaluation.target_distribution import TargetDistribution
from specjax.interfaces import Calibration
from specjax.metrics import DecodeStats
from specjax.models.files import sha256
from specjax.models.hf import LoadedModel
from specjax.report import record
from specjax.runtime import fingerprint
from specjax.runtime.compile_cache import keep_programs

PLAIN, CONTROL, BEST, ALL = "plain", "control", "best", "all"
CALIBRATION_SECONDS = 12.0
"""Four times the default, so that a slow spell of the machine falls on few of the turns."""
_CONSOLE = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Prompt:
    category: str
    tokens: list[int]


@dataclasses.dataclass
class Answer:
    """``stats``: None for another library's. ``seconds``: the least of the repeats; ``first``: those of them up to the
    first token, None if no one tells."""

    tokens: list[int]
    stats: DecodeStats | None
    seconds: float
    first: float | None = None


def asked(target: LoadedModel, questions: Sequence[Question], new_tokens: int) -> list[Prompt]:
    """A prompt for every turn, after the target's own greedy answers to those before."""
    plain, found = specjax.Decoder(target), []
    for question in questions:
        answers: list[str] = []
        while len(answers) < len(question.turns):
            found.append(Prompt(question.category, tokens_of(target.tokenizer, question, answers)))
            if len(answers) + 1 == len(question.turns):
                break
            result = plain.generate([found[-1].tokens], max_new_tokens=new_tokens)
            answers.append(target.tokenizer.decode(result.tokens[0], skip_special_tokens=True))
    return found


def measured(
    decoders: Mapping[str, Any], prompts: Sequence[Prompt], repeats: int, options: Mapping[str, Any], rest: float = 0.0
) -> dict[str, list[Answer]]:
    """Answers of each decoder to each prompt. All take a prompt in turn, the other way round in every second repeat,
    with ``rest`` seconds before each."""
    found: dict[str, list[Answer]] = {name: [] for name in decoders}
    for i, prompt in enumerate(track(prompts, "asking", console=_CONSOLE)):
        for repeat in range(repeats):
            for name in [*decoders][:: -1 if repeat % 2 else 1]:
                time.sleep(rest)
                start = time.perf_counter()
                result = decoders[name].generate([prompt.tokens], seed=i, **options)
                seconds = time.perf_counter() - start
                first = result.commit_times[0][0] if result.stats[0] is not None else None
                answer = Answer(list(result.tokens[0]), result.stats[0], seconds, first)
                found[name][i:] = [min([*found[name][i:], answer], key=lambda answer: answer.seconds)]
    return found


def speedup(plain: Sequence[Answer], drafted: Sequence[Answer]) -> tuple[float, np.ndarray]:
    """(seconds a token of plain decoding over those with a draft; the same of drawn sets of as many prompts)."""
    counts = np.array(
        [(a.seconds, len(a.tokens), b.seconds, len(b.tokens)) for a, b in zip(plain, drafted, strict=True)]
    )

    def ratio(sums: np.ndarray) -> Any:
        return sums[..., 0] / sums[..., 1] * sums[..., 3] / sums[..., 2]

    drawn = np.random.default_rng(0).integers(0, len(counts), (5_000, len(counts)))
    return float(ratio(counts.sum(axis=0))), ratio(counts[drawn].sum(axis=1))


def interval(drawn: np.ndarray) -> dict[str, float]:
    """Ends of the 95% interval."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {"low": float(low), "high": float(high)}


def row(name: str, category: str, temperature: float, plain: list[Answer], drafted: list[Answer]) -> dict[str, Any]:
    ratio, drawn = speedup(plain, drafted)
    identical = sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)) if temperature == 0 else None
    return {
        "drafter": name,
        "category": category,
        "temperature": temperature,
        "prompts": len(drafted),
        "tokens": sum(len(answer.tokens) for answer in drafted),
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
    chosen: Mapping[str, Sequence[Question]], decoders: Collection[str], eos_ids: Collection[int]
) -> dict[str, list[str]]:
    """What makes the figures of each category say less than they seem to."""
    of_all = [*([] if CONTROL in decoders else ["no control"]), *([] if eos_ids else ["no end of sequence"])]
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
            yield row(name, category, temperature, plain, drafted) | {"marks": list(marks.get(category, ()))}
            ratios.append(speedup(plain, drafted))
            afterwards.append(times(plain, drafted)["speedup_after_first_token"])
        mean, drawn = (np.mean(each, axis=0) for each in zip(*ratios, strict=True))
        whole = row(name, ALL, temperature, answers[PLAIN], answers[name])
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


def checksums(target: LoadedModel, models: Mapping[str, Path]) -> dict[str, Any]:
    """SHA-256 of the target's weights as they are loaded, and of the files of weights of each of ``models``, a
    directory or a file."""
    files = {name: [path] if path.is_file() else sorted(path.glob("*.safetensors")) for name, path in models.items()}
    of_files = {name: {file.name: sha256(file) for file in found} for name, found in files.items()}
    return {PLAIN: fingerprint.of_model(target)[0], **of_files}


def models_of(args: argparse.Namespace) -> dict[str, Path]:
    """Directories and files of all weights that take part: the target's, the drafts', other libraries'."""
    drafts = (pair.partition("=")[::2] for pair in args.drafts)
    named = {"target": Path(args.target), **{name: Path(path) for name, path in drafts}}
    named |= {} if args.peer_draft is None else {"transformers' draft": args.peer_draft}
    return named | {f"llama.cpp {file.stem}": file for file in args.llama_cpp}


def decoders_of(args: argparse.Namespace, target: LoadedModel) -> dict[str, specjax.Decoder]:
    drafters: dict[str, Any] = {"ngram": NGram(args.ngram)} if args.ngram else {}
    for pair in args.drafts:
        name, _, path = pair.partition("=")
        drafters[name] = specjax.load_drafter(path, target, args.k, quantize=args.quantize_draft)
        if args.ngram:
            drafters[f"{name}+ngram"] = specjax.Hybrid(drafters[name], max(args.k, args.ngram))
    made = {PLAIN: specjax.Decoder(target), CONTROL: specjax.Decoder(target)}
    return made | {name: specjax.Decoder(target, drafter, args.verifier) for name, drafter in drafters.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--columns", nargs="+", default=[], metavar="OURS=THEIRS")
    parser.add_argument("--drafts", nargs="+", default=[], metavar="NAME=DIR")
    parser.add_argument("--ngram", type=int, default=5)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--quantize-draft", choices=("int8",))
    parser.add_argument("--verifier", default="block")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="+", default=[], metavar="DTYPE")
    parser.add_argument("--peer-draft", type=Path)
    parser.add_argument("--llama-cpp", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    keep_programs()
    target = specjax.load_model(args.target, args.dtype)
    columns = dict(pair.split("=", 1) for pair in args.columns)
    everything = by_category([q for file in args.files for q in read_questions(file, columns)])
    chosen = {name: by_category(of_it, args.limit)[name] for name, of_it in everything.items()}
    left = [q for name, of_it in everything.items() for q in of_it if q not in chosen[name]]
    prompts = asked(target, [q for of_it in chosen.values() for q in of_it], args.new_tokens)
    ours, rows, differ, costs = decoders_of(args, target), [], [], []
    others: dict[str, Any] = {}
    if args.peers:
        others |= dict(transformers_of(Path(args.target), args.peer_draft, args.peers))
    if args.llama_cpp:
        others |= dict(llama_cpp_of(args.llama_cpp, target.eos_ids))
    for temperature in args.temperatures:
        for name, decoder in ours.items() if left and not args.fixed else ():
            asked_before = [tokens_of(target.tokenizer, left[0])]
            known = decoder.calibrate(asked_before, seconds=CALIBRATION_SECONDS, temperature=temperature)
            costs += [] if known is None else [block_costs(name, temperature, known)]
        options = {"max_new_tokens": args.new_tokens, "temperature": temperature}
        rest = REST if others else 0.0
        answers = measured({**ours, **others}, prompts, args.repeats, options, rest)
        rows += rows_of(answers, prompts, temperature, marks_of(chosen, answers, target.eos_ids))
        if temperature == 0:
            distribution = TargetDistribution(target, {}, args.new_tokens)
            differ += differences(answers, prompts, distribution.greedy_margin)
    rows = with_best(rows)
    Console(width=160).print(table_of(rows))  # of a file rich takes 80 columns, and cuts every word
    for each in costs:
        print("{drafter}, T = {temperature:g}: blocks of 0, 1, .. tokens take {over_plain} of one of 0".format(**each))
    for found in differ:
        print("{drafter}, {category}: token {position} is another one, at a margin of {margin:.2g}".format(**found))
    if args.results is not None:
        names = ("new_tokens", "limit", "repeats", "k", "fixed", "ngram", "verifier", "quantize_draft")
        settings = {name: getattr(args, name) for name in names} | {"dtype": str(target.dtype)}
        sums = checksums(target, models_of(args))
        figures = {"rows": rows, "block_costs": costs, "differences": differ}
        record.write(args.results, figures | {"sha256": sums, "settings": settings})


if __name__ == "__main__":
    try:
        main()
    except specjax.SpecjaxError as error:
        sys.exit(str(error))
