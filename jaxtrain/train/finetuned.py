"""The group `finetune` of a config, applied to a model: its adapters, and what is trained."""

import fnmatch
from collections.abc import Callable, Sequence

from jaxtrain.config.kinds import check_freeze
from jaxtrain.config.schema import Config, FinetuneConfig
from jaxtrain.errors import ConfigError
from jaxtrain.interop.settings import fresh_parts
from jaxtrain.models.adapters import adapt, adapt_as_folder
from jaxtrain.models.model import Model, parameter_shapes
from jaxtrain.optim.masks import trainable_predicate


def finetuned(config: Config, model: Model, *, drawn: Sequence[str] = ()) -> Model:
    """The model with the adapters of a config, and its frozen kernels in the format of the config.

    Args:
        config: the run.
        model: of the config, or your own.
        drawn: patterns of parameters that are drawn although others are given: they are trained too.

    Raises:
        ConfigError: targets, ranks or formats that the model cannot have.
    """
    settings = config.finetune
    if settings.lora is None:
        return model
    if model.adapted is not None:
        raise ConfigError(
            f"finetune.lora, but the model {model.name} is adapted already; leave the group finetune out, or give the "
            "model that it was made of"
        )
    paths = list(parameter_shapes(model))
    # What is drawn may be model_state.
    fresh = [
        one for one in (*fresh_parts(config.model), *drawn) if any(fnmatch.fnmatchcase(path, one) for path in paths)
    ]
    lora = settings.lora.model_copy(update={"train_also": (*settings.lora.train_also, *fresh)})
    # A rank that is not the folder's is refused where its factors are read.
    make = adapt if settings.adapter is None else adapt_as_folder
    return make(model, lora=lora, base=settings.base, double_quantization=settings.double_quantization)


def trainable_of(config: Config, model: Model) -> Callable[[str], bool] | None:
    """Parameter path -> whether a config trains it; None: it trains all."""
    if model.adapted is not None:
        check_freeze(FinetuneConfig(lora=model.adapted.lora), config.optimizer.freeze)
        return model.adapted.trains
    freeze = config.optimizer.freeze
    return trainable_predicate(freeze, list(parameter_shapes(model)) if freeze else [])
