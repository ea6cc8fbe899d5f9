"""From a config to its step or its sharded model, by the sizes of the data. Nothing is allocated on a device."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from jaxtrain.config.fits import fresh_parts
from jaxtrain.config.kinds import check_freeze
from jaxtrain.config.model import CalledModel, MLPConfig, OutputScale
from jaxtrain.config.schema import Config, FinetuneConfig, RematConfig
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import AXES, config_degrees, stage_over_data
from jaxtrain.models.adapters import adapt
from jaxtrain.models.model import Model, parameter_shapes
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import ERRORS, build_task
from jaxtrain.optim.optimizers import build_optimizer, build_schedule, trainable_predicate
from jaxtrain.optim.rules import complete_axes
from jaxtrain.remat.policy import Remat
from jaxtrain.train.parallelism import Parallelism, shard_model
from jaxtrain.train.spikes import SpikeRule
from jaxtrain.train.step import TrainStep, make_train_step


def build_step(
    config: Config,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    model: Model | None = None,
    task: Task | None = None,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: optax.Schedule | float | None = None,
    trainable: Callable[[str], bool] | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    mesh: Mesh | None = None,
    devices: Sequence[Any] | None = None,
    drawn: Sequence[str] = (),
) -> TrainStep:
    """The train step of a config, from what the data would say of itself.

    Args:
        config: the run.
        input_shape: of one row: (sequence length,) of tokens, (height, width, channels), ...
        vocab_size, num_outputs: used where the config leaves them out.
        model, task, optimizer, mesh: your own instead of the config's.
        learning_rate: the rate of such an optimizer that the metrics show, a number or a schedule; None: none.
        trainable: parameter path -> whether it is trained; None: as the config says.
        rules: logical axes -> mesh axes, added to the default rules.
        devices: devices to use, real or compile-only; None: all.
        drawn: patterns of parameters that will be drawn although others are given: beside adapters they are trained.

    Raises:
        ConfigError: an argument of another type, parts that do not fit together, or sizes that do not divide.

    Example:
        >>> step = jt.build_step(jt.load_config("digits_mlp").config, input_shape=(8, 8, 1), num_outputs=10)
        >>> step.model.name
        'mlp'
    """
    if mesh is None:
        mesh = make_mesh(**config_degrees(config.parallel), devices=devices)
    sizes = {"input_shape": input_shape, "vocab_size": vocab_size, "num_outputs": num_outputs}
    model = finetuned(config, model_of(config, **sizes, model=model), drawn=drawn)
    spikes = config.spikes
    settings = config.optimizer
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(model).items()}
    axes = complete_axes(shapes, model.axes, None if model.parts is None else model.parts.stack)
    if optimizer is None:
        # The rate of an optimizer of the user's is known to the user alone.
        learning_rate = None
        if settings.learning_rate is not None:
            learning_rate = build_schedule(settings.schedule, peak=settings.learning_rate, steps=config.train.steps)
        optimizer = build_optimizer(settings, learning_rate, axes=axes)
    return make_train_step(
        model,
        task or build_task(config),
        optimizer,
        mesh=mesh,
        policy=config.precision.policy,
        accumulation_steps=config.train.accumulation_steps,
        clip_norm=settings.clip_norm,
        ema_decay=settings.ema_decay,
        trainable=trainable or trainable_of(config, model),
        learning_rate=learning_rate,
        rules=rules,
        parallelism=parallelism_of(config),
        offload_optimizer=settings.offload,
        compiler_options=config.compiler_options,
        spikes=None if spikes is None else SpikeRule(spikes.window, spikes.sigmas, spikes.watch),
    )


def build_sharded_model(
    config: Config,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    model: Model | None = None,
    task: Task | None = None,
    mesh: Mesh | None = None,
) -> ShardedModel:
    """The model of a config on its mesh, for all that does not train it.

    Parameters are replicated over `data` where ZeRO 1 and 2 would shard them, so that nothing is gathered for each
    batch or token. Arguments are those of `build_step`.

    Raises:
        ConfigError: parts that do not fit together, or sizes that do not divide.
    """
    parallelism = parallelism_of(config)
    if stage_over_data(parallelism.zero):
        parallelism = replace(parallelism, zero=0)
    sizes = {"input_shape": input_shape, "vocab_size": vocab_size, "num_outputs": num_outputs}
    model = finetuned(config, model_of(config, **sizes, model=model))
    return shard_model(
        model,
        mesh=mesh or make_mesh(**config_degrees(config.parallel), devices=None),
        policy=config.precision.policy,
        parallelism=parallelism,
        trainable=trainable_of(config, model),
        task=task or build_task(config),
    )


def model_of(
    config: Config,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None = None,
    num_outputs: int | None = None,
    model: Model | None = None,
) -> Model:
    """The model of a config, or your own one in its place, which has a remat policy of its own."""
    remat = Remat(config.remat.policy, config.remat.names, config.remat.offload)
    sizes = {"input_shape": input_shape, "vocab_size": vocab_size, "num_outputs": num_outputs}
    if model is None and not isinstance(config.model, CalledModel):
        return build_model(config.model, **sizes, remat=remat)
    model = build_model(config.model, **sizes) if model is None else model
    default = RematConfig()
    # What is at its default asks for nothing.
    if remat not in (model.remat, Remat(), Remat(default.policy, default.names, default.offload)):
        raise ConfigError(
            f"remat.policy={remat.policy} does not apply to a model from Python; build {model.name} with "
            "from_stages(remat=...), build_model(remat=...) or jax.checkpoint (nnx.remat, nn.remat) inside it"
        )
    return model


def parallelism_of(config: Config) -> Parallelism:
    """The options of a config's mesh axes besides their degrees."""
    return Parallelism(**config.parallel.model_dump(exclude={*AXES, "auto"}))


