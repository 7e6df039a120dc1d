"""Decoding beside transformers on torch, on one machine, in one interleaved run: batch 1, float32, the same prompts.

    python experiments/peer_transformers.py [--target DIR] [--draft DIR] [--prompts 12] [--new-tokens 192] [--repeats 3]
    python experiments/peer_transformers.py --shapes

Plain and speculative decoding against `generate` and its assisted generation with the same saved draft, greedy and at
temperature 1 (there with block verification), each side at its own best k of those measured, and both at each k. With
``--shapes`` plain decoding alone, of random Llamas of 11M and 94M parameters whose weights are bfloat16 numbers, as
those of most checkpoints are; both sides compute in float32. Seconds of a prompt are medians of the repeats and hold
prefill and all of the host's work; warm-up and compilation are apart; end-of-sequence is off on both sides. Exit
status 1 if a required ratio is missed. Needs torch: `make parity` installs it. About 8 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import specjax
from specjax.cli import user_errors
from specjax.config import load_config
from specjax.data import corpus
from specjax.errors import DataError
from specjax.jobs.bench import held_out_prompts
from specjax.models.config import ModelConfig
from specjax.models.files import import_transformers
from specjax.models.hf import LoadedModel
from specjax.models.transformer import Model
from specjax.report import record
from specjax.runtime.compile_cache import count_compiles

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "11M": ModelConfig(2048, 384, 1024, 6, 6, 6, 64, 1024),
    "94M": ModelConfig(2048, 768, 2304, 12, 12, 12, 64, 1024),
}
SPECULATIVE = "speculative"
REQUIRED = {SPECULATIVE: 3.0, "11M": 4.0, "94M": 1.8}
"""Least ratio of tokens per second over those of transformers: speculative decoding at the best k, plain of a shape."""
PROMPT_TOKENS = 64
REST = 0.3
"""Seconds before every timed run: torch's threads spin for a while after their last work."""
Name = Literal["transformers", "specjax"]


@dataclasses.dataclass(frozen=True)
class Cell:
    """``k`` 0: plain decoding."""

    side: Name
    temperature: float
    k: int


class Side(Protocol):
    def decode(self, prompt: Sequence[int], temperature: float, k: int, seed: int) -> list[int]:
        """The new tokens."""
        ...


class Transformers:
    def __init__(self, target: Path, draft: Path | None, new_tokens: int, dtype: str = "float32", device: str = "cpu"):
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise DataError("torch is not installed, and transformers decodes on it; run `make parity` once") from error
        self._torch.set_num_threads(cores())
        self._dtype, self._device = getattr(self._torch, dtype), device
        self._transformers = import_transformers()
        self._transformers.utils.logging.set_verbosity_error()
        self._transformers.utils.logging.disable_progress_bar()
        self._target = self._load(target)
        self._draft = None if draft is None else self._load(draft)
        self._config = functools.cache(functools.partial(self._generation_config, new_tokens))

    def _load(self, directory: Path) -> Any:
        models = self._transformers.AutoModelForCausalLM
        model = models.from_pretrained(directory, dtype=self._dtype, local_files_only=True).to(self._device).eval()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return model

    def _generation_config(self, new_tokens: int, temperature: float) -> Any:
        # Its own default would be the 50 most likely tokens.
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        make = self._transformers.GenerationConfig
        return make(max_new_tokens=new_tokens, do_sample=temperature > 0, pad_token_id=0, use_cache=True, **sampling)

    def decode(self, prompt: Sequence[int], temperature: float, k: int, seed: int) -> list[int]:
        torch, assistant = self._torch, {}
        if k:
            assert self._draft is not None  # cells with k > 0 are made for pairs alone
            settings = self._draft.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0
            assistant = {"assistant_model": self._draft}
        torch.manual_seed(seed)
        ids = torch.tensor([list(prompt)], device=self._device)
        with torch.inference_mode():
            out = self._target.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=self._config(temperature), **assistant
            )
        return out[0, len(prompt) :].tolist()


class Specjax:
    def __init__(self, target: LoadedModel, draft: LoadedModel | None, new_tokens: int):
        self._target, self._draft, self._new_tokens = target, draft, new_tokens
        self._decoder = functools.cache(self._make)

    def _make(self, k: int) -> specjax.Decoder:
        if not k:
            return specjax.Decoder(self._target)
        return specjax.Decoder(self._target, specjax.DraftModel(self._draft, k), "block")

    def decode(self, prompt: Sequence[int], temperature: float, k: int, seed: int) -> list[int]:
        options: dict[str, Any] = {
            "max_new_tokens": self._new_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
        }
        return self._decoder(k).generate([prompt], **options).tokens[0]


@dataclasses.dataclass
class Measured:
    """``seconds[cell]``: ``[repeats, prompts]``. ``identical``: prompts of which plain greedy tokens are the same on
    both sides."""

    seconds: dict[Cell, np.ndarray]
    compile_seconds: float
    identical: int

    def tokens_per_s(self, cell: Cell, new_tokens: int) -> float:
        times = np.median(self.seconds[cell], axis=0)
        return new_tokens * len(times) / float(times.sum())


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(
    sides: Mapping[Name, Side], ks: Sequence[int], prompts: Sequence[Sequence[int]], new_tokens: int, repeats: int
) -> Measured:
    """Every cell on every prompt in turns, the other way round in every second repeat."""
    cells = [Cell(side, t, k) for t in (0.0, 1.0) for k in (0, *ks) for side in sides]
    with count_compiles() as compiled:
        for cell in cells:
            sides[cell.side].decode(prompts[0], cell.temperature, cell.k, seed=0)
    seconds = {cell: np.zeros((repeats, len(prompts))) for cell in cells}
    greedy: dict[Cell, list[list[int]]] = {}
    turns = list(itertools.product(range(repeats), range(len(prompts))))
    for repeat, i in track(turns, "decoding", console=Console(stderr=True)):
        for cell in reversed(cells) if repeat % 2 else cells:
            time.sleep(REST)
            start = time.perf_counter()
            tokens = sides[cell.side].decode(prompts[i], cell.temperature, cell.k, seed=i)
            seconds[cell][repeat, i] = time.perf_counter() - start
            assert len(tokens) == new_tokens, cell
            if repeat == 0 and cell.temperature == cell.k == 0:
                greedy.setdefault(cell, []).append(tokens)
    identical = sum(a == b for a, b in zip(*greedy.values(), strict=True))
    return Measured(seconds, compiled.seconds, identical)


