"""Adapters added to the kernels below them: the parameters of the model without adapters."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Model, Params, check_is_model
from jaxtrain.precision.kernels import LowRankKernel, QuantizedKernel, is_kernel
from jaxtrain.precision.nf4 import Nf4Kernel, dequantize


def merge_adapters(params: Params, model: Model) -> Params:
    """Add the adapters of a model to its kernels, and make floats of quantized kernels.

    Args:
        params: parameters of the adapted model, sharded in any way; inside `jit` too.
        model: from `adapt`.

    Returns:
        Parameters of the model that was adapted. Each kernel is summed in float32, and has the dtype of its base;
        float32 where that is quantized.

    Raises:
        ConfigError: the model has no adapters, or the parameters are not its own.

    Example:
        >>> adapted = jt.adapt(text_model, lora=jt.LoraConfig(rank=2))
        >>> params, _ = adapted.init(jax.random.key(0))
        >>> merged = jt.merge_adapters(params, adapted)  # for text_model.apply, save_pretrained, ...
    """
    check_is_model(model, what="merge_adapters")
    if model.adapted is None:
        raise ConfigError(
            f"merge_adapters: the model {model.name} has no adapters; give what jt.adapt(model, lora=...) made"
        )
    if not any(is_kernel(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_kernel)):
        write = "merge_adapters(state.params, step.model)"
        raise ConfigError(refusal("merge_adapters: params", "the parameters of the adapted model", params, write))
    linears = model.adapted.original.linears

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        # Other kernels that have adapters are matrices, or stacks of them.
        return merged_kernel(leaf, linears.get(path_name(path), (1, 1))) if is_kernel(leaf) else leaf

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=is_kernel)


def merged_kernel(kernel: Any, dims: tuple[int, int]) -> jax.Array:
    """A kernel of any kind as one float array.

    Args:
        kernel: [*stack, *D, *F], with an adapter or quantized or both.
        dims: numbers of dims of D and of F.

    Returns:
        The kernel in the dtype of its base; float32 of a quantized one.
    """
    if not isinstance(kernel, LowRankKernel):
        return float_kernel(kernel, dims)
    base = float_kernel(kernel.base, dims)
    first = base.ndim - sum(dims)
    stack, inputs = base.shape[:first], base.shape[first : first + dims[0]]
    lora_a = kernel.lora_a.astype(jnp.float32).reshape(*stack, math.prod(inputs), kernel.rank)
    lora_b = kernel.lora_b.astype(jnp.float32).reshape(*stack, kernel.rank, -1)
    product = jnp.matmul(lora_a, lora_b, precision="highest").reshape(base.shape)
    return (base.astype(jnp.float32) + kernel.scale * product).astype(base.dtype)


def float_kernel(kernel: Any, dims: tuple[int, int]) -> jax.Array:
    """A kernel without an adapter as a float array; `dims` as for `merged_kernel`."""
    if isinstance(kernel, Nf4Kernel):
        return dequantize(kernel, jnp.float32)
    if isinstance(kernel, QuantizedKernel):
        first = kernel.values.ndim - sum(dims)
        scale = jnp.expand_dims(kernel.scale, tuple(range(first, first + dims[0])))
        return kernel.values.astype(jnp.float32) * scale
    return kernel
