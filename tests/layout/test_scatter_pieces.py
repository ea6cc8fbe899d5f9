"""A gradient outside the stack that is summed over `data`, in pieces and before the stack: the same part of the sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.layout import rules, scatter
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout, use_layout

# id: (shape of the gradient, dim that is scattered, elements of a piece, pieces)
ROWS = {
    "at once": ((16, 12), 0, 192, 1),
    "over the first dim": ((12, 16), 1, 50, 4),
    "no count divides": ((16, 7), 0, 60, 7),
    "a stack": ((3, 8, 12), 2, 64, 8),
}


@pytest.mark.parametrize(("shape", "dim", "piece", "count"), ROWS.values(), ids=ROWS)
def test_pieces_are_the_part_of_the_sum(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dim: int, piece: int, count: int
) -> None:
    monkeypatch.setattr(rules, "PIECE", piece)
    layout = Layout(make_mesh(data=4, devices=jax.devices()[:4]), {}, {})
    gradients = np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)
    part = jax.ShapeDtypeStruct((*shape[:dim], shape[dim] // 4, *shape[dim + 1 :]), jnp.float32)

    def local(gradients: jax.Array) -> jax.Array:
        with use_layout(dataclasses.replace(layout, manual=frozenset({"data"}))):
            assert scatter._pieces(gradients[0], dim)[1] == count
            total = jnp.ones(part.shape, part.dtype)
            added = scatter._add_part(gradients[0], dim, total, (jnp.float32(0.5), jnp.float32(3)))
            return jnp.stack([added, scatter.scatter_in_pieces(gradients[0], dim)])

    over = PartitionSpec(*[None] * (dim + 1), "data")
    run = jax.shard_map(local, mesh=layout.mesh, in_specs=PartitionSpec("data"), out_specs=over, check_vma=False)
    lowered = jax.jit(run).lower(gradients)
    assert lowered.as_text().count("stablehlo.while") == (2 if count > 1 else 0)
    added, summed = lowered.compile()(gradients)
    # Four numbers of size 1, in an order of the backend's.
    np.testing.assert_allclose(added, 1 + 1.5 * gradients.sum(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(summed, gradients.sum(axis=0), rtol=1e-5, atol=1e-6)


def test_what_is_read_after_a_stack_is_scattered_before_the_stack_runs_backward() -> None:
    """Sums and gradients as of plain code, and a barrier between the scatter and the gradient that goes on."""
    layout = Layout(make_mesh(data=4, devices=jax.devices()[:4]), {}, {})
    random = np.random.default_rng(0)
    x, kernel, before = (random.normal(size=shape).astype(np.float32) for shape in ((4, 3, 8), (8, 4), (8, 4)))
    factors = (jnp.float32(0.5), jnp.float32(3))

    def local(x: jax.Array, kernel: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        def of(x: jax.Array, sums: dict, unread: tuple) -> tuple[jax.Array, dict]:
            parts = scatter.Parts({"output": (jnp.zeros((2, 4)), 0)}, sums, unread)
            with scatter.use_parts(parts), use_layout(dataclasses.replace(layout, manual=frozenset({"data"}))):
                params = scatter.attach_parts({"output": kernel}, skip=(), later=("output",))
                (hidden, _), params = scatter.attach_after((jnp.sin(x), jnp.arange(3)), params)
                return jnp.sum(jnp.square(hidden @ params["output"])), parts.ends

        (loss, _), pull = jax.vjp(of, x, {"output": sums}, (jnp.float32(0), jnp.float32(0)))
        of_x, added, _ = pull((jnp.ones_like(loss), {"output": (sums, factors)}))
        return of_x, added["output"]

    over, none = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(local, mesh=layout.mesh, in_specs=(over, none, over), out_specs=over, check_vma=False)
    plain = jax.grad(lambda x, kernel: jnp.sum(jnp.square(jnp.sin(x) @ kernel)), argnums=(0, 1))(x, kernel)
    of_x, added = jax.jit(run)(x, kernel, before)
    np.testing.assert_allclose(of_x, plain[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(added, before + 1.5 * plain[1], rtol=1e-5, atol=1e-4)
    text = jax.jit(run).lower(x, kernel, before).as_text()
    # The gradient of sin, its cosine, is used behind the barrier.
    places = [text.index(word) for word in ("stablehlo.reduce_scatter", "stablehlo.optimization_barrier")]
    assert places == sorted(places)
    assert "stablehlo.multiply" in text[places[1] :]
