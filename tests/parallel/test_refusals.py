"""Layouts that cannot be: one line that names the setting and the nearest values that work."""

import re
from collections.abc import Callable

import numpy as np
import optax
import pytest
from layouts import CASES, make_step, transformer
from layouts import layout as layout_of

from jaxtrain import from_functions
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import classification, language_modeling
from jaxtrain.train.make_step import make_train_step
from jaxtrain.train.parallelism import Parallelism


def lm(batch: int = 32, length: int = 32, **model: int) -> Callable[..., None]:
    def build(degrees: dict[str, int], options: dict[str, object], accumulation: int) -> None:
        mesh = make_mesh(**{"data": 1, **degrees})
        step = make_train_step(
            transformer("none", **model),
            language_modeling(),
            optax.sgd(0.1),
            mesh=mesh,
            accumulation_steps=accumulation,
            parallelism=Parallelism(**options),
        )
        rows = np.zeros((batch, length), np.int32)
        step.lower({"inputs": rows, "targets": rows})

    return build


def mlp(degrees: dict[str, int], options: dict[str, object], accumulation: int) -> None:
    model = build_model({"kind": "mlp"}, input_shape=(8,), num_outputs=4)
    mesh = make_mesh(**{"data": 1, **degrees})
    make_train_step(model, classification(), optax.sgd(0.1), mesh=mesh, parallelism=Parallelism(**options))


# what is built, degrees, options, accumulation, the message
ROWS = {
    "heads": (lm(num_heads=4, num_kv_heads=4), dict(tensor=8), {}, 1, r"heads .* is 4, .* by tensor=8; make it 8"),
    "layers": (
        lm(num_layers=6),
        dict(pipe=4, data=2),
        {},
        1,
        r"6 layers .*pipe=4; use 4 or 8 layers, or parallel.pipe=2 or 3",
    ),
    "more stages than layers": (
        lm(num_layers=4),
        dict(pipe=8),
        {},
        1,
        r"4 layers .*pipe=8; use 8 layers, or .*pipe=2 or 4",
    ),
    "chunks": (
        lm(),
        dict(pipe=8),
        dict(schedule="interleaved_1f1b"),
        1,
        r"8 layers .*pipe=8 x parallel.chunks=2; use 16 layers, or parallel.pipe=2 or 4",
    ),
    "interleaved accumulation": (
        lm(num_layers=8),
        dict(pipe=4, data=2),
        dict(schedule="interleaved_1f1b"),
        6,
        r"^train.accumulation_steps=6 is not a multiple of parallel.pipe=4.*; use train.accumulation_steps=4 or 8, or ",
    ),
    "interleaved microbatches": (
        lm(),
        dict(pipe=4, data=2),
        dict(schedule="interleaved_1f1b", microbatches=6),
        1,
        r"parallel.microbatches=6 .*4 or 8",
    ),
    "microbatches and accumulation": (
        lm(),
        dict(pipe=2, data=4),
        dict(microbatches=4),
        2,
        r"microbatches=4 and train.accumulation_steps=2 differ",
    ),
    "batch": (lm(batch=24), dict(pipe=2, data=4), dict(microbatches=4), 1, r"global_batch_size=24 .* use 16 or 32"),
    "sequence": (lm(length=30), dict(context=4, data=2), {}, 1, r"sequence_length=30 .*context=4; use 28 or 32"),
    "sequence of a ring": (lm(length=28), dict(context=8), {}, 1, r"sequence_length=28 .*context=8"),
    "ring in a pipeline": (
        lm(),
        dict(pipe=2, context=4),
        dict(context_attention="ring"),
        1,
        r"context_attention=ring .*pipe=2.*(all_to_all|gather)",
    ),
    "heads of all-to-all": (
        lm(num_heads=4, num_kv_heads=4),
        dict(context=8),
        dict(context_attention="all_to_all"),
        1,
        r"4.*context=8",
    ),
    "experts": (
        lm(experts=dict(num_experts=6, experts_per_token=2)),
        dict(expert=4, data=2),
        {},
        1,
        r"experts .* is 6, .* by expert=4; make it 4 or 8, or use parallel.expert=3 or 6",
    ),
    "no experts": (lm(), dict(expert=8), {}, 1, r"parallel.expert=8, but the model transformer has no experts"),
    "no sequence": (mlp, dict(context=8), {}, 1, r"context=8, but the rows of task classification have no sequence"),
    "no parts": (mlp, dict(pipe=8), {}, 1, r"pipe=8, but the model mlp does not declare its embedding, stack and head"),
    "zero 3 without fsdp": (lm(), dict(data=8), dict(zero=3), 1, r"zero=3 .* data=8 and fsdp=1; use fsdp=8"),
    "microbatches without stages": (
        lm(),
        dict(data=8),
        dict(microbatches=4),
        1,
        r"microbatches=4 .*train.accumulation_steps",
    ),
    "zero": (lm(), dict(data=8), dict(zero=4), 1, r"zero=4; use 0, 1, 2 or 3"),
    "schedule": (lm(), dict(pipe=8), dict(schedule="dualpipe"), 1, r"gpipe, 1f1b, interleaved_1f1b, not 'dualpipe'"),
}


