"""Models whose linear layers have low-rank adapters, or quantized kernels, in place of their float kernels."""

import fnmatch
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import LoraConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import FamilyTable
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.adapter_targets import adapted_rows, check_train_also, find_targets, layer_sizes
from jaxtrain.models.model import (
    LOW_RANK,
    Adapted,
    DefersLogits,
    Model,
    ModelState,
    Params,
    Parts,
    PartsApply,
    by_row_as,
    parameter_shapes,
)
from jaxtrain.precision.kernels import LowRankKernel, QuantizedKernel, is_kernel, quantize_kernel
from jaxtrain.precision.nf4 import Nf4Kernel, dequantize, quantize_nf4

FORMATS = ("int8", "nf4")
"""Number formats that `quantize` stores kernels in."""


def adapt(
    model: Model, *, lora: LoraConfig | None = None, base: str | None = None, double_quantization: bool = True
) -> Model:
    """Make a model whose linear layers have low-rank adapters, or quantized kernels, or both.

    The result is a model like any other. A step trains its adapters only, unless it is told what to train.

    Args:
        model: a model with linear layers of `jaxtrain.models.layers` (`Model.linears`).
        lora: settings of the adapters; None: no adapters.
        base: format of the kernels of all linear layers: "int8" or "nf4"; None: as they are.
        double_quantization: nf4: whether the scales are quantized too.

    Returns:
        A model whose parameters hold a `LowRankKernel` or a quantized kernel in the place of each kernel.

    Raises:
        ConfigError: a target matches no linear layer, the model has none, or it is adapted already.

    Example:
        >>> adapted = jt.adapt(text_model, lora=jt.LoraConfig(rank=2, targets=("query", "value")))
        >>> step = jt.make_train_step(adapted, jt.language_modeling(), optax.adamw(1e-3))
        >>> sum(leaf.size for leaf in jax.tree.leaves(step.abstract_state.optimizer_state[0].mu))
        128
    """
    if base not in (None, "int8", "nf4") or (lora is None and base is None):
        raise ConfigError("adapt takes lora=jt.LoraConfig(rank=16), base='int8' or 'nf4', or both")
    if model.adapted is not None:
        raise ConfigError(f"the model {model.name} has adapters already; adapt the model without them")
    _check_linears(model, "adapt")
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(model).items()}
    targets = {} if lora is None else find_targets(model.name, model.linears, lora)
    kernels = dict(model.linears) if base else targets
    patterns = () if lora is None else lora.train_also
    check_train_also(patterns, shapes, targets, kernels, base)

    def kernel_of(path: tuple[Any, ...], leaf: jax.Array, key: jax.Array) -> Any:
        name = path_name(path)
        if name not in kernels:
            return leaf
        kernel = leaf if base is None else quantized_kernel(leaf, kernels[name], base, double_quantization)
        if lora is None or name not in targets:
            return kernel
        return _adapted_kernel(
            kernel, leaf.shape, kernels[name], lora, jax.random.fold_in(key, zlib.crc32(name.encode()))
        )

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        params, model_state = model.init(key)
        return jax.tree_util.tree_map_with_path(lambda path, leaf: kernel_of(path, leaf, key), params), model_state

    def trains(path: str) -> bool:
        return path.rsplit("/", 1)[-1] in LOW_RANK or any(fnmatch.fnmatchcase(path, one) for one in patterns)

    # Rows of the original kernels stay: a model may still ask how such an array is sharded.
    axes = dict(model.axes)
    options: Any = {"base": base, "nested": base == "nf4" and double_quantization}
    for path, dims in kernels.items():
        axes |= adapted_rows(path, len(shapes[path]), dims, model.axes, **options, has_adapter=path in targets)
    adapted = Adapted(model, lora, base, double_quantization, tuple(targets), trains)
    if lora is not None and lora.dropout:
        model = _with_dropout(model, {path: len(shapes[path]) - sum(dims) for path, dims in targets.items()})
    return replace(model, init=init, axes=FamilyTable(axes), adapted=adapted)


def _check_linears(model: Model, what: str) -> None:
    if not model.linears:
        raise ConfigError(
            f"{what} is for linear layers (jaxtrain.models.layers.Linear), and the model {model.name} has none"
        )


def quantized_kernel(
    kernel: jax.Array, dims: tuple[int, int], base: str | None, double_quantization: bool
) -> QuantizedKernel | Nf4Kernel:
    """A float kernel [*stack, *D, *F] in a format of `adapt`, where D and F have so many dims."""
    if base == "nf4":
        return quantize_nf4(kernel, *dims, double=double_quantization)
    return quantize_kernel(kernel, *dims)


def _adapted_kernel(
    kernel: Any, shape: tuple[int, ...], dims: tuple[int, int], lora: LoraConfig, key: jax.Array
) -> LowRankKernel:
    """A kernel with an adapter whose product is 0: A is drawn, B is 0."""
    num_inputs, num_outputs = dims
    first = len(shape) - num_inputs - num_outputs
    bound = 1 / math.sqrt(layer_sizes(shape, *dims)[0])
    drawn = jax.random.uniform(key, (*shape[: first + num_inputs], lora.rank), jnp.float32, -bound, bound)
    zeros = jnp.zeros((*shape[:first], lora.rank, *shape[first + num_inputs :]), jnp.float32)
    return LowRankKernel(kernel, drawn, zeros, lora.scale, lora.dropout)


