"""A model is built from its config group here. A new kind of model adds one line to the table."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.config import load_config
from jaxtrain.config.model import CalledModel, ModelConfig
from jaxtrain.config.schema import BLOCK_INPUT, Remat
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Model
from jaxtrain.models.shipped.clip import clip
from jaxtrain.models.shipped.encoder_decoder import encoder_decoder
from jaxtrain.models.shipped.images import resnet, vit
from jaxtrain.models.shipped.mlp import mlp
from jaxtrain.models.shipped.shapes import OF_BLOCKS
from jaxtrain.models.shipped.transformer import transformer
from jaxtrain.remat.policy import KEEP_ALL
from jaxtrain.runtime.call import call_function, described

# (config, input_shape=, vocab_size=, num_outputs=, remat=) -> model
_BUILDERS: dict[str, Callable[..., Model]] = {
    "transformer": transformer,
    "encoder_decoder": encoder_decoder,
    "resnet": resnet,
    "vit": vit,
    "clip": clip,
    "mlp": mlp,
}


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
        remat: what the backward pass keeps; None: everything. A model of your own (`call`) applies what it says itself.

    Raises:
        ConfigError: a key or value of the mapping is wrong, neither the config nor the data gives a size, or the
            inputs are of the wrong kind.

    Example:
        >>> model = jt.build_model({"kind": "mlp", "hidden_dims": [32]}, input_shape=(4,), num_outputs=3)
        >>> jt.count_parameters(model)
        259
    """
    if isinstance(config, Mapping):
        config = load_config({"model": config}).config.model
    sizes = {"input_shape": input_shape, "vocab_size": vocab_size, "num_outputs": num_outputs}
    if isinstance(config, CalledModel):
        return _called_model(config, sizes)
    known = BLOCK_INPUT if config.kind == "resnet" else None
    wrong = [name for name in (remat or KEEP_ALL).offload if not isinstance(config, OF_BLOCKS) and name != known]
    if wrong:
        raise ConfigError(
            f"remat.offload: model.kind={config.kind} has no tensor {wrong[0]!r}; known: {known or 'none'}"
        )
    return dataclasses.replace(_BUILDERS[config.kind](config, **sizes, remat=remat), remat=remat)


def _called_model(config: CalledModel, sizes: Mapping[str, Any]) -> Model:
    """What the function of `model.call` returns; it gets the sizes of the data that its signature names."""
    made = call_function("model", config.call, config.args, offered=sizes)
    if isinstance(made, Model):
        return made
    raise ConfigError(
        f"model.call={config.call} returned {described(made)}, not a jaxtrain.Model; return what jaxtrain.from_nnx, "
        "from_linen, from_functions or build_model gives"
    )