@pytest.mark.parametrize("row", ROWS)
def test_one_line_with_what_works(row: str) -> None:
    build, degrees, options, accumulation, message = ROWS[row]
    with pytest.raises(ConfigError) as caught:
        build(degrees, options, accumulation)
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(message, text), text


def test_fewer_microbatches_than_stages_is_allowed_and_said() -> None:
    from jaxtrain.train.parallelism import pipeline_notes

    step = make_step(CASES["transformer"], layout_of(pipe=4), 2)
    (note,) = pipeline_notes(step.pipeline)
    assert "idle 60% of the step; fewer microbatches than stages: parallel.microbatches=16 would idle less" in note


def test_functions_take_apply_or_parts() -> None:
    with pytest.raises(ConfigError, match="apply or parts"):
        from_functions(lambda key: {})


def test_a_carry_of_integers_is_refused() -> None:
    """Stages pass what gradients come back for."""
    from jaxtrain import Parts

    parts = Parts(
        "blocks",
        2,
        embed=lambda params, inputs, *, key, train: {"x": inputs @ params["w"], "row": np.zeros(4, np.int32)},
        layers=lambda stack, carry, inputs, *, first_layer, key, train: carry,
        head=lambda params, carry, *, train: carry["x"],
    )
    model = from_functions(lambda key: {"w": np.ones((4, 4)), "blocks": {"w": np.ones((2, 4, 4))}}, parts=parts)
    step = make_train_step(model, classification(), optax.sgd(0.1), mesh=make_mesh(pipe=2, data=4))
    with pytest.raises(ConfigError, match="embed gives holds int32 at row; stages pass floats only"):
        step.lower({"inputs": np.zeros((64, 4), np.float32), "targets": np.zeros(64, np.int32)})


def test_a_stage_that_permutes_is_refused() -> None:
    """It would wait for ever: a stage whose code moves data between devices by a permutation."""
    from jaxtrain.layout.sharding import Layout
    from jaxtrain.parallel.stage import check_branches

    program = """
%branch (p: f32[4]) -> f32[4] {
  ROOT %permute = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}, metadata={op_name="mine/dot"}
}

ENTRY %main (a: pred[]) -> f32[4] {
  ROOT %c = f32[4]{0} conditional(%a, %x, %x), true_computation=%branch, false_computation=%branch
}
"""
    with pytest.raises(ConfigError, match=r"permutes data between devices \(mine/dot\)"):
        check_branches(program, Layout(make_mesh()))
    check_branches(program.replace("conditional(", "call("), Layout(make_mesh()))


def test_evaluation_rows_that_do_not_divide() -> None:
    from jaxtrain import Evaluator

    step = make_step(CASES["transformer"], layout_of(pipe=2, data=4), 4)
    rows = np.zeros((6, 32), np.int32)
    with pytest.raises(ConfigError, match="does not divide by data x fsdp x microbatches"):
        Evaluator(step)(step.init(0), [{"inputs": rows, "targets": rows}])
