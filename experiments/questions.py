"""Decoding with drafts over plain decoding, on questions that users bring, by category, in one run.

    python experiments/questions.py FILE ... --target MODEL [--drafts NAME=DIR ...] [--ngram 5] [-k 3] [--fixed]
        [--quantize-draft int8] [--limit 10] [--offset 0] [--new-tokens 128] [--temperatures 0 1] [--repeats 3]
        [--peers float32 bfloat16] [--peer-draft DIR] [--llama-cpp FILE.gguf ...] [--results FILE]

Each question is asked in the target's chat template (`prompts.py`); of several turns each is a prompt, after the
target's own greedy answers. Of each category --limit questions are asked, spread over the file, --offset behind where
they would begin: what was chosen on some questions is measured on others. Lengths are chosen by costs and acceptance
measured on a question that is not asked; with --fixed every block proposes k tokens, which compares drafts and not
their speed. All decoders take a prompt in turn, programs compiled before; its time is the least of the repeats. A
speedup is plain decoding's seconds over those of the same number of tokens with the draft, summed over the prompts of a
category, with a 95% interval over questions (bootstrap, within each category);
`speedup_after_first_token` leaves out the prompt, which no draft makes faster. `tokens_a_call`:
tokens of all prompts over all target calls; `tokens_a_call_mean`: the mean of the prompts' own. `control`: plain
decoding once more, which says what a ratio of one looks like here. `best`: the draft with the largest greedy speedup
over all prompts. `all`: the mean of the categories. Each draft also decodes as a hybrid with n-gram lookup, named
`NAME+ngram`, unless --ngram is 0. With --peers, transformers on torch decodes the same prompts in turn, and with
--llama-cpp that library (`peers.py`). Their rows have a `library`, and are never the best.
`block_costs`: seconds of a block of 0, 1, .. k proposed tokens over those of none, by which lengths were chosen;
of a hybrid those that its draft's model makes.
`differences`: the first token of each greedy answer of ours that is not plain decoding's, and how far its logit, the
largest, was above the second. `floor`: plain decoding behind the first token, greedy, as a share of what the measured
bandwidth allows. `answers`: seconds, seconds up to the first token and number of tokens of each prompt; `questions`:
their ids, a line a category, in the order in which they were asked.
`marks` are what makes a category say less than it seems to: fewer than 20 questions, repeated ones, filler
(`prompts.py`), a target without an end of sequence, whose answers are all as long as they may be, no control, and
lengths that were not calibrated, because no question was left for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from peers import REST, llama_cpp_of, transformers_of
from prompts import Question, by_category, columns_of, read_questions, tokens_of
from question_figures import (
    CONTROL,
    PLAIN,
    Answer,
    Prompt,
    block_costs,
    by_prompt,
    differences,
    marks_of,
    rows_of,
    table_of,
    with_best,
)
from rich.console import Console
from rich.progress import track

import specjax
from specjax.drafters.ngram import NGram
from specjax.evaluation.bench import memory_floor_share
from specjax.evaluation.target_distribution import TargetDistribution
from specjax.models.files import draft_of, resolve, sha256
from specjax.models.hf import LoadedModel
from specjax.report import record
from specjax.runtime import fingerprint
from specjax.runtime.compile_cache import keep_programs

CALIBRATION_SECONDS = 12.0
"""Four times the default, so that a slow spell of the machine falls on few of the turns."""
_CONSOLE = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Asked:
    """The questions that are asked, by category, their prompts, and a question by which lengths are chosen, if one is
    left."""

    chosen: Mapping[str, Sequence[Question]]
    prompts: Sequence[Prompt]
    tuning: Question | None

    @classmethod
    def of(cls, target: LoadedModel, questions: Iterable[Question], limit: int, offset: int, new_tokens: int) -> Asked:
        everything = by_category(questions)
        chosen = {name: by_category(of_it, limit, offset)[name] for name, of_it in everything.items()}
        left = [q for name, of_it in everything.items() for q in of_it if q not in chosen[name]]
        prompts = asked(target, [q for of_it in chosen.values() for q in of_it], new_tokens)
        return cls(chosen, prompts, left[0] if left else None)


def asked(target: LoadedModel, questions: Sequence[Question], new_tokens: int) -> list[Prompt]:
    """A prompt for every turn, after the target's own greedy answers to those before."""
    plain, found = specjax.Decoder(target), []
    for number, question in enumerate(questions):
        answers: list[str] = []
        while len(answers) < len(question.turns):
            found.append(Prompt(question.category, tokens_of(target.tokenizer, question, answers), number))
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
        for decoder in decoders.values():
            if isinstance(decoder, specjax.Decoder):
                decoder.compile([prompt.tokens], **options)
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


