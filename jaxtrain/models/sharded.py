"""A model on a mesh: where each of its parameters is, and how it is applied in the compute dtype."""

import contextlib
import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.errors
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.gather import gather_parameters, hold_parameters
from jaxtrain.layout.mesh import mesh_text, parameters_text
from jaxtrain.layout.rules import FamilyTable, check_replicated_share, check_tensor_used, entry_axes
from jaxtrain.layout.scatter import attach_parts, has_parts, hide_stack_sums, waiting_paths
from jaxtrain.layout.sharding import (
    Layout,
    current_layout,
    parameter_shardings,
    path_name,
    use_layout,
    with_parameters,
)
from jaxtrain.models.model import Apply, ComputesLogits, Model, ModelState, Params, PartsApply, drawn_shapes, key_for
from jaxtrain.ops.linear import use_linear_format
from jaxtrain.precision.kernels import is_quantized
from jaxtrain.precision.policy import Policy, cast_at, cast_floats, check_sums


@contextlib.contextmanager
def model_context(layout: Layout, policy: Policy, *, required_of: str | None = None) -> Iterator[None]:
    """Set layout, matmul precision and the format of linear layers for whatever is traced inside."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_layout(layout))
        if policy.matmul_precision is not None:
            stack.enter_context(jax.default_matmul_precision(policy.matmul_precision))
        stack.enter_context(use_linear_format(policy.linear_format, required_of=required_of))
        yield


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A model, the mesh that it is on, and the number formats that it computes in.

    Made by `jaxtrain.shard_model`. Training, evaluation and generation all apply a model through this record. It knows
    no task and no optimizer.

    Attributes:
        model: the pure functions.
        layout: mesh and rules; its `parameters` hold the specs of every parameter: as stored, as gathered for compute,
            and of its optimizer state.
        policy: number formats.
        init: `Model.init`, to be called inside a jitted function.
        abstract_params: the parameters as `ShapeDtypeStruct`s in the dtypes that they are stored in, with their
            shardings: pass them to `Checkpointer.restore` as its target.
        abstract_model_state: the same for `model_state` (values that change without a gradient); it is replicated.

    Example:
        >>> sharded = jt.shard_model(model)
        >>> def forward(params, inputs):
        ...     return sharded.apply(params, {}, inputs, key=None, train=False)[0]
        >>> jax.jit(forward)(state.params, np.ones((8, 4), np.float32)).shape
        (8, 3)
    """

    model: Model
    layout: Layout
    policy: Policy
    init: Callable[[jax.Array], tuple[Params, ModelState]]
    abstract_params: Params
    abstract_model_state: ModelState

    def __repr__(self) -> str:
        return f"ShardedModel {self.model.name!r}: {self.summary}"

    @property
    def summary(self) -> str:
        """Parameters, mesh and number formats in words."""
        parameters = parameters_text(self.abstract_params)
        return f"{parameters}, {mesh_text(self.mesh)}, {self.policy.name}"

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self.layout.mesh

    def drawn_shapes(self) -> tuple[Params, ModelState]:
        """Return what `init` gives, as shapes, in the dtypes that the model draws."""
        return drawn_shapes(self.init)

    def context(self, *, required: bool = False) -> contextlib.AbstractContextManager[None]:
        """Enter `model_context`; with `required` it is an error that no layer uses the policy's linear format."""
        return model_context(self.layout, self.policy, required_of=self.model.name if required else None)

    def apply(
        self, params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        """Apply the model in the compute dtype, its parameters gathered from their shards; as `Model.apply`.

        To be traced under `jit`, with `params` sharded as `abstract_params`, also quantized. Outside `context` it
        enters that itself. A model that fails on its inputs raises a ConfigError with its own error as the cause.
        """
        return self._apply(self.model.apply, params, model_state, inputs, key, train)

    def apply_deferred(
        self, params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        """Apply as `apply` does, with `DeferredLogits` in place of logits where the model has them."""
        apply = self.model.apply
        if isinstance(apply, ComputesLogits):
            apply = apply.deferred
        return self._apply(apply, params, model_state, inputs, key, train)

    def _apply(
        self, apply: Apply, params: Params, model_state: ModelState, inputs: Any, key: jax.Array | None, train: bool
    ) -> tuple[Any, ModelState]:
        compute = self.policy.compute_dtype
        # Inside a step the layout of the trace may leave out axes that the step handles itself.
        with contextlib.nullcontext() if current_layout() is not None else self.context():
            params = hold_parameters(cast_floats(params, compute))
            inputs = cast_floats(inputs, compute)
            stacks = self.model.gathers_itself
            # Where gradients are scattered layer by layer (`layout/scatter.py`), parameters that are read after the
            # stack alone wait for it.
            later = self._read_last(params, inputs, key, train) if has_parts() else ()
            params = attach_parts(params, skip=stacks, later=later)
            # All others are gathered here.
            params = gather_parameters(params, skip=(*stacks, *waiting_paths(params)))
            key = key_for(self.model.apply, key)
            try:
                return apply(params, model_state, inputs, key=key, train=train)
            except (TypeError, ValueError, KeyError, IndexError, AttributeError, flax.errors.FlaxError) as error:
                raise ConfigError(_inapplicable(self.model, inputs, error)) from error

    def _read_last(self, params: Params, inputs: Any, key: jax.Array | None, train: bool) -> tuple[str, ...]:
        """Return the paths of the parameters outside the stack that `embed` does not read."""
        if not isinstance(self.model.apply, PartsApply):
            return ()
        parts = self.model.apply.parts
        rest = {name: value for name, value in params.items() if name != parts.stack}
        key = key_for(parts.embed, key)
        with hide_stack_sums():
            traced = jax.make_jaxpr(lambda rest: parts.embed(rest, inputs, key=key, train=train))(rest).jaxpr
        read = {id(variable) for equation in traced.eqns for variable in equation.invars}
        read |= {id(variable) for variable in traced.outvars}
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(rest)]
        return tuple(name for name, variable in zip(paths, traced.invars, strict=True) if id(variable) not in read)


def _inapplicable(model: Model, inputs: Any, error: Exception) -> str:
    """Return the line for a model that fails on its inputs."""
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    arrays = ", ".join(f"{path_name(path)} {shown(leaf)}".strip() for path, leaf in leaves).replace("an array ", "")
    text = " ".join(str(error).split())[:160]
    return f"the model {model.name} cannot be applied to inputs ({arrays}): {type(error).__name__}: {text}"


def stored_params(model: Model, params: Params, policy: Policy, trainable: Callable[[str], bool] | None) -> Params:
    """Cast parameters to the dtypes that they are stored in.

    Trained ones (all, without `trainable`) are stored in the param dtype.
    Frozen ones keep the dtype that they came in: they may be quantized. Those of an adapted model are stored in the
    compute dtype, in which they are read: that is half of the bytes under bf16, and the same numbers.
    """

    def cast(path: tuple[Any, ...], leaf: Any) -> Any:
        if trainable is None or trainable(path_name(path)):
            return cast_at(path, leaf, policy.param_dtype)
        if model.adapted is None:
            return leaf
        return cast_at(path, leaf, policy.compute_dtype)

    return jax.tree_util.tree_map_with_path(cast, params, is_leaf=is_quantized)


def trained_paths(params: Params, trainable: Callable[[str], bool] | None) -> set[str]:
    """Return the paths of the parameters that are trained; the arrays of a quantized kernel never are."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized)
    names = {path_name(path) for path, leaf in leaves if not is_quantized(leaf)}
    return {name for name in names if trainable is None or trainable(name)}


def place_model(
    model: Model,
    layout: Layout,
    policy: Policy,
    *,
    trainable: Callable[[str], bool] | None = None,
    max_replicated_fraction: float,
) -> ShardedModel:
    """Decide where each parameter of a model is on a layout; nothing is allocated.

    Args:
        model: the model.
        layout: mesh and rules, without parameters.
        policy: number formats.
        trainable: see `stored_params`.
        max_replicated_fraction: share of the parameter bytes that may be replicated although `fsdp` > 1.

    Raises:
        ConfigError: a row of the axes table that matches no parameter, sizes that do not divide by the mesh, too many
            replicated bytes, or sums across processes that would be wrong (`check_sums`).
    """
    check_sums(policy, layout.mesh, backward=False)
    # Traced once for its shapes and for every program that creates parameters.
    init = jax.jit(lambda key: model.init(key), inline=True)
    drawn, model_state = drawn_shapes(init)
    params = jax.eval_shape(lambda params: stored_params(model, params, policy, trainable), drawn)
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    if not isinstance(model.axes, FamilyTable):
        _check_table(list(leaves), model)
    layout = with_parameters(layout, params, trained=trained_paths(params, trainable).__contains__)
    degrees = layout.mesh.shape
    on_tensor = [path for path in leaves if "tensor" in _stored_axes(layout, path)]
    sizes = {path: leaf.size for path, leaf in leaves.items()}
    check_tensor_used(sizes, on_tensor, degrees["tensor"], layout.rules, model=model.name)
    if degrees["fsdp"] > 1:
        nbytes = {path: leaf.size * leaf.dtype.itemsize for path, leaf in leaves.items()}
        replicated = {path: size for path, size in nbytes.items() if "fsdp" not in _stored_axes(layout, path)}
        check_replicated_share(replicated, sum(nbytes.values()), degrees["fsdp"], max_replicated_fraction)
    everywhere = NamedSharding(layout.mesh, PartitionSpec())
    return ShardedModel(
        model,
        layout,
        policy,
        init,
        abstract_params=jax.tree.map(with_sharding, params, parameter_shardings(params, layout)),
        abstract_model_state=jax.tree.map(lambda leaf: with_sharding(leaf, everywhere), model_state),
    )


def _stored_axes(layout: Layout, path: str) -> set[str]:
    """Return the mesh axes that shard a parameter where the state stores it."""
    return {axis for entry in layout.parameters[path].stored for axis in entry_axes(entry)}


def with_sharding(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array (or of a shape) with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_table(paths: list[str], model: Model) -> None:
    """Raise where a row of the axes table matches no parameter."""
    for row in model.axes:
        if row not in paths and not fnmatch.filter(paths, row):
            there = ", ".join(paths[:6]) + (", ..." if len(paths) > 6 else "")
            raise ConfigError(f"axes of the model {model.name}: {row!r} matches no parameter; there are {there}")