def _with_dropout(model: Model, stack_dims: Mapping[str, int]) -> Model:
    """The model whose adapters drop inputs in training, by keys that they get; `stack_dims`: dims that count layers."""

    def keyed(params: Params, key: jax.Array | None, train: bool, prefix: str = "", first_layer: Any = 0) -> Params:
        def one(path: tuple[Any, ...], leaf: Any) -> Any:
            if not isinstance(leaf, LowRankKernel) or key is None:
                return leaf
            name = f"{prefix}{path_name(path)}"
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            if stack_dims[name] == 0:
                return replace(leaf, key=own)
            # The masks of a layer follow from its index alone, on whichever stage of a pipeline it is.
            numbers = first_layer + jnp.arange(leaf.lora_b.shape[0])
            return replace(leaf, key=jax.vmap(jax.random.fold_in, (None, 0))(own, numbers))

        if not train:
            return params
        return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda leaf: isinstance(leaf, LowRankKernel))

    def keyed_apply(apply: Callable[..., Any]) -> Any:
        if isinstance(apply, DefersLogits):
            return DefersLogits(keyed_apply(apply.deferred))

        def run(params: Params, model_state: Any, inputs: Any, *, key: Any, train: bool) -> Any:
            return apply(keyed(params, key, train), model_state, inputs, key=key, train=train)

        return by_row_as(run, apply)

    parts = model.parts
    if parts is None:
        return replace(model, apply=keyed_apply(model.apply))

    def embed(params: Params, inputs: Any, /, *, key: jax.Array | None, train: bool) -> Any:
        return parts.embed(keyed(params, key, train), inputs, key=key, train=train)

    def layers(stack: Params, carry: Any, inputs: Any, /, *, first_layer: Any, key: Any, train: bool) -> Any:
        stack = keyed(stack, key, train, f"{parts.stack}/", first_layer)
        return parts.layers(stack, carry, inputs, first_layer=first_layer, key=key, train=train)

    own = Parts(
        parts.stack, parts.num_layers, by_row_as(embed, parts.embed), by_row_as(layers, parts.layers), parts.head
    )
    apply = PartsApply(own) if isinstance(model.apply, PartsApply) else keyed_apply(model.apply)
    return replace(model, apply=apply, parts=own)


def merge_adapters(params: Params, model: Model) -> Params:
    """Add the adapters of a model to its kernels, and make floats of quantized kernels.

    Args:
        params: parameters of the adapted model, sharded in any way; inside `jit` too.
        model: from `adapt`.

    Returns:
        Parameters of the model that was adapted. Each kernel is summed in float32, and has the dtype of its base;
        float32 where that is quantized.

    Example:
        >>> adapted = jt.adapt(text_model, lora=jt.LoraConfig(rank=2))
        >>> params, _ = adapted.init(jax.random.key(0))
        >>> merged = jt.merge_adapters(params, adapted)  # for text_model.apply, save_pretrained, ...
    """
    linears = model.linears

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        return _merged_kernel(leaf, linears[path_name(path)]) if is_kernel(leaf) else leaf

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_kernel)


def _merged_kernel(kernel: Any, dims: tuple[int, int]) -> jax.Array:
    """A kernel [*stack, *D, *F] of any kind as one float array, where D and F have so many dims."""
    if not isinstance(kernel, LowRankKernel):
        return _float_kernel(kernel, dims)
    base = _float_kernel(kernel.base, dims)
    first = base.ndim - sum(dims)
    stack, inputs = base.shape[:first], base.shape[first : first + dims[0]]
    lora_a = kernel.lora_a.astype(jnp.float32).reshape(*stack, math.prod(inputs), kernel.rank)
    lora_b = kernel.lora_b.astype(jnp.float32).reshape(*stack, kernel.rank, -1)
    product = jnp.matmul(lora_a, lora_b, precision="highest").reshape(base.shape)
    return (base.astype(jnp.float32) + kernel.scale * product).astype(base.dtype)


def _float_kernel(kernel: Any, dims: tuple[int, int]) -> jax.Array:
    if isinstance(kernel, Nf4Kernel):
        return dequantize(kernel, jnp.float32)
    if isinstance(kernel, QuantizedKernel):
        first = kernel.values.ndim - sum(dims)
        scale = jnp.expand_dims(kernel.scale, tuple(range(first, first + dims[0])))
        return kernel.values.astype(jnp.float32) * scale
    return kernel


def quantize(params: Params, model: Model, format: str = "int8") -> Params:
    """Quantize the kernels of a model's linear layers, for inference.

    The result serves `model.apply`, an `Evaluator` and `generate_text` in place of the floating-point parameters.
    Embeddings, output layers, norms, routers and experts stay as they are. Every layer of a stack and every output
    channel has its own scale.

    Args:
        params: floating-point parameters of the model.
        model: the model that they belong to.
        format: `int8` stores the weights in 8 bits, `nf4` in 4.127, scales included.

    Returns:
        The same tree with a `QuantizedKernel` or an `Nf4Kernel` for each kernel of `model.linears`; all other leaves
        are those of `params`.

    Raises:
        ConfigError: an unknown format, a model without linear layers, or parameters that are no floats.

    Example:
        >>> params, _ = jax.jit(text_model.init)(jax.random.key(0))
        >>> small = jt.quantize(params, text_model)  # in place of params in `apply`, EvaluationState or generate_text
    """
    if format not in FORMATS:
        raise ConfigError(f"no quantized format {format!r}; known: {', '.join(FORMATS)}")
    _check_linears(model, format)

    def one(path: jax.tree_util.KeyPath, leaf: Any) -> Any:
        name = path_name(path)
        if name not in model.linears:
            return leaf
        if is_kernel(leaf):
            why = "has an adapter, so merge it first" if isinstance(leaf, LowRankKernel) else "is quantized already"
            raise ConfigError(f"{name} {why} (merge_adapters, jaxtrain export --merge): {format} needs float kernels")
        if format == "nf4":
            return quantize_nf4(leaf, *model.linears[name])
        return quantize_kernel(leaf, *model.linears[name])

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_kernel)
