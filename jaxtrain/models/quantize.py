"""A model's parameters with the kernels of its linear layers in 8 or 4 bits, for inference."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.config.arguments import refusal
from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Model, Params
from jaxtrain.precision.kernels import LowRankKernel, QuantizedKernel, is_kernel, is_quantized, quantize_kernel
from jaxtrain.precision.nf4 import Nf4Kernel, quantize_nf4

FORMATS = ("int8", "int8_dynamic", "nf4")


def quantize(params: Params, model: Model, format: str = "int8") -> Params:
    """Quantize the kernels of a model's linear layers.

    The result serves `model.apply`, an `Evaluator` and `generate_text` in place of the floating-point parameters.
    Embeddings, output layers, norms, routers and experts stay as they are. Every layer of a stack and every output
    channel has its own scale.

    Args:
        params: floating-point parameters of the model.
        model: the model that they belong to.
        format: `int8` stores the weights in 8 bits; `int8_dynamic` also rounds the inputs of the layers, with one
            scale per token, and multiplies integers; `nf4` stores them in 4.127 bits, scales included.

    Returns:
        The same tree with a `QuantizedKernel` or an `Nf4Kernel` for each kernel of `model.linears`; all other leaves
        are those of `params`.

    Raises:
        ConfigError: the format is not known, the model has no linear layers, or the parameters are quantized already
            or belong to another model.

    Example:
        >>> params, _ = jax.jit(text_model.init)(jax.random.key(0))
        >>> small = jt.quantize(params, text_model)  # in place of params in `apply`, EvaluationState or generate_text
    """
    write = "quantize(state.params, step.model)"
    if not isinstance(params, Mapping):
        raise ConfigError(refusal("quantize: params", "the parameters of the model", params, write))
    if not isinstance(format, str) or format not in FORMATS:
        raise ConfigError(f"no quantized format {format!r}; known: {', '.join(FORMATS)}")
    if not model.linears:
        raise ConfigError(
            f"{format} is for linear layers (jaxtrain.models.layers.Linear), and the model {model.name} has none"
        )

    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_kernel)
    leaves = {path_name(path): leaf for path, leaf in flat}
    for name in model.linears:
        if name not in leaves:
            raise ConfigError(
                f"no {name} in the parameters: they do not belong to the model {model.name}; give state.params"
            )
        if isinstance(leaves[name], LowRankKernel):
            raise ConfigError(
                f"{name} has an adapter, and {format} is of whole kernels; merge it first (merge_adapters, jaxtrain "
                "export --merge), or set finetune.base to train adapters above quantized kernels"
            )
        if is_quantized(leaves[name]):
            raise ConfigError(f"{name} is quantized already: give the floating-point parameters to get {format}")

    def one(path: jax.tree_util.KeyPath, leaf: jax.Array) -> jax.Array | QuantizedKernel | Nf4Kernel:
        dims = model.linears.get(path_name(path))
        if dims is None:
            return leaf
        if format == "nf4":
            return quantize_nf4(leaf, *dims)
        return quantize_kernel(leaf, *dims, activations=format == "int8_dynamic")

    return jax.tree_util.tree_map_with_path(one, params)


def quantized_bytes(params: Params, dtype: DTypeLike) -> tuple[int, int]:
    """Count the bytes of quantized kernels, and of the same kernels in a floating-point dtype.

    Args:
        params: parameters, some of them quantized.
        dtype: the dtype to compare with.

    Returns:
        The bytes of integers and scales as they are stored, and the bytes of the same kernels in `dtype`.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    kernels = [leaf for leaf in leaves if is_quantized(leaf)]
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(kernels))
    return stored, sum(math.prod(kernel.shape) for kernel in kernels) * jnp.dtype(dtype).itemsize
