"""How gradients that differ between the shards of a manual `data` axis are summed, by ZeRO stage."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as DimOrder
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec

from jaxtrain.layout.scatter import scatter_in_pieces
from jaxtrain.layout.sharding import Layout, parameter_spec, path_name
from jaxtrain.parallel.microbatches import Tree


@dataclass(frozen=True)
class DataReduction:
    """A sum over `data`, or a sum of which each shard keeps a part.

    Attributes:
        layout: of the step.
        stage: ZeRO stage; from 1 on a device keeps the part of the gradient that its optimizer state needs, and from
            2 on it does so in every microbatch, which costs communication and saves the memory of the full gradient.
        stack: path of a stack of layers; None: there is none.
    """

    layout: Layout
    stage: int
    stack: str | None = None

    @property
    def each_microbatch(self) -> bool:
        """Whether every microbatch's gradient is reduced by itself, not their sum."""
        return self.stage >= 2

    def dim(self, path: jax.tree_util.KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> int | None:
        """Find the dim of a parameter over which its gradient is scattered.

        Args:
            path: of the parameter.
            leaf: the parameter with its global shape.

        Returns:
            The dim; None where each device keeps the full sum.
        """
        if self.stage == 0:
            return None
        spec = parameter_spec(path_name(path), leaf.shape, self.layout, also=("data",))
        dims = [d for d, entry in enumerate(spec) if entry == "data" or (isinstance(entry, tuple) and "data" in entry)]
        return dims[0] if dims else None

    def sum_dim(self, path: jax.tree_util.KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> int | None:
        """Find the dim over which the sum over microbatches is scattered, `dim` but for tables outside the stack.

        Of an embedding or an output layer a device sums some columns of the width for all ids of the vocabulary: the
        gradients of single rows, and of blocks of ids, are then scattered evenly over the devices, whichever ids they
        belong to. Where other axes shard parameters, their gradients are not made in that way.
        """
        dim, name, layout = self.dim(path, leaf), path_name(path), self.layout
        over_data_alone = layout.mesh.size == layout.mesh.shape["data"]
        if dim is None or self.stack is None or name.startswith(f"{self.stack}/") or not over_data_alone:
            return dim
        is_table = len(leaf.shape) == 2 and leaf.shape[1 - dim] % layout.mesh.shape["data"] == 0
        return 1 - dim if is_table and leaf.shape[1 - dim] < leaf.shape[dim] else dim

    def as_stored(self, total: Tree, params: Tree) -> Tree:
        """Parts of sums over microbatches, as parts of the dims that the optimizer state is sharded over."""

        def one(path: jax.tree_util.KeyPath, leaf: jax.Array, total: jax.Array) -> jax.Array:
            dim, summed = self.dim(path, leaf), self.sum_dim(path, leaf)
            if dim is None or summed is None or dim == summed:
                return total
            whole_rows = jax.lax.all_to_all(total, "data", split_axis=dim, concat_axis=summed, tiled=True)
            # Otherwise libtpu lets the order of dims in which columns arrive decide that of the optimizer's arrays, and
            # copies them before the loop over microbatches: 0.32 bytes per parameter of a 1B model (libtpu 0.0.51).
            return with_layout_constraint(whole_rows, DimOrder(major_to_minor=tuple(range(whole_rows.ndim))))

        return jax.tree_util.tree_map_with_path(one, params, total)

    def specs(self, params: Tree) -> Tree:
        """Specs over `data` of what `reduce` returns for these parameters."""

        def spec(path: jax.tree_util.KeyPath, leaf: jax.Array) -> PartitionSpec:
            dim = self.dim(path, leaf)
            return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, "data")

        return jax.tree_util.tree_map_with_path(spec, params)

    def reduce(self, tree: Tree, params: Tree) -> Tree:
        """Sum local gradients over `data`.

        Args:
            tree: gradients of this shard's rows.
            params: arrays or shapes with the paths of the gradients and their global shapes.

        Returns:
            The sums, each device's part of those that are scattered.
        """

        def one(path: jax.tree_util.KeyPath, leaf: jax.Array, gradient: jax.Array) -> jax.Array:
            dim = self.dim(path, leaf)
            if dim is None:
                return jax.lax.psum(gradient, "data")
            return scatter_in_pieces(gradient, dim)

        return jax.tree_util.tree_map_with_path(one, params, tree)

    def zeros(self, params: Tree) -> Tree:
        """Sums of gradients before the first microbatch, with the shapes that a device accumulates in."""

        def zero(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array:
            shape, dim = list(leaf.shape), self.sum_dim(path, leaf) if self.each_microbatch else None
            if dim is not None:
                shape[dim] //= self.layout.mesh.shape["data"]
            return jnp.zeros(shape, sum_dtype(leaf))

        return jax.tree_util.tree_map_with_path(zero, params)


def sum_dtype(leaf: jax.Array) -> jnp.dtype:
    """Choose the dtype of a sum over microbatches: at least float32; complex numbers stay complex."""
    return jnp.promote_types(leaf.dtype, jnp.float32)
