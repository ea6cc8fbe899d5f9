"""Adafactor: optax's numbers for one matrix, and a stack of layers or experts treated matrix by matrix."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config.optimizers import AdafactorConfig
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout, optimizer_shardings, parameter_shardings, path_name
from jaxtrain.optim.optimizers import build_optimizer
from jaxtrain.optim.rules import complete_axes
from jaxtrain.parallel.programs import collectives

RATE = optax.constant_schedule(1e-2)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(optimizer, params, gradients):
    """Parameters after these updates, and the last state."""

    @jax.jit
    def update(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for gradient in gradients:
        params, state = update(gradient, state, params)
    return params, state


def test_single_arrays_get_the_numbers_of_optax():
    """The average is one of updates times their rates, as in optax, whose decay is a rate of its own."""
    shapes = {"matrix": (8, 16), "square": (8, 8), "small": (3, 16), "kernel": (3, 8, 16), "bias": (16,), "scale": ()}
    params = {name: normal(*shape) for name, shape in shapes.items()}
    gradients = [{name: 1e-2 * normal(*shape, seed=k) for name, shape in shapes.items()} for k in range(6)]
    rate = optax.piecewise_constant_schedule(1e-2, {2: 0.1, 4: 20.0})
    for b1, weight_decay in ((None, 0.0), (0.9, 0.1)):
        ours = AdafactorConfig(min_dim_size_to_factor=8, b1=b1, weight_decay=weight_decay)
        theirs = optax.adafactor(
            rate,
            min_dim_size_to_factor=8,
            momentum=b1,
            weight_decay_rate=(lambda count: 0.1 * rate(count)) if weight_decay else None,
            weight_decay_mask={name: len(shape) > 1 for name, shape in shapes.items()},
        )
        found, wanted = (run(one, params, gradients)[0] for one in (build_optimizer(ours, rate, axes={}), theirs))
        # Six steps of a few roundings of 6e-8 each, of numbers up to about 3.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


# shape, row of the table; the first `counts` dims count layers and experts. Dims below 4 are not factored.
# More layers and experts than columns, what is too small to factor, and a row that says nothing of layers.
STACKS = {
    "experts": ((2, 10, 4, 8), ("layers", "experts", "embed", "mlp"), 2),
    "matrices too small to factor": ((8, 3, 3), ("layers", "embed", "mlp"), 1),
    "layers without a name": ((4, 8, 16), (None, "embed", "mlp"), 1),
}


@pytest.mark.parametrize(("shape", "row", "counts"), STACKS.values(), ids=STACKS)
def test_a_stack_is_trained_as_its_layers_alone(shape, row, counts):
    """Layers in very different sizes: statistics that they shared would be those of the largest."""
    config = AdafactorConfig(min_dim_size_to_factor=4, b1=0.9)
    number = math.prod(shape[:counts])
    sizes = np.geomspace(1e-2, 10, number).astype(np.float32).reshape(*shape[:counts], *[1] * (len(shape) - counts))
    value, gradients = sizes * normal(*shape), [1e-3 * sizes * normal(*shape, seed=k) for k in (1, 2)]
    axes = complete_axes({"blocks/kernel": shape}, {"blocks/kernel": row}, "blocks")
    optimizer = build_optimizer(config, RATE, axes=axes)
    found, _ = run(optimizer, {"blocks": {"kernel": value}}, [{"blocks": {"kernel": g}} for g in gradients])

    alone = build_optimizer(config, RATE, axes={})
    flat = [array.reshape(number, *shape[counts:]) for array in (value, *gradients)]
    wanted = [run(alone, {"kernel": v}, [{"kernel": g} for g in gs])[0]["kernel"] for v, *gs in zip(*flat, strict=True)]
    # A few roundings of 6e-8 of the layer's largest.
    distance = np.abs(found["blocks"]["kernel"] - np.reshape(wanted, shape)) / sizes
    assert np.max(distance) < 1e-6


def test_statistics_stay_with_their_layers():
    """Sums lie as the dims that they keep, and no matrix of the stack is gathered for them."""
    mesh = make_mesh(pipe=2, data=1, fsdp=2, tensor=2)
    axes = {"blocks/kernel": ("layers", "embed", "mlp"), "blocks/scale": ("layers", "embed")}
    layout = Layout(mesh, axes, stack="blocks")
    params = {"blocks": {"kernel": jnp.ones((4, 32, 64)), "scale": jnp.ones((4, 32))}}
    optimizer = build_optimizer(AdafactorConfig(min_dim_size_to_factor=16), RATE, axes=axes)
    state = jax.eval_shape(optimizer.init, params)
    lies, state_lies = parameter_shardings(params, layout), optimizer_shardings(state, params, layout)
    specs = {path_name(path): tuple(leaf.spec) for path, leaf in jax.tree_util.tree_leaves_with_path(state_lies)}
    assert specs["0/v_row/blocks/kernel"] == ("pipe", "fsdp")
    assert specs["0/v_col/blocks/kernel"] == ("pipe", "tensor")
    assert specs["0/v/blocks/scale"] == ("pipe", "fsdp")

    step = jax.jit(optimizer.update, in_shardings=(lies, state_lies, lies), out_shardings=(lies, state_lies))
    program = step.lower(params, state, params).compile().as_text()
    assert max(one.size for one in collectives(program)) < 32 * 64 // 8, "a part of a matrix crosses devices"


def test_statistics_of_bfloat16_parameters_are_float32():
    """Under bf16_pure too: a second moment in bfloat16 would stand still."""
    params = {"kernel": jnp.ones((8, 16), jnp.bfloat16)}
    optimizer = build_optimizer(AdafactorConfig(min_dim_size_to_factor=8), RATE, axes={})
    gradient = {"kernel": normal(8, 16)}
    start = jax.jit(optimizer.init)(jax.tree.map(jnp.float32, params))
    state = jax.jit(optimizer.update)(gradient, start, params)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    row = state[0].v_row["kernel"]
    np.testing.assert_allclose(row, np.mean(np.square(gradient["kernel"]), axis=1), rtol=1e-6)
