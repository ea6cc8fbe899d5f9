"""Gradients of tables that the lookup and the output layer add to their sums by themselves: those of plain code."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.layout import pieces, scatter
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


# id: (what is computed, whether the lookup finds the sum)
USES: dict[str, tuple[Callable[[Params, jax.Array], jax.Array], bool]] = {
    "tied": (tied, True),
    "untied": (untied, True),
    "used otherwise too": (used_otherwise_too, True),
    "twice": (looked_up_twice, True),
    "in jax.checkpoint": (in_a_checkpoint, False),
}


@pytest.mark.parametrize("scattered", [True, False], ids=["parts", "whole sums"])
@pytest.mark.parametrize(("use", "finds"), USES.values(), ids=USES)
def test_sums_are_those_of_plain_code(
    use: Callable[[Params, jax.Array], jax.Array], finds: bool, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 64)  # several blocks of ids
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
            with scatter.use_parts(parts), use_layout(dataclasses.replace(layout, manual=frozenset({"data"}))):
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
    assert ("all_to_all" in text) is (finds and scattered), "rows are exchanged, and not the gradient of the table"


def test_only_the_parameter_itself_has_a_sum() -> None:
    layout = Layout(make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES]), {}, DEFAULT_RULES)
    table = jnp.ones((VOCABULARY, WIDTH))
    unread = (jnp.float32(0), jnp.float32(0))
    with use_layout(dataclasses.replace(layout, manual=frozenset({"data"}))):
        assert scatter.find_sum(table) is None
        with scatter.use_parts(scatter.Parts({"embedding": (table, None)}, {"embedding": table}, unread)):
            attached = scatter.attach_parts({"embedding": table}, skip=())["embedding"]
            assert scatter.find_sum(attached) == scatter.SumOfUse("embedding", None)
            assert scatter.find_sum(attached * 1) is None


def test_only_a_use_with_a_gradient_adds_to_the_sum_in_the_precision_of_the_use() -> None:
    layout = Layout(make_mesh(data=DEVICES, devices=jax.devices()[:DEVICES]), {}, DEFAULT_RULES)
    pulled: list[str | None] = []

    def pull(x: jax.Array, gradient: jax.Array, total: jax.Array, factors: Any) -> tuple[jax.Array, jax.Array]:
        pulled.append(jax.config.jax_default_matmul_precision)
        return gradient, total + 1

    def of(x: jax.Array, total: jax.Array, unread: Any) -> Any:
        parts = scatter.Parts({"embedding": (total, 1)}, {"embedding": total}, unread)
        with scatter.use_parts(parts), use_layout(dataclasses.replace(layout, manual=frozenset({"data"}))):
            found = scatter.find_sum(scatter.attach_parts({"embedding": table}, skip=())["embedding"])
            assert found is not None
            with jax.default_matmul_precision("highest"):
                used = scatter.use_and_add(found, jnp.sin, pull, x)
            metric = jnp.argmax(scatter.use_and_add(found, jnp.cos, pull, x))
        return (jnp.sum(used), parts.ends), metric

    table, factors = jnp.ones((VOCABULARY, WIDTH)), (jnp.float32(1), jnp.float32(1))
    (loss, _), rest, _ = jax.vjp(of, jnp.zeros(3), table, factors, has_aux=True)
    _, total, _ = rest((jnp.ones_like(loss), {"embedding": (table, factors)}))
    np.testing.assert_array_equal(total, table + 1)
    assert pulled == ["highest"]
