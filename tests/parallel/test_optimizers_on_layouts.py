"""Every optimizer on every kind of layout: its update, without a model around it, is what one device does.

All of them update the same parameters by the same gradients in one program a layout, so that a layout is one compile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import CASES, LAYOUTS, ONE, layout, make_mesh_of, with_optimizer

from jaxtrain.config.optimizers import AdamWConfig
from jaxtrain.layout.sharding import optimizer_shardings, parameter_shardings, path_name, use_layout
from jaxtrain.models.tasks import language_modeling
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.parallel.programs import collectives
from jaxtrain.train.build import make_layout

MODEL = CASES["experts"].model("none")
# AdamW in float32 is what every other test of layouts runs; Lion's momentum in float32 is half of that.
KINDS = ("adamw bfloat16", "adamw int8", "lion bfloat16", "adafactor", "muon", "groups")
# Every kind of state in one optimizer, each for some of the parameters.
GROUPED = AdamWConfig(
    groups=[
        {"match": ["embedding", "*norm/scale"], "learning_rate_factor": 16.0, "optimizer": {"kind": "lion"}},
        {"match": ["blocks/attention/*"], "optimizer": {"kind": "adamw", "moments": "int8"}},
        {"match": ["blocks/mlp/*"], "weight_decay": 0.1, "optimizer": {"kind": "muon"}},
    ]  # pyright: ignore[reportArgumentType]
)
OPTIMIZERS = {
    kind: build_optimizer(
        GROUPED if kind == "groups" else with_optimizer(kind).optimizer,
        optax.constant_schedule(1e-2),
        axes=MODEL.axes,
    )
    for kind in KINDS
}
SHAPES = jax.eval_shape(MODEL.init, jax.eval_shape(lambda: jax.random.key(0)))[0]
UPDATES = 3
# Shards of every axis that parameters have, stages and ZeRO; four layers on eight devices leave some of them idle.
ROWS = {
    "fsdp=8": LAYOUTS["fsdp=8"],
    "pipe=4,data=2,zero=2": layout(pipe=4, data=2, zero=2),
    "expert=2,tensor=2,fsdp=2": LAYOUTS["expert=2,tensor=2,fsdp=2"],
}


def numbers(seed: int) -> Any:
    """Trees like the parameters; embeddings of rare tokens, as gradients are, in very different sizes."""
    rng = np.random.default_rng(seed)

    def one(leaf: Any) -> np.ndarray:
        rows = np.exp(2 * rng.standard_normal((*leaf.shape[:-1], 1)))
        return (1e-3 * rows * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree.map(one, SHAPES)


def updated(where: Any) -> tuple[Any, Any, str]:
    """Updates and states of every optimizer after some updates on a layout, and the compiled program."""
    mesh = make_mesh_of(where.degrees)
    lies = make_layout(MODEL, language_modeling(), mesh, where.options, None)
    start = {kind: jax.eval_shape(optimizer.init, SHAPES) for kind, optimizer in OPTIMIZERS.items()}
    states = {kind: optimizer_shardings(shapes, SHAPES, lies) for kind, shapes in start.items()}
    params = parameter_shardings(SHAPES, lies)

    def update(gradients: Any, state: Any, values: Any) -> tuple[Any, Any]:
        with use_layout(lies), jax.default_matmul_precision("highest"):
            both = {kind: OPTIMIZERS[kind].update(gradients, state[kind], values) for kind in OPTIMIZERS}
        return {kind: found for kind, (found, _) in both.items()}, {kind: new for kind, (_, new) in both.items()}

    out = ({kind: params for kind in OPTIMIZERS}, states)
    jitted = jax.jit(update, in_shardings=(params, states, params), out_shardings=out)
    compiled = jitted.lower(SHAPES, start, SHAPES).compile()
    values = jax.device_put(numbers(0), params)
    state = jax.device_put(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), start), states)
    found: Any = None
    for seed in range(1, 1 + UPDATES):
        found, state = jax.block_until_ready(compiled(jax.device_put(numbers(seed), params), state, values))
    return jax.device_get(found), jax.device_get(state), compiled.as_text() or ""


@pytest.fixture(scope="module")
def alone() -> tuple[Any, Any, str]:
    return updated(ONE)


PLAIN = ("expert=2,tensor=2,fsdp=2",)


@pytest.mark.parametrize("row", [pytest.param(row, marks=() if row in PLAIN else pytest.mark.long) for row in ROWS])
def test_updates_and_state_are_those_of_one_device(row: str, alone: tuple[Any, Any, str]) -> None:
    found, state, program = updated(ROWS[row])
    for (path, new), old in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(alone[1]), strict=True):
        name = path_name(path)
        if new.dtype in (np.uint8, jnp.bfloat16):
            # Bit for bit but for sums that a compiler contracts differently: one rounding of 2^-24 crosses the edge
            # between two codes, 2^-3 to 2^-4 apart, once in a million.
            differ = np.mean(new != old)
            assert differ < 1e-3, name
        else:
            np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-12, err_msg=name)
    for kind in KINDS:
        for (path, new), old in zip(
            jax.tree_util.tree_leaves_with_path(found[kind]), jax.tree.leaves(alone[0][kind]), strict=True
        ):
            distance = np.linalg.norm(new - old) / np.linalg.norm(old)
            assert distance < 1e-5, (kind, path_name(path))
    if row == "fsdp=8":
        # Matrices change places, a part to each device; the smallest stack is one of the output projections.
        stack = SHAPES["blocks"]["attention"]["output"]["kernel"].size
        matrices = [c.line for c in collectives(program) if c.size >= stack]
        assert not matrices, "a stack of matrices is whole on a device"