def finetuned(config: Config, model: Model, *, drawn: Sequence[str] = ()) -> Model:
    """The model with the adapters of a config, and its frozen kernels in the format of the config.

    Parameters that match `drawn` are drawn although others are given: they are trained too.
    """
    settings = config.finetune
    if settings.lora is None:
        return model
    if model.adapted is not None:
        raise ConfigError(
            f"finetune.lora, but the model {model.name} has adapters already; leave the group finetune out, or give a "
            "model without adapters"
        )
    paths = list(parameter_shapes(model))
    # What is drawn may be model_state.
    fresh = [
        one for one in (*fresh_parts(config.model), *drawn) if any(fnmatch.fnmatchcase(path, one) for path in paths)
    ]
    lora = settings.lora.model_copy(update={"train_also": (*settings.lora.train_also, *fresh)})
    # A rank that is not the folder's is refused where its factors are read.
    return adapt(model, lora=lora, base=settings.base, double_quantization=settings.double_quantization)


def trainable_of(config: Config, model: Model) -> Callable[[str], bool] | None:
    """Parameter path -> whether a config trains it; None: it trains all."""
    if model.adapted is not None:
        check_freeze(FinetuneConfig(lora=model.adapted.lora), config.optimizer.freeze)
        return model.adapted.trains
    freeze = config.optimizer.freeze
    return trainable_predicate(freeze, list(parameter_shapes(model)) if freeze else [])


def with_output_scale(config: Config, reading: Mapping[str, Any] | None, *, task: object) -> Config:
    """The config that a model is built from: with the scale of the targets as that of the outputs, if it has none.

    A layer that begins with outputs of size 1 takes thousands of steps of Adam to reach prices. The config of a run
    stays without it, because a run on another table takes the scale of that.

    `reading` is that of the data; `task` the name of the shipped task: outputs of a user's may be no numbers.
    """
    model = config.model
    if not isinstance(model, MLPConfig) or not isinstance(task, str):
        return config
    if model.output_scale is not None:
        if task not in ("regression", *ERRORS):
            raise ConfigError(f"model.output_scale is for numbers, which task={task} does not predict; leave it out")
        return config
    mean, deviation = ((reading or {}).get(name) for name in ("target_mean", "target_deviation"))
    if task not in ("regression", *ERRORS) or mean is None or deviation is None:
        return config
    offset = (reading or {}).get("target_offset", [0.0] * len(mean))
    # A constant is learned as it is.
    scale = OutputScale(
        mean=tuple(np.subtract(mean, offset).tolist()), deviation=tuple(one or 1.0 for one in deviation)
    )
    return config.model_copy(update={"model": model.model_copy(update={"output_scale": scale})})
