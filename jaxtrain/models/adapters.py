"""Models whose linear layers have low-rank adapters, or quantized kernels, in place of their float kernels."""

import difflib
import fnmatch
import math
import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxtrain.config.arguments import check_kind
from jaxtrain.config.finetune import LoraConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import AxesTable, FamilyTable, table_row
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Adapted, Model, ModelState, Params, check_is_model, parameter_shapes
from jaxtrain.precision.low_rank import LowRankKernel
from jaxtrain.precision.quantized import quantize_kernel

_FACTORS = ("lora_a", "lora_b")


def adapt(
    model: Model, *, lora: LoraConfig | None = None, base: str | None = None, double_quantization: bool = True
) -> Model:
    """Make a model whose linear layers have low-rank adapters, or quantized kernels, or both.

    The result is a model like any other. A step trains its adapters only, unless it is told what to train.

    Args:
        model: a model with linear layers (`Model.linears`).
        lora: settings of the adapters; None: no adapters.
        base: format of the kernels of all linear layers: "int8" or "nf4"; None: as they are.
        double_quantization: nf4: whether the scales are quantized too.

    Returns:
        A model whose parameters hold a `LowRankKernel` or a quantized kernel in the place of each kernel.

    Raises:
        ConfigError: the model has no linear layers, a target matches none, or the rank exceeds a dim.

    Example:
        >>> adapted = jt.adapt(text_model, lora=jt.LoraConfig(rank=2, targets=("query", "value")))
        >>> step = jt.make_train_step(adapted, jt.language_modeling(), optax.adamw(1e-3))
        >>> sum(leaf.size for leaf in jax.tree.leaves(step.abstract_state.optimizer_state[0].mu))
        256
    """
    check_is_model(model, what="adapt")
    if lora is not None:
        check_kind(lora, LoraConfig, what="adapt: lora", takes="a LoraConfig", write="lora=jt.LoraConfig(rank=16)")
    if model.adapted is not None:
        raise ConfigError(f"the model {model.name} is adapted already; adapt the model that it was made of")
    if not model.linears:
        raise ConfigError(
            f"adapters are for linear layers (jaxtrain.models.layers.Linear), and the model {model.name} has none"
        )
    targets = () if lora is None else find_targets(model, lora)
    shapes = parameter_shapes(model)
    axes: AxesTable = dict(model.axes)
    for path, (num_inputs, num_outputs) in model.linears.items():
        row = table_row(path, model.axes)
        has_base = path in targets
        if row is None or not (has_base or base):
            continue
        axes.pop(path, None)
        first = len(shapes[path].shape) - num_inputs - num_outputs
        stack, inputs, outputs = row[:first], row[first : first + num_inputs], row[first + num_inputs :]
        place = f"{path}/base" if has_base else path
        if base is None:
            axes[place] = row
        else:
            axes |= {f"{place}/values": row, f"{place}/scale": (*stack, *outputs)}
        if has_base:
            axes |= {f"{path}/lora_a": (*stack, *inputs, None), f"{path}/lora_b": (*stack, None, *outputs)}
    if isinstance(model.axes, FamilyTable):
        axes = FamilyTable(axes)

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        params, model_state = model.init(key)
        return _with_kernels(params, model, lora, base, targets, key), model_state

    patterns = () if lora is None else lora.train_also

    def trains(path: str) -> bool:
        return path.rsplit("/", 1)[-1] in _FACTORS or any(fnmatch.fnmatchcase(path, one) for one in patterns)

    return replace(
        model, init=init, axes=axes, adapted=Adapted(model, lora, base, double_quantization, targets, trains)
    )


def find_targets(model: Model, lora: LoraConfig) -> tuple[str, ...]:
    """Find the kernels that get an adapter.

    Args:
        model: a model with linear layers.
        lora: settings of the adapters.

    Returns:
        Paths of kernels.

    Raises:
        ConfigError: a target matches no linear layer, or the rank exceeds a dim of one.
    """
    layers = {path.removesuffix("/kernel"): path for path in model.linears}
    found: set[str] = set()
    for target in lora.targets:
        matched = [layer for layer in layers if _is_target(layer, target)]
        if not matched:
            names = list(dict.fromkeys([layer.rsplit("/", 1)[-1] for layer in layers] + list(layers)))
            near = difflib.get_close_matches(target, names, n=3) or names[:8]
            raise ConfigError(
                f"lora.targets: {target!r} matches no linear layer of the model {model.name}; there are "
                f"{', '.join(near)}"
            )
        found.update(matched)
    shapes = parameter_shapes(model)
    for layer in found:
        inputs, outputs = _sizes(shapes[layers[layer]].shape, *model.linears[layers[layer]])
        if lora.rank > min(inputs, outputs):
            raise ConfigError(
                f"lora.rank={lora.rank} exceeds a dim of {layer} ({inputs} inputs, {outputs} outputs); use "
                f"rank={min(inputs, outputs)} or less, or leave the layer out of lora.targets"
            )
    return tuple(layers[layer] for layer in layers if layer in found)


def _is_target(layer: str, target: str) -> bool:
    return fnmatch.fnmatchcase(layer, target) or layer.rsplit("/", 1)[-1] == target


def _sizes(shape: tuple[int, ...], num_inputs: int, num_outputs: int) -> tuple[int, int]:
    first = len(shape) - num_inputs - num_outputs
    return math.prod(shape[first : first + num_inputs]), math.prod(shape[first + num_inputs :])


def _with_kernels(
    params: Params, model: Model, lora: LoraConfig | None, base: str | None, targets: tuple[str, ...], key: jax.Array
) -> Params:
    """The parameters with kernels of their kind in place of those of linear layers; adapters begin at 0."""

    def one(path: tuple, leaf: jax.Array) -> jax.Array | LowRankKernel:
        name = path_name(path)
        dims = model.linears.get(name)
        if dims is None:
            return leaf
        kernel = leaf if base is None else quantize_kernel(leaf, *dims, activations=False)
        if lora is None or name not in targets:
            return kernel
        return _adapted_kernel(kernel, leaf.shape, dims, lora, jax.random.fold_in(key, zlib.crc32(name.encode())))

    return jax.tree_util.tree_map_with_path(one, params)


def _adapted_kernel(
    kernel: jax.Array, shape: tuple[int, ...], dims: tuple[int, int], lora: LoraConfig, key: jax.Array
) -> LowRankKernel:
    """A kernel with an adapter whose product is 0: A is drawn, B is 0."""
    num_inputs, num_outputs = dims
    first = len(shape) - num_inputs - num_outputs
    bound = 1 / math.sqrt(_sizes(shape, *dims)[0])
    drawn = jax.random.uniform(key, (*shape[: first + num_inputs], lora.rank), jnp.float32, -bound, bound)
    zeros = jnp.zeros((*shape[:first], lora.rank, *shape[first + num_inputs :]), jnp.float32)
    return LowRankKernel(kernel, drawn, zeros, lora.scale, lora.dropout)
