"""Gradients of tables that the lookup and the output layer add to their sums by themselves: those of plain code."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.layout import rules, scatter
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import DEFAULT_RULES
from jaxtrain.layout.sharding import Layout, use_layout
from jaxtrain.ops.embedding import embedding_lookup
from jaxtrain.ops.loss.cross_entropy import DeferredLogits

DEVICES, VOCABULARY, WIDTH = 4, 24, 8
Params = dict[str, jax.Array]


def tied(params: Params, ids: jax.Array) -> jax.Array:
    x = embedding_lookup(params["embedding"], ids, rows="vocab")
    return jnp.sum(jnp.square(DeferredLogits(jnp.sin(x), params["embedding"], tied=True).logits()))


def untied(params: Params, ids: jax.Array) -> jax.Array:
    x = embedding_lookup(params["embedding"], ids, rows="vocab")
    return jnp.sum(jnp.square(DeferredLogits(jnp.sin(x), params["output"], bias=params["bias"]).logits()))


def used_otherwise_too(params: Params, ids: jax.Array) -> jax.Array:
    return tied(params, ids) + ids.shape[0] * jnp.sum(jnp.square(params["embedding"]))


def looked_up_twice(params: Params, ids: jax.Array) -> jax.Array:
    return tied(params, ids) + tied(params, (ids + 5) % VOCABULARY)


def in_a_checkpoint(params: Params, ids: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda ids: tied(params, ids))(ids)


# What is computed, whether the lookup finds the sum, and whether sums are parts.
USES: dict[str, tuple[Callable[[Params, jax.Array], jax.Array], bool, bool]] = {
    "tied, whole sums": (tied, True, False),
    "untied": (untied, True, True),
    "used otherwise too": (used_otherwise_too, True, True),
    "twice": (looked_up_twice, True, True),
    "in jax.checkpoint": (in_a_checkpoint, False, True),
}


@pytest.mark.parametrize(("use", "finds", "scattered"), USES.values(), ids=USES)
def test_sums_are_those_of_plain_code(
    use: Callable[[Params, jax.Array], jax.Array], finds: bool, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "PIECE", 64)  # several blocks of ids
    layout = Layout(make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES]), {}, DEFAULT_RULES)
    random = np.random.default_rng(0)
    shapes = {"embedding": (VOCABULARY, WIDTH), "output": (WIDTH, VOCABULARY), "bias": (VOCABULARY,)}
    params = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    before = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    dims: dict[str, int | None] = {"embedding": 1, "output": 0, "bias": 0} if scattered else dict.fromkeys(shapes)
    ids = random.integers(-2, VOCABULARY + 2, size=(DEVICES, 5))  # some are outside the table
    factors = (jnp.float32(0.5), jnp.float32(3))

    def local(params: Params, sums: Params, ids: jax.Array) -> Params:
        def of(sums: Params, unread: Any) -> Any:
            parts = scatter.Parts({name: (sums[name], dim) for name, dim in dims.items()}, sums, unread)
            inside, precision = dataclasses.replace(layout, manual=frozenset({"data"})), "highest"
            with scatter.use_parts(parts), use_layout(inside), jax.default_matmul_precision(precision):
                return use(scatter.attach_parts(params, skip=()), ids), parts.ends

        (loss, _), pull = jax.vjp(of, sums, (jnp.float32(0), jnp.float32(0)))
        added, _ = pull((jnp.ones_like(loss), {name: (total, factors) for name, total in sums.items()}))
        return added if scattered else jax.tree.map(lambda new, old: old + jax.lax.psum(new - old, "data"), added, sums)

    none = PartitionSpec()
    over = {name: none if dim is None else PartitionSpec(*[None] * dim, "data") for name, dim in dims.items()}
    specs = (none, over, PartitionSpec("data"))
    run = jax.jit(jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=over, check_vma=False))
    plain = jax.grad(lambda params: use(params, ids))(params)
    for name, added in run(params, before, ids).items():
        # Sums of some hundred numbers, in another order.
        np.testing.assert_allclose(added, before[name] + 1.5 * plain[name], rtol=1e-4, atol=1e-3, err_msg=name)
    text = run.lower(params, before, ids).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert all("HIGHEST" in line for line in products), "a gradient is in the precision of the use"
    assert ("all_to_all" in text) is (finds and scattered), "rows are exchanged, and not the gradient of the table"
