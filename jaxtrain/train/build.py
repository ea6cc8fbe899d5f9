"""From a config, or from parts in Python, to a train step or a sharded model. Nothing is allocated on a device.

`build_step` makes the parts that a config describes, and `make_train_step` makes a step of them.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh

from jaxtrain.config.fits import fresh_parts
from jaxtrain.config.kinds import check_freeze
from jaxtrain.config.model import CalledModel, MLPConfig, OutputScale
from jaxtrain.config.schema import AXES, Config, FinetuneConfig, Parallelism, Remat, SpikeRule
from jaxtrain.errors import ConfigError
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.rules import DEFAULT_RULES, config_degrees, stage_over_data, zero_axes
from jaxtrain.layout.sharding import Layout
from jaxtrain.models.adapters import adapt
from jaxtrain.models.model import Model, parameter_shapes
from jaxtrain.models.sharded import ShardedModel, place_model, trained_paths
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import ERRORS, build_task, named_task
from jaxtrain.optim.optimizers import build_optimizer, build_schedule, trainable_predicate
from jaxtrain.optim.rules import complete_axes
from jaxtrain.optim.wrappers import balance_experts
from jaxtrain.parallel.division import (
    check_model_axes,
    check_task_stages,
    check_zero,
    pipeline_schedule,
    sequence_axes,
)
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.parallel.stage import Pipeline
from jaxtrain.precision.policy import LossScaling, Policy, check_sums, get_policy
from jaxtrain.remat.policy import KEEP_ALL
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.train.state import StepProgram, StepSettings, check_parts
from jaxtrain.train.step import TrainStep


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
    skip: Sequence[str] = (),
) -> TrainStep:
    """Make the train step that a config describes; sizes that the config leaves out come from the data.

    Args:
        config: the run.
        input_shape: of one row: (sequence length,) of tokens, (height, width, channels), ...
        vocab_size, num_outputs: used where the config leaves them out.
        model, task, optimizer, mesh: your own instead of the config's.
        learning_rate: the rate of such an optimizer that the metrics show, a number or a schedule; None: none.
        trainable: parameter path -> whether it is trained; None: as the config says.
        rules: logical axes -> mesh axes, added to the default rules.
        devices: devices to use, real or compile-only; None: all.
        skip: patterns of parameters that the run draws although it starts from given ones (as in `fit`); they are
            trained beside adapters.

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
        config, input_shape=input_shape, vocab_size=vocab_size, num_outputs=num_outputs, model=model, skip=skip
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


