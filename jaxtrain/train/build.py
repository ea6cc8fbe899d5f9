"""From a config to its step or its sharded model, by the sizes of the data. Nothing is allocated on a device."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from jaxtrain.config.fits import fresh_parts
from jaxtrain.config.kinds import check_freeze
from jaxtrain.config.model import CalledModel, MLPConfig, OutputScale
from jaxtrain.config.schema import AXES, Config, FinetuneConfig, Parallelism, Remat
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import config_degrees, stage_over_data
from jaxtrain.models.adapters import adapt
from jaxtrain.models.model import Model, parameter_shapes
from jaxtrain.models.sharded import ShardedModel, place_model
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import ERRORS, build_task
from jaxtrain.optim.optimizers import build_optimizer, build_schedule, trainable_predicate
from jaxtrain.optim.rules import complete_axes
from jaxtrain.precision.policy import Policy, get_policy
from jaxtrain.remat.policy import KEEP_ALL
from jaxtrain.train.options import make_layout, make_pipeline, mesh_for
from jaxtrain.train.state import check_parts
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
    model = _configured_model(
        config, input_shape=input_shape, vocab_size=vocab_size, num_outputs=num_outputs, model=model, drawn=drawn
    )
    if optimizer is None:
        optimizer, learning_rate = _configured_optimizer(config, model)
    return make_train_step(
        model,
        task or build_task(config),
        optimizer,
        mesh=mesh,
        policy=config.precision.policy,
        accumulation_steps=config.train.accumulation_steps,
        clip_norm=config.optimizer.clip_norm,
        ema_decay=config.optimizer.ema_decay,
        trainable=trainable or _trainable(config, model),
        learning_rate=learning_rate,
        rules=rules,
        parallelism=config.parallel,
        offload_optimizer=config.optimizer.offload,
        compiler_options=config.compiler_options,
        spikes=config.spikes,
    )


def _configured_optimizer(config: Config, model: Model) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """Return the optimizer of a config, and its learning rate by step."""
    settings = config.optimizer
    schedule = None
    # An optimizer of the user's may have a rate of its own.
    if settings.learning_rate is not None:
        schedule = build_schedule(settings.schedule, peak=settings.learning_rate, steps=config.train.steps)
    shapes = {path: leaf.shape for path, leaf in parameter_shapes(model).items()}
    axes = complete_axes(shapes, model.axes, None if model.parts is None else model.parts.stack)
    return build_optimizer(settings, schedule, axes=axes), schedule


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
    parallel = config.parallel
    options = parallel.model_dump(exclude={*AXES, "auto"})
    if stage_over_data(parallel.zero):
        options["zero"] = 0
    model = _configured_model(
        config, input_shape=input_shape, vocab_size=vocab_size, num_outputs=num_outputs, model=model
    )
    return shard_model(
        model,
        mesh=mesh or make_mesh(**config_degrees(parallel), devices=None),
        policy=config.precision.policy,
        parallelism=Parallelism(**options),
        trainable=_trainable(config, model),
        task=task or build_task(config),
    )


def _configured_model(
    config: Config,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None,
    num_outputs: int | None,
    model: Model | None,
    drawn: Sequence[str] = (),
) -> Model:
    """Return the model of a config, or your own one in its place, with the adapters of the config."""
    remat = config.remat
    is_called = isinstance(config.model, CalledModel)
    if model is None:
        model = build_model(
            config.model,
            input_shape=input_shape,
            vocab_size=vocab_size,
            num_outputs=num_outputs,
            remat=None if is_called else remat,
        )
        if not is_called:
            return _with_adapters(config, model, drawn)
    # A model from Python has a policy of its own; one that is at its default asks for nothing.
    if remat not in (model.remat, KEEP_ALL, Remat()):
        raise ConfigError(
            f"remat.policy={remat.policy} does not apply to a model from Python; build {model.name} with "
            "from_stages(remat=...), build_model(remat=...) or jax.checkpoint (nnx.remat, nn.remat) inside it"
        )
    return _with_adapters(config, model, drawn)


def _with_adapters(config: Config, model: Model, drawn: Sequence[str]) -> Model:
    """Return the model with the adapters of a config, and its frozen kernels in the format of the config.

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
    # What is drawn may be model_state, which is not trained.
    fresh = [
        pattern
        for pattern in (*fresh_parts(config.model), *drawn)
        if any(fnmatch.fnmatchcase(path, pattern) for path in paths)
    ]
    lora = settings.lora.model_copy(update={"train_also": (*settings.lora.train_also, *fresh)})
    # A rank that is not the folder's is refused where its factors are read.
    return adapt(model, lora=lora, base=settings.base, double_quantization=settings.double_quantization)