def floor_of(target: LoadedModel, plain: Sequence[Answer]) -> dict[str, float]:
    """Tokens a second of plain decoding behind the first token, and the share of the memory floor that they reach: one
    read of all weights for a token, at the bandwidth of a plain sum, measured now."""
    behind = sum(len(answer.tokens) - 1 for answer in plain)
    speed = behind / sum(answer.seconds - (answer.first or 0.0) for answer in plain)
    share, bandwidth = memory_floor_share(target, speed)
    return {"tokens_per_s": speed, "share": share, "stream_gb_per_s": bandwidth}


def checksums(target: LoadedModel, models: Mapping[str, Any]) -> dict[str, Any]:
    """SHA-256 of the target's weights as they are loaded, and of the files of weights of each of ``models``: a
    directory, a hub id, a run or a file."""
    places = {
        name: Path(model) if Path(model).is_file() else resolve(draft_of(model)) for name, model in models.items()
    }
    files = {name: [at] if at.is_file() else sorted(at.glob("*.safetensors")) for name, at in places.items()}
    of_files = {name: {file.name: sha256(file) for file in found} for name, found in files.items()}
    return {PLAIN: fingerprint.of_model(target)[0], **of_files}


def models_of(args: argparse.Namespace) -> dict[str, Any]:
    """Directories, hub ids and files of all weights that take part: the target's, the drafts', other libraries'."""
    drafts = (pair.partition("=")[::2] for pair in args.drafts)
    named = {"target": args.target, **dict(drafts)}
    named |= {} if args.peer_draft is None else {"transformers' draft": args.peer_draft}
    return named | {f"llama.cpp {file.stem}": file for file in args.llama_cpp}


def with_controls(
    target: LoadedModel, drafts: Mapping[str, Any], ngram: int, verifier: str = "block"
) -> dict[str, specjax.Decoder]:
    """Plain decoding twice, n-gram lookup of ``ngram`` tokens, and each draft alone and behind it; 0: no lookup."""
    drafters: dict[str, Any] = {"ngram": NGram(ngram)} if ngram else {}
    for name, draft in drafts.items():
        drafters[name] = draft
        if ngram:
            drafters[f"{name}+ngram"] = specjax.Hybrid(draft, max(draft.k, ngram))
    made = {PLAIN: specjax.Decoder(target), CONTROL: specjax.Decoder(target)}
    return made | {name: specjax.Decoder(target, drafter, verifier) for name, drafter in drafters.items()}


def figures_of(
    target: LoadedModel,
    asked: Asked,
    decoders: Mapping[str, Any],
    temperatures: Sequence[float],
    repeats: int,
    new_tokens: int,
    fixed: bool = False,
) -> dict[str, Any]:
    """Everything that is measured, as it is stored (`rows`, `block_costs`, `differences`, `floor`, `answers`,
    `questions`). ``decoders``: ours and other libraries'. ``fixed``: lengths are not chosen by costs."""
    found: dict[str, list[Any]] = {name: [] for name in ("rows", "block_costs", "differences", "answers")}
    ours = {name: decoder for name, decoder in decoders.items() if isinstance(decoder, specjax.Decoder)}
    rest, floor = REST if len(ours) < len(decoders) else 0.0, {}
    for temperature in temperatures:
        tuning = [] if asked.tuning is None or fixed else [tokens_of(target.tokenizer, asked.tuning)]
        for name, decoder in ours.items() if tuning else ():
            known = decoder.calibrate(tuning, seconds=CALIBRATION_SECONDS, temperature=temperature)
            found["block_costs"] += [] if known is None else [block_costs(name, temperature, known)]
        options = {"max_new_tokens": new_tokens, "temperature": temperature}
        answers = measured(decoders, asked.prompts, repeats, options, rest)
        marks = marks_of(asked.chosen, answers, target.eos_ids, fixed or asked.tuning is not None)
        found["rows"] += rows_of(answers, asked.prompts, temperature, marks)
        found["answers"] += by_prompt(answers, temperature)
        if temperature == 0:
            distribution = TargetDistribution(target, {}, new_tokens)
            found["differences"] += differences(answers, asked.prompts, distribution.greedy_margin)
            floor = floor_of(target, answers[PLAIN])
    ids = {name: [question.id for question in of_it] for name, of_it in asked.chosen.items()}
    return {**found, "floor": floor, "questions": ids}


