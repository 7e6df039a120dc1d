"""Schema of `results.json`, which a finished run leaves for its report; parts that were not measured may be absent.

Steps and tokens of a training curve are counted from the start of its own phase.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specjax.errors import SpecjaxError

FILE_NAME = "results.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class Figure(_Record):
    """A figure with the bound that it must reach, empty for one that is only reported. ``timing``: it depends on the
    machine; ``counted``: on the choice of a few decoded prompts."""

    key: str
    value: Any = None
    bound: str = ""
    ok: bool
    timing: bool = False
    counted: bool = False

    @property
    def depends_on(self) -> str:
        return "timing" if self.timing else "few prompts" if self.counted else ""

    @property
    def fatal(self) -> bool:
        """True if a miss is an error: neither the machine nor a few prompts explain it."""
        return not (self.timing or self.counted)


class TrainingRecord(_Record):
    step: int
    tokens: int | None = None
    loss: float | None = None
    alpha: float | None = None
    held_out_nll: float | None = None
    block_efficiency: float | None = None


class Training(_Record):
    """Training curves by stage; ``control`` maps a learning rate, as text, to its curve."""

    pretrain: tuple[TrainingRecord, ...] = ()
    distill: tuple[TrainingRecord, ...] = ()
    control: dict[str, tuple[TrainingRecord, ...]] = {}


class DecodingRow(_Record):
    """One cell of the grid, with wall time summed over prompts. ``acceptance_at``: by depth, from 1; ``k_used``: blocks
    by k, from 0; ``proposals``: draft lengths of some rows, block by block, where they were chosen."""

    drafter: str
    k: int | None = None
    batch_size: int = Field(ge=1)
    temperature: float = Field(ge=0)
    seconds: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    cost_per_1k_tokens: float | None = None
    speedup: float | None = None
    predicted_speedup: float | None = None
    block_efficiency: float | None = None
    block_efficiency_interval: tuple[float, float] | None = None
    acceptance_rate: float | None = None
    acceptance_at: tuple[float, ...] | None = None
    conditional_acceptance_at: tuple[float, ...] | None = None
    k_used: tuple[int, ...] | None = None
    probes: int | None = None
    proposals: tuple[tuple[int, ...], ...] | None = None
    repeats: int | None = None
    identical: bool | None = None


class Pass(_Record):
    """A pass, or a whole block, beside the roofline of the device; ``ridge`` and ``intensity`` in FLOP a byte."""

    name: str = Field(alias="pass")
    batch: int
    flops: float
    bytes: float
    intensity: float
    ridge: float
    bound: str
    least_seconds: float
    seconds: float | None = None
    share_of_roofline: float | None = None


class Comparison(_Record):
    """Figures of a drafter on the text of one source; ``low`` .. ``high``: 95% interval of its block efficiency."""

    source: str
    temperature: float = Field(ge=0)
    drafter: str
    prompts: int | None = None
    k: int | None = None
    alpha: float | None = None
    block_efficiency: float | None = None
    low: float | None = None
    high: float | None = None
    tokens_per_s: float | None = None


class Place(_Record):
    """Figures at one depth of a block, from 1, on held-out text: acceptance, loss at the end of training, and share of
    positions at which draft and target find the same token most likely."""

    place: int
    alpha_before: float | None = None
    alpha_after: float | None = None
    loss: float | None = None
    agreement: float | None = None


class Simulated(Comparison):
    """Decoded figures, with the block efficiency that the training forward gives for the same texts."""

    simulated: float


class Piece(_Record):
    """Consecutive text of one origin."""

    text: str
    origin: Literal["prompt", "accepted", "corrected", "bonus"]


class Sample(_Record):
    """One generation: the prompt, then the new text piece by piece."""

    prompt: str
    pieces: tuple[Piece, ...]
    drafter: str
    k: int | None = None
    temperature: float = 0.0


class Verifier(_Record):
    """The rule that all drafts were verified by. For a lossy rule: the total variation of its sampled tokens from the
    target's distribution, and that of exact sampling of as many tokens by chance."""

    kind: str
    lossless: bool
    total_variation: float | None = None
    total_variation_of_exact_sampling: float | None = None


class Results(_Record):
    """Content of the whole file."""

    name: str
    date: str
    summary: dict[str, Any]
    command: str | None = None
    config_yaml: str | None = None
    machine: dict[str, Any] = {}
    figures: tuple[Figure, ...] = ()
    training: Training = Training()
    decoding: tuple[DecodingRow, ...] = ()
    comparison: tuple[Comparison, ...] = ()
    places: tuple[Place, ...] = ()
    simulated: tuple[Simulated, ...] = ()
    self_tests: dict[str, str] = {}
    """Exported draft -> summary of its self-test when it was loaded again."""
    verifier: Verifier | None = None
    compile_seconds: float | None = None
    roofline: tuple[Pass, ...] = ()
    stage_seconds: dict[str, float] = {}
    sample: Sample | None = None


def load(run_dir: Path) -> Results:
    """Results of the run in `run_dir`; SpecjaxError names the file, field and value that cannot be used."""
    path = run_dir / FILE_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecjaxError(
            f"{path}: not found; a run writes it when it ends: finish the run, or name the directory of a finished one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecjaxError(f"{path}: cannot be read ({error}); restore it, or delete it and run again") from error
    except json.JSONDecodeError as error:
        raise SpecjaxError(
            f"{path}: line {error.lineno} is not JSON ({error.msg}); delete the file and run again to measure anew"
        ) from error
    try:
        return Results.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the top level"
        raise SpecjaxError(
            f"{path}: {field}: {first['msg']}, found {_short(first['input'])}; "
            "delete the file and run again to measure anew"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def ordered(rows: tuple[DecodingRow, ...]) -> list[tuple[tuple[int, float], list[DecodingRow]]]:
    """The grid as ((batch size, temperature), rows) in reading order; autoregressive leads, then by drafter and k."""
    rank = {"autoregressive": 0, "draft_after": 1, "draft_before": 2}
    groups: dict[tuple[int, float], list[DecodingRow]] = {}
    for row in sorted(rows, key=lambda r: (r.batch_size, r.temperature, rank.get(r.drafter, 3), r.drafter, r.k or 0)):
        groups.setdefault((row.batch_size, row.temperature), []).append(row)
    return list(groups.items())


COMPARED = ("autoregressive", "draft_before", "draft_after")


def before_and_after(rows: tuple[Comparison, ...]) -> list[tuple[tuple[str, float], list[Comparison]]]:
    """((source, temperature), rows) in the order given; plain decoding leads, then the drafts, nothing else."""
    groups: dict[tuple[str, float], list[Comparison]] = {}
    for row in rows:
        if row.drafter in COMPARED:
            groups.setdefault((row.source, row.temperature), []).append(row)
    return [(key, sorted(group, key=lambda row: COMPARED.index(row.drafter))) for key, group in groups.items()]


def fastest(rows: list[DecodingRow]) -> DecodingRow | None:
    """The row with the largest speedup, which compares turns that ran side by side; tokens a second of single turns may
    come from a faster spell of the machine. Without a measured speedup, the row with the most tokens a second."""
    timed = [row for row in rows if row.speedup is not None]
    if timed:
        return max(timed, key=lambda row: row.speedup or 0.0)
    return max((r for r in rows if r.tokens_per_s is not None), key=lambda r: r.tokens_per_s or 0.0, default=None)
