"""Bytes of compiled programs, counted in programs that are written out here."""

import pytest

from jaxtrain.bench.program_bytes import moved_bytes

# A stack of two kernels, of which each turn of the loop multiplies one: 4 x 8 float32 = 128 bytes.
LOOP = """
%sliced (p0: f32[2,4,8], p1: s32[], p2: f32[4]) -> f32[8] {
  %p0 = f32[2,4,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,4,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,4,8}
  %kernel = f32[4,8]{1,0} bitcast(%slice)
  %p2 = f32[4]{0} parameter(2)
  ROOT %dot = f32[8]{0} dot(%p2, %kernel), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[2,4,8], f32[4])) -> (s32[], f32[2,4,8], f32[4]) {
  %state = (s32[], f32[2,4,8]{2,1,0}, f32[4]{0}) parameter(0)
  %index = s32[] get-tuple-element(%state), index=0
  %stack = f32[2,4,8]{2,1,0} get-tuple-element(%state), index=1
  %x = f32[4]{0} get-tuple-element(%state), index=2
  %y = f32[8]{0} fusion(%stack, %index, %x), kind=kOutput, calls=%sliced
  ROOT %next = (s32[], f32[2,4,8]{2,1,0}, f32[4]{0}) tuple(%index, %stack, %x)
}

%condition (state: (s32[], f32[2,4,8], f32[4])) -> pred[] {
  %state = (s32[], f32[2,4,8]{2,1,0}, f32[4]{0}) parameter(0)
  %index = s32[] get-tuple-element(%state), index=0
  %limit = s32[] LIMIT
  ROOT %less = pred[] compare(%index, %limit), direction=LT
}

ENTRY %main (a: (s32[], f32[2,4,8], f32[4])) -> (s32[], f32[2,4,8], f32[4]) {
  %a = (s32[], f32[2,4,8]{2,1,0}, f32[4]{0}) parameter(0)
  ROOT %while = (s32[], f32[2,4,8]{2,1,0}, f32[4]{0}) while(%a), condition=%condition, body=%body
}
"""
KNOWN = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"2"}}')
ONE_TURN = 128 + 4 + 16 + 32  # a kernel of the stack, the index, x and y

# A cache of 2 x 16 bfloat16 that takes one row in place, and an array in the memory of a TPU's core.
PLAIN = """
%written (p0: bf16[2,16], p1: bf16[1,16], p2: s32[]) -> bf16[2,16] {
  %p0 = bf16[2,16]{1,0} parameter(0)
  %p1 = bf16[1,16]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = bf16[2,16]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%dear (d: f32[64]) -> f32[64] {
  %d = f32[64]{0} parameter(0)
  ROOT %twice = f32[64]{0} add(%d, %d)
}

%cheap (c: f32[64]) -> f32[64] {
  ROOT %c = f32[64]{0} parameter(0)
}

ENTRY %main (cache: bf16[2,16], row: bf16[1,16], at: s32[], which: pred[], x: f32[64], big: f32[64]) -> f32[64] {
  %cache = bf16[2,16]{1,0} parameter(0)
  %row = bf16[1,16]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %which = pred[] parameter(3)
  %x = f32[64]{0} parameter(4)
  %big = f32[64]{0} parameter(5)
  %new = bf16[2,16]{1,0} fusion(%cache, %row, %at), kind=kLoop, calls=%written
  %fetch = (f32[64]{0:S(1)}, f32[64]{0}, u32[]) copy-start(%big)
  %near = f32[64]{0:S(1)} copy-done(%fetch)
  %sum = f32[64]{0:S(1)} add(%near, %near)
  ROOT %out = f32[64]{0} conditional(%which, %x, %x), true_computation=%dear, false_computation=%cheap
}
"""


@pytest.mark.parametrize(
    ("program", "trips", "expected"),
    [
        pytest.param(KNOWN.replace("LIMIT", "parameter(1)"), 1, 2 * ONE_TURN, id="turns that the compiler knows"),
        pytest.param(LOOP.replace("LIMIT", "constant(3)"), 1, 3 * ONE_TURN, id="turns by a constant"),
        pytest.param(LOOP.replace("LIMIT", "parameter(1)"), 5, 5 * ONE_TURN, id="turns that nobody knows"),
        pytest.param(PLAIN, 1, (32 + 4 + 32) + 256, id="an update in place, a transfer into a core, the least branch"),
    ],
)
def test_bytes_are_counted_once_per_run(program: str, trips: int, expected: int) -> None:
    assert sum(one.bytes for one in moved_bytes(program, unknown_trips=trips)) == expected