def make_train_step(
    model: Model,
    task: Task | str,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    policy: str | Policy = "fp32",
    accumulation_steps: int = 1,
    clip_norm: float | None = None,
    ema_decay: float | None = None,
    trainable: Callable[[str], bool] | None = None,
    learning_rate: optax.Schedule | float | None = None,
    loss_scaling: LossScaling | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    parallelism: Parallelism | None = None,
    compiler_options: Mapping[str, Value] | None = None,
    offload_optimizer: bool = False,
    spikes: SpikeRule | None = None,
) -> TrainStep:
    """Make a train step for any model, task and optimizer, on any mesh.

    Args:
        model: from `from_nnx`, `from_linen`, `from_stages`, `from_functions`, or a shipped one.
        task: what outputs are compared with; or its name: "classification", "mae".
        optimizer: any optax transformation, already made with its learning rate.
        mesh: from `make_mesh`; None: of the degrees of `parallelism`, by default all devices on the `data` axis.
        policy: number formats: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        accumulation_steps: microbatches per step; results equal those of one large batch, but for batch statistics.
        clip_norm: largest global norm of the gradient; None: no clipping.
        ema_decay: keep a moving average of parameters and model_state, which evaluation uses; its decay after t updates
            is min(ema_decay, (1 + t) / (10 + t)).
        trainable: parameter path -> whether it is trained; None: all are, or of an adapted model its adapters.
        learning_rate: the rate of the optimizer that the metrics show, a number or a schedule; None: they show none.
        loss_scaling: how the fp16 loss scale moves.
        rules: logical axes -> mesh axes, in place of those of `DEFAULT_RULES` or added to them.
        parallelism: ZeRO stage, pipeline schedule, kind of context attention; None: the defaults.
        compiler_options: options for XLA; each replaces the one of `jaxtrain/runtime/compiler.py`.
        offload_optimizer: keep the arrays of the optimizer state in the host's memory between steps.
        spikes: when a finite step leaves the state as it was, as one that is not finite does; None: never.

    Raises:
        ConfigError: sizes that the mesh does not divide, too many replicated bytes, or a setting without effect.

    Example:
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3), clip_norm=1.0)
        >>> state = step.init(0)
        >>> state, metrics = step(state, {"inputs": np.ones((8, 4), np.float32), "targets": np.arange(8) % 3})
    """
    task = named_task(task)
    check_parts(model=model, task=task, optimizer=optimizer)
    if model.score_bias_step is not None:
        optimizer = balance_experts(optimizer, model.score_bias_step)
    if trainable is None and model.adapted is not None and model.adapted.lora is not None:
        trainable = model.adapted.trains
    if clip_norm == math.inf:
        clip_norm = None
    if learning_rate is not None and not callable(learning_rate):
        learning_rate = optax.constant_schedule(learning_rate)
    parallelism = parallelism or Parallelism()
    mesh = mesh_for(parallelism, mesh)
    device = mesh.devices.flat[0]
    settings = StepSettings(
        accumulation_steps=accumulation_steps,
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        trainable=trainable,
        learning_rate=learning_rate,
        loss_scaling=loss_scaling or LossScaling(),
        zero=stage_over_data(parallelism.zero),
        offload_optimizer=offload_optimizer,
        spikes=spikes,
        sliced_norm=mesh.size == 1 and device.platform == "cpu",
    )
    settings.check(task)
    policy = get_policy(policy)
    check_sums(policy, mesh, backward=True)
    layout = make_layout(model, task, mesh, parallelism, rules)
    # Layers that do not divide over the stages are refused here, before the model is traced.
    schedule = stage_schedule(model, mesh, parallelism, accumulation_steps)
    sharded_model = place_model(
        model,
        layout,
        policy,
        trainable=trainable,
        max_replicated_fraction=parallelism.max_replicated_fraction,
    )
    if trainable is not None and not trained_paths(sharded_model.abstract_params, trainable):
        raise ConfigError(f"trainable selects no parameter of {model.name}; leave one to train")
    pipeline = make_pipeline(sharded_model, schedule, zero=settings.zero)
    options = choose_options(device, mesh.size, compiler_options, updates=mesh.size == 1 or model.convolutional)
    return TrainStep(StepProgram(sharded_model, task, optimizer, settings, pipeline), options)


