"""A model that makes of a row what depends on other rows: found in its program, and not run on a part of them."""

from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxtrain as jt
from jaxtrain.parallel.mixed_rows import mixes_rows

X, Y, IDS = jnp.ones((4, 6, 8)), jnp.ones((4, 8)), jnp.ones((4, 6), int)
KERNEL, IMAGES = jnp.ones((8, 5)), jnp.ones((2, 8, 8, 3))
ATTENTION = flax.linen.MultiHeadDotProductAttention(2)
CELL = flax.linen.RNN(flax.linen.LSTMCell(8))


def of_linen(module: flax.linen.Module, x: jax.Array) -> Callable[[jax.Array], Any]:
    shapes = jax.eval_shape(module.init, jax.random.key(0), x)
    return lambda x: module.apply(jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes), x)


def looped(over_rows: bool) -> Callable[[jax.Array], Any]:
    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return carry + x - (carry.mean(0) if over_rows else 0), None

    return lambda x: jax.lax.scan(body, jnp.zeros((4, 8)), x.swapaxes(0, 1))[0]


# name -> the function, its input
MIXED: dict[str, tuple[Callable[..., Any], jax.Array]] = {
    "a mean of rows": (lambda x: x - x.mean(0), X),
    "a mean of flattened rows": (lambda x: x.reshape(-1, 8).mean(0), X),
    "inside jit": (jax.jit(lambda x: x - x.max(0)), X),
    "inside vmap": (jax.vmap(lambda row: row - jax.lax.pmean(row, "rows"), axis_name="rows"), Y),
    "inside a scan": (looped(True), X),
    "inside a loop": (lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x - x.mean(0), x), Y),
    "inside a branch": (lambda x: jax.lax.cond(True, lambda x: x.sum((0, 1)), lambda x: jnp.zeros(8), x), X),
    "a product of rows": (lambda x: x.T @ x, Y),
    "sorted rows": (lambda x: jnp.sort(x, 0), Y),
    "places in an expert": (lambda x: jnp.cumsum(jax.nn.one_hot(jnp.argmax(x @ KERNEL, -1), 5), 0), Y),
    "pairs": (lambda x: x * x[::-1], Y),
    "halves": (lambda x: jnp.split(x, 2)[0], Y),
    "the first row": (lambda x: x - x[0], Y),
    "shuffled rows": (lambda x: x + x[jax.random.permutation(jax.random.key(0), 4)], Y),
    "rows of embeddings": (lambda ids: jnp.take(KERNEL, ids, axis=0).mean(0), IDS),
}
SEPARATE: dict[str, tuple[Callable[..., Any], jax.Array]] = {
    "a mean of columns": (lambda x: x - x.mean(1, keepdims=True), X),
    "flattened and back": (lambda x: (x.reshape(-1, 8) @ KERNEL).reshape(4, 6, 5).sum(1), X),
    "attention": (of_linen(ATTENTION, X), X),
    "a recurrent network": (of_linen(CELL, X), X),
    "a scan over time": (looped(False), X),
    "a map over rows": (lambda x: jax.lax.map(lambda row: row - row.mean(0), x), X),
    "a convolution": (of_linen(flax.linen.Conv(4, (3, 3)), IMAGES), IMAGES),
    "a norm of groups": (of_linen(flax.linen.GroupNorm(1), IMAGES), IMAGES),
    "a token of each row": (lambda x: x[jnp.arange(4), jnp.argmax(x[..., 0], 1)], X),
    "what nothing reads": (lambda x: jax.grad(lambda x: (x**2).sum())(x), Y),
}


def test_mixed_rows_are_found_and_separate_ones_are_not() -> None:
    for rows, wanted in ((MIXED, True), (SEPARATE, False)):
        for name, (function, x) in rows.items():
            assert mixes_rows(jax.make_jaxpr(function)(x).jaxpr, [True]) == wanted, name


def test_microbatches_of_a_model_that_mixes_rows_are_whole_on_a_mesh() -> None:
    """Statistics without a state: on a shard of `data` they would be those of its two rows."""

    def standardized(params: Any, x: jax.Array) -> jax.Array:
        return (x - x.mean(0)) / (x.std(0) + 0.1) @ params["w"]

    kernel = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    model = jt.from_functions(lambda key: {"w": kernel}, standardized)
    x, targets = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32), np.arange(8) % 3
    mesh = jt.make_mesh(data=2, devices=jax.devices()[:2])
    step = jt.make_train_step(model, jt.classification(), optax.sgd(0.1), mesh=mesh, accumulation_steps=2)
    _, metrics = step(step.init(0), {"inputs": x, "targets": targets})
    # Microbatch m has the rows m, m + 2, ...
    losses = [jt.cross_entropy(standardized({"w": kernel}, x[m::2]), targets[m::2]) for m in range(2)]
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    assert any("depends on other rows" in choice for choice in step.choices), step.choices
