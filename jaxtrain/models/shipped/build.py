"""A model is built from its config group here. A new kind of model adds one line to the table."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.config import load_config
from jaxtrain.config.arguments import check_whole, refusal
from jaxtrain.config.base import Group
from jaxtrain.config.model import CalledModel, ModelConfig
from jaxtrain.config.schema import BLOCK_INPUT
from jaxtrain.errors import ConfigError
from jaxtrain.models.called import called_model
from jaxtrain.models.model import Model, Rebuild, with_remat
from jaxtrain.models.shipped.encoder_decoder import encoder_decoder
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.models.shipped.resnet import resnet
from jaxtrain.models.shipped.transformer import transformer
from jaxtrain.models.shipped.vit import vit
from jaxtrain.remat.policy import Remat

# kind -> (config, input shape of a row, vocabulary, outputs, remat) -> model
_BUILDERS: dict[str, Callable[[Any, tuple[int, ...], int | None, int | None, Remat], Model]] = {
    "transformer": lambda config, shape, vocab, outputs, remat: transformer(
        config, vocab_size=vocab, num_outputs=outputs, remat=remat
    ),
    "encoder_decoder": lambda config, shape, vocab, outputs, remat: encoder_decoder(
        config, vocab_size=vocab, remat=remat
    ),
    "resnet": lambda config, shape, vocab, outputs, remat: resnet(
        config, input_shape=shape, num_classes=outputs, remat=remat
    ),
    "vit": lambda config, shape, vocab, outputs, remat: vit(
        config, input_shape=shape, num_classes=outputs, remat=remat
    ),
    "mlp": lambda config, shape, vocab, outputs, remat: mlp(config, input_shape=shape, num_outputs=outputs),
}

# Kinds made of the transformer's blocks, which have every tensor that `remat` may name.
_OF_BLOCKS = ("transformer", "encoder_decoder", "vit")
# Another kind of model -> the tensor that remat.offload may name.
_OFFLOADED = {"resnet": BLOCK_INPUT}


def build_model(
    config: ModelConfig | Mapping[str, Any],
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    remat: Remat | None = None,
) -> Model:
    """Build the model that a config group describes; sizes that the config leaves out come from the data.

    Args:
        config: a model group, or its keys as a mapping ({"kind": "mlp"}).
        input_shape: shape of the inputs of one row, without the batch dim.
        vocab_size: vocabulary of the data, where it has one.
        num_outputs: classes or targets of the data, where it has them.
        remat: what the backward pass keeps; None: everything, and of a model of your own (`call`) what it says itself.

    Raises:
        ConfigError: an argument is of another type, a key or value of the mapping is wrong, neither the config nor the
            data gives a size, or the
            inputs are of the wrong kind.

    Example:
        >>> model = jt.build_model({"kind": "mlp", "hidden_dims": [32]}, input_shape=(4,), num_outputs=3)
        >>> jt.count_parameters(model)
        259
    """
    _check_call(config, input_shape, vocab_size, num_outputs)
    if isinstance(config, Mapping):
        config = load_config({"model": config}).config.model
    if isinstance(config, CalledModel):
        own = called_model(config, input_shape=input_shape, vocab_size=vocab_size, num_outputs=num_outputs)
        applied = own if remat is None else with_remat(own, remat)
        if applied is None:
            raise ConfigError(f"remat: the model of {config.call} takes no remat policy; let the function apply it")
        return applied
    given, remat = remat, remat or Remat()
    known = _OFFLOADED.get(config.kind)
    wrong = [name for name in remat.offload if config.kind not in _OF_BLOCKS and name != known]
    if wrong:
        raise ConfigError(
            f"remat.offload: model.kind={config.kind} has no tensor {wrong[0]!r}; known: {known or 'none'}"
        )
    group = config

    def build(remat: Remat) -> Model:
        return build_model(group, input_shape=input_shape, vocab_size=vocab_size, num_outputs=num_outputs, remat=remat)

    model = _BUILDERS[config.kind](config, input_shape, vocab_size, num_outputs, remat)
    if config.kind == "mlp":
        return model  # it has no blocks to keep less of
    return dataclasses.replace(model, remat=given, rebuild=Rebuild(model.apply, model.parts, build))


def _check_call(config: Any, input_shape: Any, vocab_size: Any, num_outputs: Any) -> None:
    """Raise where an argument of `build_model` is of another type."""
    if not (isinstance(config, Group) or (isinstance(config, Mapping) and config)):
        word = config if isinstance(config, str) else "mlp"
        write = f"build_model({{'kind': {word!r}}}, input_shape=data.input_shape)"
        raise ConfigError(refusal("build_model", "a dict with the kind of model", config, write))
    sizes = input_shape if isinstance(input_shape, tuple | list) else None
    if sizes is None:
        write = f"input_shape=({input_shape},)" if isinstance(input_shape, int) else "input_shape=data.input_shape"
        takes = "the shape of one row, without the batch"
        raise ConfigError(refusal("build_model: input_shape", takes, input_shape, write))
    for size in sizes:
        check_whole(size, what="build_model: input_shape", least=1, write="input_shape=data.input_shape")
    for name, size in (("vocab_size", vocab_size), ("num_outputs", num_outputs)):
        if size is not None:
            check_whole(size, what=f"build_model: {name}", least=1, write=f"{name}=data.{name}")
