"""The reader of compiled text, on a program whose parts are known."""

from __future__ import annotations

import pytest

from tests.accelerators.hlo import Program, Shape

TEXT = """HloModule jit_f, is_scheduled=true

%fused_update (p0: bf16[8,64], p1: bf16[1,64]) -> bf16[8,64] {
  %p0 = bf16[8,64]{1,0} parameter(0)
  %p1 = bf16[1,64]{1,0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %updated = bf16[8,64]{1,0} dynamic-update-slice(%p0, %p1, %zero, %zero)
}

%fused_dot (p2: s8[64,64], p3: bf16[8,64]) -> f32[8,64] {
  %p2 = s8[64,64]{1,0} parameter(0)
  %p3 = bf16[8,64]{1,0} parameter(1)
  %wide = bf16[64,64]{1,0} convert(%p2)
  ROOT %product = f32[8,64]{1,0} dot(%p3, %wide), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%inner (p4: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %p4 = (s32[], f32[8,64]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%p4), index=0
  %x = f32[8,64]{1,0} get-tuple-element(%p4), index=1
  %twice = f32[8,64]{1,0:T(8,128)S(1)} add(%x, %x), backend_config={"estimated_cycles":"70"}
  ROOT %next = (s32[], f32[8,64]{1,0}) tuple(%count, %twice)
}

%going (p5: (s32[], f32[8,64])) -> pred[] {
  %p5 = (s32[], f32[8,64]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: bf16[8,64], b: bf16[1,64], w: s8[64,64]) -> f32[8,64] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[1,64]{1,0} parameter(1)
  %w = s8[64,64]{1,0} parameter(2)
  %written = bf16[8,64]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused_update
  %made = f32[8,64]{1,0} fusion(%w, %written), kind=kCustom, calls=%fused_dot
  %first = s32[] constant(0)
  %start = (s32[], f32[8,64]{1,0}) tuple(%first, %made)
  %loop = (s32[], f32[8,64]{1,0}) while(%start), condition=%going, body=%inner, config={"known_trip_count":{"n":"5"}}
  ROOT %out = f32[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return Program(TEXT)


def test_instructions_run_as_often_as_their_loops(program):
    run = {x.name: times for _, x, times in program.run(program.entry)}
    assert run == {"written": 1, "made": 1, "twice": 5}
    (loop,) = program.loops(program.entry)
    assert loop.trip_count == 5
    assert program.body(loop).root.name == "next"


def test_what_an_instruction_reads_is_made_of_and_writes(program):
    made, written = (program.entry.instructions[name] for name in ("made", "written"))
    assert program.entry.shapes_read(made) == [Shape("s8", (64, 64)), Shape("bf16", (8, 64))]
    assert program.opcodes(made) == {"fusion", "parameter", "convert", "dot"}
    assert program.writes_in_place(written)
    assert not program.writes_in_place(made)
    twice = program.computations["inner"].instructions["twice"]
    assert (twice.cycles, twice.results) == (70, (Shape("f32", (8, 64), space=1),))


@pytest.mark.parametrize(("dtype", "nbytes"), [("s4", 32), ("bf16", 128), ("f32", 256), ("pred", 64), ("f8e4m3fn", 64)])
def test_bytes_of_a_type(dtype, nbytes):
    assert Shape(dtype, (8, 8)).nbytes == nbytes
