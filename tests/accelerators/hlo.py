"""Reader of the text of a compiled program (XLA's HLO, optimised and scheduled): which instructions a device runs, what
each of them reads and writes, and how often a loop runs them."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

FREE = frozenset({
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "while", "conditional", "call", "opt-barrier", "add-dependency", "copy-done", "async-done", "all-reduce-done",
    "slice-done", "all-gather-done", "collective-permute-done",
})  # fmt: skip
"""Opcodes that run nothing themselves: they name memory, or run other computations, or wait."""
IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
"""Opcodes that write a part of their first operand where it lies."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Type of an array. ``space``: number of the memory that it lies in; 0: the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        bits = {"pred": 8, "s4": 4, "u4": 4, "token": 0}.get(self.dtype)
        bits = int(re.sub(r"\D*(\d+).*", r"\1", self.dtype)) if bits is None else bits
        return self.size * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction. ``called``: names of the computations that it runs or is made of."""

    name: str
    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    is_root: bool
    text: str

    @property
    def trip_count(self) -> int | None:
        """Rounds of a loop, if XLA knows them."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.text)
        return None if found is None else int(found[1])

    @property
    def cycles(self) -> int:
        """XLA's estimate of its cycles on a TPU; 0 elsewhere."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.text)
        return 0 if found is None else int(found[1])

    @property
    def target(self) -> str | None:
        """Name of the library's function that a custom call calls."""
        found = re.search(r'custom_call_target="([^"]+)"', self.text)
        return None if found is None else found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation by the names of its instructions, in the order in which they run."""

    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        return next(x for x in self.instructions.values() if x.is_root)

    def shapes_read(self, instruction: Instruction) -> list[Shape]:
        """Arrays that an instruction of this computation reads."""
        known = (self.instructions.get(name) for name in instruction.operands)
        return [shape for operand in known if operand is not None for shape in operand.results]


class Program:
    """A compiled program, from its text."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        lines: list[str] = []
        entry = name = ""
        for line in text.splitlines():
            began = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            if began is not None:
                name, lines = began[2], []
                entry = name if began[1] else entry
            elif line == "}" and name:
                found = map(_instruction, lines)
                self.computations[name] = Computation({x.name: x for x in found if x is not None})
                name = ""
            elif name:
                lines.append(line)
        self.entry = self.computations[entry]

    def opcodes(self, instruction: Instruction) -> frozenset[str]:
        """Opcodes of an instruction and of all that it is made of."""
        found = {instruction.opcode}
        for name in instruction.called:
            for inner in self.computations[name].instructions.values():
                found |= self.opcodes(inner)
        return frozenset(found)

    def writes_in_place(self, instruction: Instruction) -> bool:
        """True if the result is an operand with a part of it replaced."""
        if instruction.opcode == "fusion":
            inside = self.computations[instruction.called[0]]
            found = inside.root
            while found.opcode in ("bitcast", "convert", "copy") and found.operands:
                found = inside.instructions[found.operands[0]]
            parts = [inside.instructions[name] for name in found.operands] if found.opcode == "tuple" else [found]
            return any(part.opcode in IN_PLACE for part in parts)
        return instruction.opcode in IN_PLACE

    def run(self, computation: Computation, times: int = 1) -> Iterator[tuple[Computation, Instruction, int]]:
        """Instructions that a computation runs, and how often: those of loops, as often as XLA knows them to run, else
        once; those of every branch."""
        for instruction in computation.instructions.values():
            if instruction.opcode not in FREE:
                yield computation, instruction, times
            elif instruction.opcode in ("while", "conditional", "call"):
                rounds = instruction.trip_count or 1
                for name in instruction.called:
                    yield from self.run(self.computations[name], times * rounds)

    def loops(self, computation: Computation) -> Iterator[Instruction]:
        """Loops of a computation, and those inside them."""
        for instruction in computation.instructions.values():
            if instruction.opcode in ("while", "conditional", "call"):
                if instruction.opcode == "while":
                    yield instruction
                for name in instruction.called:
                    yield from self.loops(self.computations[name])

    def body(self, loop: Instruction) -> Computation:
        """What a loop runs each round."""
        return self.computations[re.search(r"body=%?([\w.\-]+)", loop.text)[1]]  # pyright: ignore[reportOptionalSubscript]


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$", line)
    if found is None:
        return None
    kind, rest = _split(found[3])
    opcode, _, rest = rest.partition("(")
    inside = _closing("(" + rest)
    operands = re.findall(r"%([\w.\-]+)", rest[: inside - 1])
    text = rest[inside:]
    called = re.findall(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)", text)
    for branches in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", text):
        called += re.findall(r"%?([\w.\-]+)", branches)
    return Instruction(found[2], opcode.strip(), _shapes(kind), tuple(operands), tuple(called), bool(found[1]), text)


def _split(text: str) -> tuple[str, str]:
    """(type, the rest) of what stands behind an instruction's name."""
    end = _closing(text) if text.startswith("(") else text.index(" ")
    return text[:end], text[end:].lstrip()


def _closing(text: str) -> int:
    """Number of characters up to the parenthesis that closes the first one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return i + 1
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")


def _shapes(text: str) -> tuple[Shape, ...]:
    found = re.findall(r"\b(pred|token|[subf]\w*\d\w*|c\d+)\[([\d,<=]*)\](\{[^{}]*\})?", text)
    spaces = (re.search(r"S\((\d+)\)", layout) for _, _, layout in found)
    return tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), int(space[1]) if space else 0)
        for (dtype, dims, _), space in zip(found, spaces, strict=True)
    )
