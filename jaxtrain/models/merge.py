"""Adapters added to the kernels below them: parameters of the model that an adapted one was made of."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Model, Params, check_is_model, parameter_shapes
from jaxtrain.precision.kernels import is_kernel
from jaxtrain.precision.low_rank import LowRankKernel
from jaxtrain.precision.nf4 import Nf4Kernel, dequantize
from jaxtrain.precision.quantized import QuantizedKernel


def merge_adapters(params: Params, model: Model) -> Params:
    """Add the product of each adapter to the kernel below it.

    Kernels in fewer bits become floats, with what their rounding took away still missing.

    Args:
        params: parameters of an adapted model, sharded in any way.
        model: that model, from `adapt` or `load_adapter`.

    Returns:
        Parameters of the model that it was made of; kernels are float32, all else as it was.

    Raises:
        ConfigError: the model is not adapted.
    """
    check_is_model(model, what="merge_adapters: model")
    if model.adapted is None:
        raise ConfigError(f"the model {model.name} is not adapted, so that there is nothing to merge")
    linears = model.adapted.original.linears

    def one(path: tuple, leaf: Any) -> jax.Array:
        if isinstance(leaf, LowRankKernel):
            stack = leaf.lora_a.ndim + leaf.lora_b.ndim - 2 - len(leaf.base.shape)
            return _merged(leaf, stack=stack)
        if is_kernel(leaf):
            return _floats(leaf, stack=len(leaf.shape) - sum(linears[path_name(path)]))
        return leaf

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_kernel)


def _merged(kernel: LowRankKernel, *, stack: int) -> jax.Array:
    base = _floats(kernel.base, stack=stack)
    lead, rank = base.shape[:stack], kernel.rank
    a = kernel.lora_a.astype(jnp.float32).reshape(*lead, -1, rank)
    b = kernel.lora_b.astype(jnp.float32).reshape(*lead, rank, -1)
    # The factors of a merged kernel are multiplied once: their product may take all the precision there is.
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
    return base + kernel.scale * product.reshape(base.shape)


def _floats(kernel: Any, *, stack: int) -> jax.Array:
    if isinstance(kernel, Nf4Kernel):
        return dequantize(kernel, jnp.float32)
    if isinstance(kernel, QuantizedKernel):
        inputs = kernel.values.ndim - kernel.scale.ndim
        scale = jnp.expand_dims(kernel.scale, tuple(range(stack, stack + inputs)))
        return kernel.values.astype(jnp.float32) * scale
    return kernel.astype(jnp.float32)


def num_kernels(model: Model) -> int:
    """Number of kernels of linear layers of the model that an adapted one was made of, counted in every layer.

    Args:
        model: the adapted model.
    """
    assert model.adapted is not None
    original = model.adapted.original
    shapes = parameter_shapes(original)
    stacks = (shapes[path].shape[: len(shapes[path].shape) - sum(dims)] for path, dims in original.linears.items())
    return sum(math.prod(stack) for stack in stacks) or 1


def base_params(params: Params, model: Model) -> Params:
    """Parameters of the model that an adapted one was made of, without the adapters; kernels are float32.

    Args:
        params: parameters of the adapted model.
        model: the adapted model.
    """

    def one(leaf: Any) -> Any:
        return replace(leaf, lora_b=jnp.zeros_like(leaf.lora_b)) if isinstance(leaf, LowRankKernel) else leaf

    return merge_adapters(jax.tree.map(one, params, is_leaf=is_kernel), model)
