"""Collectives of scheduled programs: bytes, turns of loops, and the matmuls between their start and their end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.plan.compilers.matmuls import MatmulCounter
from jaxtrain.plan.compilers.program_text import read_program
from jaxtrain.plan.compilers.schedule import overlapped_share, transfers

PRODUCT = "%dot.1 = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
OPERANDS = "%x = f32[4,16]{1,0} parameter(0)\n  %w = f32[16,8]{1,0} parameter(1)\n  %s = bf16[512]{0} parameter(2)"
HALVES = ("%ag = (bf16[512]{0}, bf16[4096]{0}) all-gather-start(%s)", "%agd = bf16[4096]{0} all-gather-done(%ag)")
# A chain as TPUs write it: begun, carried on beside a product, and ended by fusions that name one channel.
CHAIN = """
%begin (p: bf16[512]) -> bf16[4096] {
  %p = bf16[512]{0:T(1024)(128)} parameter(0)
  %ag.1 = bf16[4096]{0:T(1024)} all-gather(%p), channel_id=7, dimensions={0}
  ROOT %c = bf16[4096]{0} custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (x: f32[4,16], w: f32[16,8], p: bf16[512]) -> f32[4,8] {
  %x = f32[4,16]{1,0} parameter(0)
  %w = f32[16,8]{1,0} parameter(1)
  %p = bf16[512]{0} parameter(2)
  %ag.2 = bf16[4096]{0} all-gather(%p), channel_id=7, dimensions={0}
  ROOT %convolution.1 = f32[4,8]{1,0} convolution(%x, %w), dim_labels=bf_io->bf
}

%end (p: bf16[512]) -> bf16[4096] {
  %p = bf16[512]{0} parameter(0)
  %ag.3 = bf16[4096]{0} all-gather(%p), channel_id=7, dimensions={0}
  ROOT %c = bf16[4096]{0} custom-call(%p, %ag.3), custom_call_target="AsyncCollectiveDone"
}
"""
STEPS = (
    "%b = bf16[4096]{0} fusion(%s), kind=kCustom, calls=%begin",
    "%m = f32[4,8]{1,0} fusion(%x, %w, %s), kind=kCustom, calls=%async_collective_fusion.1",
    "%e = bf16[4096]{0} fusion(%s, %b), kind=kCustom, calls=%end",
)
WRAPPED = """
%wrapped (p: bf16[512]) -> bf16[64] {
  %p = bf16[512]{0} parameter(0)
  ROOT %rs = bf16[64]{0} reduce-scatter(%p), dimensions={0}
}
"""
ASYNC = ("%a = ((bf16[512]{0}), bf16[64]{0}) async-start(%s), calls=%wrapped", "%u = (bf16[512]{0}) async-update(%a)")
ASYNC_DONE = "%ad = bf16[64]{0} async-done(%u)"

# id: (other computations, instructions of the program, kind, bytes, matmuls beside it, their FLOPs).
PROGRAMS = {
    "product between the halves": ("", (HALVES[0], PRODUCT, HALVES[1]), "all-gather", 8192, 1, 1024),
    "product after both halves": ("", (*HALVES, PRODUCT), "all-gather", 8192, 0, 0),
    "in one piece": ("", ("%ar = bf16[512]{0} all-reduce(%s), to_apply=%add", PRODUCT), "all-reduce", 2048, 0, 0),
    "chain of fusions": (CHAIN, STEPS, "all-gather", 8192, 1, 1024),
    "asynchronous call with an update": (WRAPPED, (*ASYNC, PRODUCT, ASYNC_DONE), "reduce-scatter", 1024, 1, 1024),
}


def program(others: str, instructions: tuple[str, ...]) -> str:
    lines = "\n".join(f"  {one}" for one in instructions)
    return (
        f"HloModule m, is_scheduled=true\n{others}\nENTRY %main (x: f32[4,16]) -> f32[] {{\n  {OPERANDS}\n{lines}\n}}\n"
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_collective_and_what_is_beside_it(name):
    others, instructions, kind, size, matmuls, flops = PROGRAMS[name]
    (one,) = transfers(program(others, instructions))
    assert (one.kind, one.bytes, one.turns) == (kind, size, 1)
    assert (one.beside.number, one.beside.flops) == (matmuls, flops)
    assert overlapped_share([one]) == (matmuls > 0)


def loop(condition: str, attribute: str = "") -> str:
    """A loop over `HALVES` with a product between, that begins at 1 where the program says so."""
    return f"""HloModule m, is_scheduled=true

%body (state: (s32[], f32[4,16])) -> (s32[], f32[4,16]) {{
  {OPERANDS}
  {HALVES[0]}
  {PRODUCT}
  {HALVES[1]}
}}

%condition (state: (s32[], f32[4,16])) -> pred[] {{
  %bound = s32[]{{:T(128)}} constant(5)
  %state = (s32[], f32[4,16]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %lt = pred[] {condition}
}}

ENTRY %main (x: f32[4,16]) -> f32[] {{
  %first = s32[] constant(1)
  %x = f32[4,16]{{1,0}} parameter(0)
  %t = (s32[], f32[4,16]{{1,0}}) tuple(%first, %x)
  ROOT %loop = (s32[], f32[4,16]{{1,0}}) while(%t), condition=%condition, body=%body{attribute}
}}
"""


LESS = "compare(%i, %bound), direction=LT"
# id: (the program, turns).
LOOPS = {
    "count in the loop, as of GPUs and CPUs": (
        loop(LESS, ', backend_config={"known_trip_count":{"n":"31"}}'),
        31,
    ),
    "bound in the condition, as of TPUs": (loop(LESS), 4),
    "unknown": (loop("compare(%i, %bound), direction=NE"), 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_counts_as_often_as_it_turns(name):
    text, turns = LOOPS[name]
    (one,) = transfers(text)
    assert one.turns == turns
    assert one.step_bytes == 8192 * turns
    counter = MatmulCounter(read_program(text))
    assert counter.computation(counter.program.entry).flops == 1024 * turns


def test_a_convolution_leaves_out_the_padding():
    """A batched product as TPUs write it: 8 windows of 15 places, one of them on the input."""
    text = program(
        "",
        (
            "%a = bf16[4,16,1]{2,1,0} parameter(3)",
            "%k = bf16[8,8,16]{2,1,0} parameter(4)",
            "%c = bf16[4,8,8]{2,1,0} convolution(%a, %k), window={size=8 pad=7_7 rhs_reversal=1}, "
            "dim_labels=bf0_0oi->b0f",
        ),
    )
    counter = MatmulCounter(read_program(text))
    assert counter.computation("main").flops == 2 * 4 * 8 * 8 * 16


def test_a_compiled_program_is_counted():
    """Of emulated devices every collective is in one piece; a scan of three turns sums a product on each."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def local(x, ws):
        return jax.lax.scan(lambda y, w: (jax.lax.psum(y @ w, "data") * 0.1, None), x, ws)[0]

    spec = PartitionSpec()
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
    text = run.lower(jnp.ones((8, 16)), jnp.ones((3, 16, 16))).compile().as_text()
    assert text is not None
    (one,) = transfers(text)
    assert (one.kind, one.step_bytes, one.beside.number) == ("all-reduce", 3 * 2 * 4 * 8 * 16, 0)
    counter = MatmulCounter(read_program(text))
    assert counter.computation(counter.program.entry).flops == 3 * 2 * 8 * 16 * 16


def test_an_unscheduled_program_is_refused():
    with pytest.raises(ValueError, match="is_scheduled=true"):
        transfers("HloModule m\n")
