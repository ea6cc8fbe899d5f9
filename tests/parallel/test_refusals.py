"""Layouts that cannot be: one line that names the setting and the nearest values that work."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
from layouts import CASES, make_step, transformer
from layouts import layout as layout_of

from jaxtrain import Evaluator, Parts, from_functions
from jaxtrain.config.schema import Parallelism
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import classification, language_modeling
from jaxtrain.parallel.stage import check_branches
from jaxtrain.train.build import make_train_step

CHUNKED = dict(schedule="interleaved_1f1b")
SIX = dict(num_experts=6, experts_per_token=2)
STATES: dict[str, Any] = dict(position="none", num_kv_heads=None, mlp_dim=None, state_space={})


def lm(batch: int = 32, length: int = 32, **model: Any) -> Callable[..., None]:
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


# What is built, degrees, options, microbatches, and the message.
ROWS = {
    "heads": (lm(num_heads=4, num_kv_heads=4), dict(tensor=8), {}, 1, "heads .* is 4, .* by tensor=8; make it 8"),
    "layers": (lm(num_layers=6), dict(pipe=4, data=2), {}, 1, "pipe=4; use 4 or 8 layers, or parallel.pipe=2 or 3"),
    "interleaved": (lm(), dict(pipe=4, data=2), CHUNKED, 6, "^train.accumulation_steps=6 .*; use .*_steps=4 or 8, or "),
    "batch": (
        lm(batch=24),
        dict(pipe=2, data=4),
        dict(microbatches=4),
        1,
        "global_batch_size=24 .* use microbatches=2, or a batch of 16 or 32",
    ),
    "sequence": (lm(length=30), dict(context=4, data=2), {}, 1, "sequence_length=30 .*context=4; use 28 or 32"),
    "experts": (
        lm(experts=SIX),
        dict(expert=4, data=2),
        {},
        1,
        "is 6, .* make it 4 or 8, or use parallel.expert=3 or 6",
    ),
    "a state": (lm(**STATES), dict(context=2, data=4), {}, 1, "context=2 shards .*, which model.state_space does"),
    "no sequence": (mlp, dict(context=8), {}, 1, "context=8, but the rows of task classification have no sequence"),
    "no parts": (mlp, dict(pipe=8), {}, 1, "pipe=8, but the model mlp does not declare its embedding, stack and head"),
    "zero 3 without fsdp": (lm(), dict(data=8), dict(zero=3), 1, "zero=3 .* data=8 and fsdp=1; use fsdp=8"),
    "no stages": (lm(), dict(data=8), dict(microbatches=4), 1, "microbatches=4 .*train.accumulation_steps"),
}


@pytest.mark.parametrize("row", ROWS)
def test_one_line_with_what_works(row: str) -> None:
    build, degrees, options, accumulation, message = ROWS[row]
    with pytest.raises(ConfigError, match=message) as caught:
        build(degrees, options, accumulation)
    assert "\n" not in str(caught.value)


def test_a_carry_of_integers_is_refused() -> None:
    """Stages pass what gradients come back for."""
    parts = Parts(
        "blocks",
        2,
        embed=lambda params, inputs, *, key, train: {"x": inputs @ params["w"], "row": np.zeros(4, np.int32)},
        layers=lambda stack, carry, inputs, *, first_layer, key, train: carry,
        head=lambda params, carry, *, train: carry["x"],
    )
    model = from_functions(lambda key: {"w": np.ones((4, 4)), "blocks": {"w": np.ones((2, 4, 4))}}, parts=parts)
    step = make_train_step(model, classification(), optax.sgd(0.1), mesh=make_mesh(pipe=2, data=4))
    with pytest.raises(ConfigError, match="embed returns int32 at row, but stages pass floats only"):
        step.lower({"inputs": np.zeros((64, 4), np.float32), "targets": np.zeros(64, np.int32)})


def test_a_stage_that_permutes_is_refused() -> None:
    """It would wait for ever: a stage whose code moves data between devices by a permutation."""
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
    step = make_step(CASES["transformer"], layout_of(pipe=2, data=4), 4)
    rows = np.zeros((6, 32), np.int32)
    with pytest.raises(ConfigError, match="does not divide by data x fsdp x microbatches"):
        Evaluator(step)(step.abstract_state, [{"inputs": rows, "targets": rows}])