def _trainable(config: Config, model: Model) -> Callable[[str], bool] | None:
    """Return parameter path -> whether a config trains it; None: it trains all."""
    freeze = config.optimizer.freeze
    if model.adapted is not None:
        check_freeze(FinetuneConfig(lora=model.adapted.lora), freeze)
        return model.adapted.trains
    if not freeze:
        return None
    return trainable_predicate(freeze, list(parameter_shapes(model)))


def with_output_scale(config: Config, reading: Mapping[str, Any] | None, *, task: object) -> Config:
    """Return the config that a model is built from: with the scale of the targets as that of its outputs.

    A layer that begins with outputs of size 1 takes thousands of steps of Adam to reach prices. The config of a run
    stays without it, because a run on another table takes the scale of that.

    Args:
        config: of a run.
        reading: that of the data.
        task: name of the shipped task; another one may have outputs that are not numbers.

    Raises:
        ConfigError: the config has a scale, and its task predicts no numbers.
    """
    model = config.model
    if not isinstance(model, MLPConfig) or not isinstance(task, str):
        return config
    predicts_numbers = task in ("regression", *ERRORS)
    if model.output_scale is not None and not predicts_numbers:
        raise ConfigError(f"model.output_scale is for numbers, which task={task} does not predict; leave it out")
    if model.output_scale is not None or not predicts_numbers or not reading or reading.get("target_mean") is None:
        return config
    mean = np.array(reading["target_mean"], float)
    if "target_offset" in reading:
        mean = mean - reading["target_offset"]
    deviation = np.array(reading["target_deviation"], float)
    scale = OutputScale(
        mean=tuple(mean.tolist()),
        deviation=tuple(np.where(deviation == 0, 1.0, deviation).tolist()),  # a constant is learned as it is
    )
    return config.model_copy(update={"model": model.model_copy(update={"output_scale": scale})})


def shard_model(
    model: Model,
    *,
    mesh: Mesh | None = None,
    policy: str | Policy = "fp32",
    rules: Mapping[str, tuple[str, ...]] | None = None,
    parallelism: Parallelism | None = None,
    trainable: Callable[[str], bool] | None = None,
    task: Task | None = None,
) -> ShardedModel:
    """Place a model on a mesh, for evaluation and generation without a train step; nothing is allocated.

    Args:
        model: from `from_nnx`, `from_linen`, `from_stages`, `from_functions`, or a shipped one.
        mesh: from `make_mesh`; None: of the degrees of `parallelism`.
        policy: number formats: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        rules: logical axes -> mesh axes, in place of those of `DEFAULT_RULES` or added to them.
        parallelism: as for `make_train_step`; None: the defaults.
        trainable: parameter path -> whether it was trained; others keep the dtype of `model.init`. None: all were.
        task: whose rows need a sequence where `context` > 1; None: not checked.

    Raises:
        ConfigError: sizes that do not divide, too many replicated bytes, or an axis that the model cannot use.

    Example:
        >>> sharded = jt.shard_model(model, policy="bf16")
        >>> sharded.abstract_params["kernel"].shape
        (4, 3)
    """
    check_parts(model=model, task=task)
    parallelism = parallelism or Parallelism()
    layout = make_layout(model, task, mesh_for(parallelism, mesh), parallelism, rules)
    make_pipeline(model, layout, parallelism, 1)  # refuses what the stages could not run
    return place_model(
        model,
        layout,
        get_policy(policy),
        trainable=trainable,
        max_replicated_fraction=parallelism.max_replicated_fraction,
    )
