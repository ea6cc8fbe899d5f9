"""Models whose linear layers have low-rank adapters, or quantized kernels, in place of their float kernels."""

import fnmatch
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.arguments import check_choice
from jaxtrain.config.schema import LoraConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.adapted_apply import Preparation, prepared
from jaxtrain.models.adapted_axes import adapted_axes
from jaxtrain.models.adapter_targets import Layers, check_train_also, find_targets, layer_sizes
from jaxtrain.models.model import LOW_RANK, Adapted, Model, ModelState, Params, check_is_model, parameter_shapes
from jaxtrain.precision.kernels import LowRankKernel, QuantizedKernel, quantize_kernel
from jaxtrain.precision.nf4 import Nf4Kernel, quantize_nf4

FORMATS = ("int8", "nf4")
"""Number formats of kernels below adapters."""


def adapt(
    model: Model, *, lora: LoraConfig | None = None, base: str | None = None, double_quantization: bool = True
) -> Model:
    """Make a model whose linear layers have low-rank adapters, or quantized kernels, or both.

    The result is a model like any other. A step trains its adapters only, unless it is told what to train.

    Args:
        model: a model with linear layers (`Model.linears`); or any model, whose kernels `lora.targets` names by their
            paths: matrices [D, F], also as stacks of layers [num_layers, D, F] where its parts say so.
        lora: settings of the adapters; None: no adapters.
        base: format of the kernels of all linear layers: "int8" or "nf4"; None: as they are.
        double_quantization: nf4: whether the scales are quantized too.

    Returns:
        A model whose parameters hold a `LowRankKernel` or a quantized kernel in the place of each kernel.

    Raises:
        ConfigError: a target matches no layer or matches experts, the rank exceeds a dim, a format or dropout is
            asked for of layers that are not ours, or the model is adapted already.

    Example:
        >>> adapted = jt.adapt(text_model, lora=jt.LoraConfig(rank=2, targets=("query", "value")))
        >>> step = jt.make_train_step(adapted, jt.language_modeling(), optax.adamw(1e-3))
        >>> sum(leaf.size for leaf in jax.tree.leaves(step.abstract_state.optimizer_state[0].mu))
        128
    """
    return _adapt(model, lora, base, double_quantization, from_folder=False)


def adapt_as_folder(
    model: Model, *, lora: LoraConfig, base: str | None = None, double_quantization: bool = True
) -> Model:
    """Make the model of an adapter's folder: `adapt`, with settings that the folder gave.

    Args:
        model: see `adapt`.
        lora: what the folder gives; its rank may exceed the dims of some layers.
        base: see `adapt`.
        double_quantization: see `adapt`.

    Raises:
        ConfigError: as `adapt` does, but for the rank.
    """
    return _adapt(model, lora, base, double_quantization, from_folder=True)


def _adapt(
    model: Model, lora: LoraConfig | None, base: str | None, double_quantization: bool, *, from_folder: bool
) -> Model:
    check_is_model(model, what="adapt")
    if base is not None:
        check_choice(base, FORMATS, what="adapt: base", write=f"base={FORMATS[0]!r}")
    if lora is None and base is None:
        raise ConfigError("adapt takes lora=, base= or both; write adapt(model, lora=jt.LoraConfig(rank=16))")
    if model.adapted is not None:
        raise ConfigError(f"the model {model.name} is adapted already; adapt the model that it was made of")
    if base is not None and not model.linears:
        raise ConfigError(
            f"base={base!r} is for linear layers (jaxtrain.models.layers.Linear), and the model {model.name} has none; "
            "leave it out"
        )
    shapes = parameter_shapes(model)
    targets = {} if lora is None else find_targets(_layers(model), lora, from_folder=from_folder)
    kernels = {**(model.linears if base else {}), **targets}
    if lora is not None:
        check_train_also(lora.train_also, shapes, targets, kernels, base)

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        params, model_state = model.init(key)
        return _with_kernels(params, kernels, lora, base, double_quantization, tuple(targets), key), model_state

    patterns = () if lora is None else lora.train_also

    def trains(path: str) -> bool:
        return path.rsplit("/", 1)[-1] in LOW_RANK or any(fnmatch.fnmatchcase(path, one) for one in patterns)

    adapted = Adapted(model, lora, base, double_quantization, tuple(targets), trains)
    prepare = Preparation(
        {path: len(shapes[path].shape) - sum(dims) for path, dims in targets.items()},
        frozenset(path for path in targets if path not in model.linears),
        lora is not None and lora.dropout > 0,
    )
    if prepare.added_up and prepare.dropout:
        raise ConfigError(
            f"lora.dropout={lora.dropout if lora else 0} is for layers of jaxtrain.models.layers.Linear, whose inputs "
            f"it drops, and the model {model.name} has none; use dropout=0"
        )
    nested = base == "nf4" and double_quantization
    axes = adapted_axes(model, kernels, shapes, base=base, nested=nested, targets=tuple(targets))
    return replace(prepared(model, prepare), init=init, axes=axes, adapted=adapted)


def _layers(model: Model) -> Layers:
    """What decides which kernels of a model get an adapter."""
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(model).items()}
    stack = None if model.parts is None else model.parts.stack
    return Layers(model.name, shapes, model.linears, stack, model.has_experts)


def _with_kernels(
    params: Params,
    kernels: Mapping[str, tuple[int, int]],
    lora: LoraConfig | None,
    base: str | None,
    double_quantization: bool,
    targets: tuple[str, ...],
    key: jax.Array,
) -> Params:
    """The parameters with kernels of their kind in place of float kernels; adapters begin at 0."""

    def one(path: tuple, leaf: jax.Array) -> Any:
        name = path_name(path)
        dims = kernels.get(name)
        if dims is None:
            return leaf
        kernel = leaf if base is None else quantized_kernel(leaf, dims, base, double_quantization)
        if lora is None or name not in targets:
            return kernel
        return _adapted_kernel(kernel, leaf.shape, dims, lora, jax.random.fold_in(key, zlib.crc32(name.encode())))

    return jax.tree_util.tree_map_with_path(one, params)


def quantized_kernel(
    kernel: jax.Array, dims: tuple[int, int], base: str | None, double_quantization: bool
) -> QuantizedKernel | Nf4Kernel:
    """A float kernel in the number format of a base.

    Args:
        kernel: [*stack, *D, *F].
        dims: numbers of dims of D and of F.
        base: one of `FORMATS`.
        double_quantization: nf4: whether its scales are quantized too.
    """
    if base == "nf4":
        return quantize_nf4(kernel, *dims, double=double_quantization)
    return quantize_kernel(kernel, *dims, activations=False)


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
