"""A gradient outside the stack that is summed over `data` in pieces: the same part of the same sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.layout import scatter
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout, use_layout

# id: (shape of the gradient, dim that is scattered, elements of a piece, pieces)
ROWS = {
    "at once": ((16, 12), 0, 192, 1),
    "in two": ((16, 12), 0, 100, 2),
    "over the first dim": ((12, 16), 1, 50, 4),
    "the next count that divides": ((16, 9), 0, 80, 3),
    "no count divides": ((16, 7), 0, 60, 7),
    "only one dim": ((16,), 0, 4, 1),
}


@pytest.mark.parametrize(("shape", "dim", "piece", "count"), ROWS.values(), ids=ROWS)
def test_pieces_are_the_part_of_the_sum(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dim: int, piece: int, count: int
) -> None:
    monkeypatch.setattr(scatter, "_PIECE", piece)
    layout = Layout(make_mesh(data=4, devices=jax.devices()[:4]), {}, {})
    gradients = np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32)
    part = jax.ShapeDtypeStruct((*shape[:dim], shape[dim] // 4, *shape[dim + 1 :]), jnp.float32)

    def local(gradients: jax.Array) -> jax.Array:
        with use_layout(dataclasses.replace(layout, manual=frozenset({"data"}))):
            assert scatter._pieces(gradients[0], dim)[1] == count
            return scatter._sum_and_scatter(gradients[0], part, dim)

    specs = PartitionSpec("data"), PartitionSpec(*[None] * dim, "data")
    summed = jax.jit(jax.shard_map(local, mesh=layout.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False))
    # Four numbers of size 1, in an order of the backend's.
    np.testing.assert_allclose(summed(gradients), gradients.sum(axis=0), rtol=1e-5, atol=1e-6)