def tell(found: Mapping[str, Any]) -> None:
    """Print the table, and what else there is to say."""
    Console(width=160).print(table_of(found["rows"]))  # of a file rich takes 80 columns, and cuts every word
    for each in found["block_costs"]:
        print("{drafter}, T = {temperature:g}: blocks of 0, 1, .. tokens take {over_plain} of one of 0".format(**each))
    for each in found["differences"]:
        print("{drafter}, {category}: token {position} is another one, at a margin of {margin:.2g}".format(**each))
    if found["floor"]:
        line = "plain decoding, greedy, behind the first token: {tokens_per_s:.0f} tokens/s, {share:.0%} of the floor"
        print((line + " at {stream_gb_per_s:.1f} GB/s").format(**found["floor"]))


def parsed() -> argparse.Namespace:
    """Arguments of the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSONL files of questions")
    parser.add_argument("--target", required=True, help="directory, hub id or GGUF file of a chat model")
    parser.add_argument("--dtype", help="dtype of the target")
    parser.add_argument("--columns", nargs="+", default=[], metavar="OURS=THEIRS", help="turns, category, id=FIELD")
    parser.add_argument("--drafts", nargs="+", default=[], metavar="NAME=DIR")
    parser.add_argument("--ngram", type=int, default=5, help="longest block of n-gram lookup; 0: none")
    parser.add_argument("-k", type=int, default=3, help="longest block of a draft")
    parser.add_argument("--fixed", action="store_true", help="every block proposes k tokens")
    parser.add_argument("--quantize-draft", choices=("int8",))
    parser.add_argument("--verifier", default="block")
    parser.add_argument("--limit", type=int, default=10, help="most questions of a category")
    parser.add_argument("--offset", type=int, default=0, help="questions to move on from where they would begin")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", nargs="+", default=[], metavar="DTYPE", help="transformers, in these dtypes")
    parser.add_argument("--peer-draft", type=Path, help="separate draft that assists transformers")
    parser.add_argument("--llama-cpp", nargs="+", type=Path, default=[], metavar="FILE", help="GGUF files")
    parser.add_argument("--results", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if min(args.limit, args.new_tokens, args.repeats, args.k) < 1 or min(args.offset, args.ngram) < 0:
        parser.error("--limit, --new-tokens, --repeats and -k are at least 1, --offset and --ngram at least 0")
    if not args.ngram and not args.drafts:
        parser.error("nothing to measure: give --drafts, or --ngram of at least 1")
    if any("=" not in pair for pair in args.drafts):
        parser.error(f"--drafts {' '.join(args.drafts)}: give NAME=DIR")
    return args


def main() -> None:
    args = parsed()
    columns = columns_of(args.columns)
    keep_programs()
    target = specjax.load_model(args.target, args.dtype)
    questions = [q for file in args.files for q in read_questions(file, columns)]
    asked_now = Asked.of(target, questions, args.limit, args.offset, args.new_tokens)
    named = dict(pair.split("=", 1) for pair in args.drafts)
    drafts = {n: specjax.load_drafter(at, target, args.k, quantize=args.quantize_draft) for n, at in named.items()}
    decoders: dict[str, Any] = {**with_controls(target, drafts, args.ngram, args.verifier)}
    if args.peers:
        decoders |= dict(transformers_of(resolve(args.target), args.peer_draft, args.peers))
    if args.llama_cpp:
        decoders |= dict(llama_cpp_of(args.llama_cpp, target.eos_ids))
    found = figures_of(target, asked_now, decoders, args.temperatures, args.repeats, args.new_tokens, args.fixed)
    found = {**found, "rows": with_best(found["rows"])}
    tell(found)
    if args.results is not None:
        names = ("new_tokens", "limit", "offset", "repeats", "k", "fixed", "ngram", "verifier", "quantize_draft")
        settings = {name: getattr(args, name) for name in names} | {"dtype": str(target.dtype)}
        files = {file.name: sha256(file) for file in args.files}
        sums = {**checksums(target, models_of(args)), "questions": files}
        record.write(args.results, {**found, "sha256": sums, "settings": settings})


if __name__ == "__main__":
    try:
        main()
    except specjax.SpecjaxError as error:
        sys.exit(str(error))