def rows_of(subject: str, measured: Measured, ks: Sequence[int], new_tokens: int) -> list[dict[str, Any]]:
    """One comparison a row: plain decoding, and for a pair speculation at each side's best k, then at each k."""
    rows, names = [], get_args(Name)
    for t in (0.0, 1.0):
        speed = {(name, k): measured.tokens_per_s(Cell(name, t, k), new_tokens) for name in names for k in (0, *ks)}
        compared = [("autoregressive" if ks else subject, 0, 0)]
        if ks:
            theirs, ours = (max((speed[name, k], k) for k in ks)[1] for name in names)
            compared.append((SPECULATIVE, theirs, ours))
        for mode, theirs, ours in (*compared, *(("same k", k, k) for k in ks)):
            slow, fast = speed["transformers", theirs], speed["specjax", ours]
            ratio = fast / slow
            speeds = {"transformers_tokens_per_s": slow, "specjax_tokens_per_s": fast}
            ids = {"temperature": t, "mode": mode, "transformers_k": theirs, "specjax_k": ours}
            required = REQUIRED.get(mode)
            met = None if required is None else ratio >= required
            rows.append({**ids, **speeds, "ratio": ratio, "required": required, "met": met})
    return rows


def table_of(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title)
    for name in ("temperature", "mode", "transformers", "specjax", "ratio", "required"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for row in rows:
        speeds = []
        for side in ("transformers", "specjax"):
            k = row[f"{side}_k"]
            speeds.append(f"{row[f'{side}_tokens_per_s']:,.0f}" + (f" (k = {k})" if k else ""))
        required = "" if row["required"] is None else f">= {row['required']:g}: {'met' if row['met'] else 'MISSED'}"
        table.add_row(f"{row['temperature']:g}", row["mode"], *speeds, f"{row['ratio']:.2f}", required)
    return table


def pair(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows, what else is to be kept)."""
    target, draft = (specjax.load_model(path, "float32") for path in (args.target, args.draft))
    config = load_config(args.config, [])
    _, held_out = corpus.split_held_out(corpus.read_documents(str(config.data.path)), config.data.held_out)
    prompts = held_out_prompts(held_out, target, PROMPT_TOKENS, args.prompts)
    sides: dict[Name, Side] = {
        "transformers": Transformers(args.target, args.draft, args.new_tokens),
        "specjax": Specjax(target, draft, args.new_tokens),
    }
    measured = measure(sides, args.ks, prompts, args.new_tokens, args.repeats)
    about: dict[str, Any] = {"target": str(args.target), "draft": str(args.draft), "ks": args.ks}
    about |= {"compile_seconds": measured.compile_seconds, "greedy_identical": measured.identical}
    return rows_of("pair", measured, args.ks, args.new_tokens), about


def shapes(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The same of plain decoding at random weights."""
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {"compile_seconds": 0.0, "greedy_identical": {}}
    prompts = np.random.default_rng(0).integers(0, 2048, (args.prompts, PROMPT_TOKENS)).tolist()
    for name, config in SHAPES.items():
        params = jax.jit(Model(config).init)(jax.random.key(0))
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
        model = LoadedModel(Model(config), params, name=name)
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch) / name
            specjax.save_model(model, directory)
            sides: dict[Name, Side] = {
                "transformers": Transformers(directory, None, args.new_tokens),
                "specjax": Specjax(model, None, args.new_tokens),
            }
            measured = measure(sides, (), prompts, args.new_tokens, args.repeats)
        rows += rows_of(name, measured, (), args.new_tokens)
        about["compile_seconds"] += measured.compile_seconds
        about["greedy_identical"][name] = measured.identical
    return rows, about


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=Path("models/demo-target"))
    parser.add_argument("--draft", type=Path, default=Path("models/demo-drafts/separate"))
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"), help="whose held-out text is used")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ks", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--shapes", action="store_true", help="random models of 11M and 94M instead of the pair")
    parser.add_argument("--out", type=Path, help="default: experiments/results/peer_*.json")
    args = parser.parse_args()
    rows, about = shapes(args) if args.shapes else pair(args)
    title = f"tokens per second, {args.prompts} prompts, {args.new_tokens} new tokens, {cores()} cores"
    Console().print(table_of(title, rows))
    print(f"compilation apart: {about['compile_seconds']:.0f} s; plain greedy tokens the same on both sides: "
          f"{about['greedy_identical']} of {args.prompts} prompts")  # fmt: skip
    versions = {name: importlib.import_module(name).__version__ for name in ("jax", "torch", "transformers")}
    settings = {name: getattr(args, name) for name in ("prompts", "new_tokens", "repeats")}
    found = {
        "versions": versions,
        **settings,
        **about,
        "rows": rows,
    }
    out = args.out or RESULTS / ("peer_shapes.json" if args.shapes else "peer_transformers.json")
    record.write(out, found)
    return 1 if any(row["met"] is False for row in rows) else 0


if __name__ == "__main__":
    with user_errors():
        sys.exit(main())