# --- A model on a mesh, without a step. ---


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
    """Place the model that a config describes on its mesh, for evaluation and generation without a train step.

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
    mesh = mesh_for(parallelism, mesh)
    layout = make_layout(model, task, mesh, parallelism, rules)
    stage_schedule(model, mesh, parallelism, 1)  # for its errors
    return place_model(
        model,
        layout,
        get_policy(policy),
        trainable=trainable,
        max_replicated_fraction=parallelism.max_replicated_fraction,
    )


# --- The mesh, the layout and the pipeline that options give. ---


def mesh_for(parallelism: Parallelism, mesh: Mesh | None) -> Mesh:
    """Return the mesh of a step: the one that is given, or one of the degrees.

    Raises:
        ConfigError: degrees that are set differ from those of the mesh, or are left to the planner.
    """
    if parallelism.auto:
        raise ConfigError("parallel.auto lets the planner choose degrees for a config; set them, or give mesh=")
    degrees = config_degrees(parallelism)
    if mesh is None:
        return make_mesh(**degrees, devices=None)
    for axis in AXES:
        if axis in parallelism.model_fields_set and degrees[axis] not in ("auto", mesh.shape[axis]):
            raise ConfigError(
                f"parallel.{axis}={degrees[axis]}, but the mesh has {axis}={mesh.shape[axis]}; leave {axis} out of "
                "parallelism, or make the mesh with it"
            )
    return mesh


def make_layout(
    model: Model, task: Task | None, mesh: Mesh, parallelism: Parallelism, rules: Mapping[str, tuple[str, ...]] | None
) -> Layout:
    """Return the layout of a model on a mesh, with `rules` added to `DEFAULT_RULES`.

    Raises:
        ConfigError: an axis or option that this model or task (None: not checked) cannot use.
    """
    check_zero(mesh.shape, parallelism.zero)
    check_model_axes(
        mesh.shape,
        model=model.name,
        task="" if task is None else task.name,
        has_parts=model.parts is not None,
        has_sequence=task is None or any("sequence" in row for row in task.batch_axes.values()),
        has_experts=model.has_experts and any("experts" in row for row in model.axes.values()),
    )
    if task is not None:
        check_task_stages(mesh.shape, task=task.name, calls_model=task.calls_model, rows=task.rows)
    chosen = {**DEFAULT_RULES, **(rules or {})}
    for name, axes in chosen.items():
        for axis in axes:
            if axis not in mesh.shape:
                raise ConfigError(f"rules: {name!r} goes to mesh axis {axis!r}; the axes are {', '.join(mesh.shape)}")
    if parallelism.sequence_parallel:
        chosen["residual_sequence"] = sequence_axes(sequence_parallel=True)
    return Layout(
        mesh,
        model.axes,
        chosen,
        stack=None if model.parts is None else model.parts.stack,
        context_attention=parallelism.context_attention,
        state_axes=zero_axes(parallelism.zero),
    )


def stage_schedule(model: Model, mesh: Mesh, parallelism: Parallelism, microbatches: int) -> Schedule | None:
    """Return which stage does what when, for this number of microbatches; None: the mesh has one stage.

    Raises:
        ConfigError: layers that do not divide over the stages, or two numbers of microbatches.
    """
    num_layers = None if model.parts is None else model.parts.num_layers
    return pipeline_schedule(parallelism, mesh.shape["pipe"], num_layers, microbatches)


def make_pipeline(sharded_model: ShardedModel, schedule: Schedule | None, *, zero: int = 0) -> Pipeline | None:
    """Return the pipeline that runs a schedule; None: there is none.

    `zero` is the ZeRO stage over `data` of a step, see `DataReduction`.
    """
    parts = sharded_model.model.parts
    if schedule is None or parts is None:
        return None
    return Pipeline(schedule, sharded_model.layout, parts.stack, parts.num_layers, zero=zero)


# --- The parts that a config describes. ---


def _configured_model(
    config: Config,
    *,
    input_shape: tuple[int, ...],
    vocab_size: int | None,
    num_outputs: int | None,
    model: Model | None,
    skip: Sequence[str] = (),
) -> Model:
    """Return the model of a config, or your own one in its place, with the adapters of the config."""
    is_shipped = model is None and not isinstance(config.model, CalledModel)
    remat = config.remat
    if model is None:
        model = build_model(
            config.model,
            input_shape=input_shape,
            vocab_size=vocab_size,
            num_outputs=num_outputs,
            remat=remat if is_shipped else None,
        )
    # A model from Python has a policy of its own; a group `remat` with the defaults asks for nothing.
    if not is_shipped and remat not in (model.remat, KEEP_ALL, Remat()):
        raise ConfigError(
            f"remat.policy={remat.policy} does not apply to a model from Python; build {model.name} with "
            "from_stages(remat=...), build_model(remat=...) or jax.checkpoint (nnx.remat, nn.remat) inside it"
        )
    return _with_adapters(config, model, skip)


def _with_adapters(config: Config, model: Model, skip: Sequence[str]) -> Model:
    """Return the model with the adapters of a config, and its frozen kernels in the format of the config.

    Parameters that match `skip` are drawn although others are given: they are trained too.
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
        for pattern in (*fresh_parts(config.model), *skip)
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
