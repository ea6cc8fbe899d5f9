"""Making a train step: what the user gives is checked, and placed on the mesh."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import optax
from jax.sharding import Mesh

from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.model import Model
from jaxtrain.models.sharded import place_model
from jaxtrain.models.task import Task
from jaxtrain.models.tasks import named_task
from jaxtrain.optim.rate import rate_of
from jaxtrain.precision.policy import LossScaling, Policy, check_sums, get_policy
from jaxtrain.runtime.compiler import Value, choose_options
from jaxtrain.train.checks import check_options, check_parts
from jaxtrain.train.model_checks import check_trainable
from jaxtrain.train.option_checks import check_settings
from jaxtrain.train.parallelism import Parallelism, check_placement, make_layout, make_pipeline
from jaxtrain.train.program import StepProgram
from jaxtrain.train.separate_rows import check_rows_of
from jaxtrain.train.spikes import SpikeRule
from jaxtrain.train.step import TrainStep
from jaxtrain.train.update import StepSettings


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
    """A train step for any model, task and optimizer, on any mesh.

    Args:
        model: from `from_nnx`, `from_linen`, `from_stages`, `from_functions`, or a shipped one.
        task: what outputs are compared with; or its name: "classification", "mae".
        optimizer: any optax transformation, already made with its learning rate.
        mesh: from `make_mesh`; None: all devices on the `data` axis.
        policy: number formats: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        accumulation_steps: microbatches per step; results equal those of one large batch, except that batch
            statistics are those of each (global) microbatch.
        clip_norm: largest global norm of the gradient; None: no clipping.
        ema_decay: keep a moving average of the parameters and of model_state (batch statistics); evaluation uses the
            average. The decay after t updates is min(ema_decay, (1 + t) / (10 + t)).
        trainable: parameter path -> whether it is trained, True for some and False for others; None: all are, or of
            an adapted model its adapters.
        learning_rate: the rate that the metrics show, which does not change the optimizer; None: that of the optimizer,
            where it can be read from its chain or from `optax.inject_hyperparams`.
        loss_scaling: how the fp16 loss scale moves.
        rules: logical axes -> mesh axes, added to `jaxtrain.layout.rules.DEFAULT_RULES`; a rule of the same name
            replaces the default.
        parallelism: ZeRO stage, pipeline schedule, kind of context attention; None: the defaults.
        compiler_options: options for XLA; each replaces the one of `jaxtrain/runtime/compiler.py`.
        offload_optimizer: keep the arrays of the optimizer state in the host's memory between steps.
        spikes: when a finite step leaves the state as it was, as one that is not finite does; None: never.

    Returns:
        A `TrainStep`.

    Raises:
        ConfigError: sizes that the mesh does not divide, too many replicated bytes, or a setting that would have no
            effect on this model.

    Example:
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3), clip_norm=1.0)
        >>> state = step.init(0)
        >>> state, metrics = step(state, {"inputs": np.ones((8, 4), np.float32), "targets": np.arange(8) % 3})
    """
    task = named_task(task)
    check_parts(model, task, optimizer)
    check_options(accumulation_steps, clip_norm, ema_decay, trainable)
    check_placement(mesh, rules, of="make_train_step")
    check_settings(learning_rate, loss_scaling)
    if trainable is None and model.adapted is not None and model.adapted.lora is not None:
        trainable = model.adapted.trains
    mesh = make_mesh() if mesh is None else mesh
    parallelism = parallelism or Parallelism()
    layout = make_layout(model, task, mesh, parallelism, rules)
    policy = get_policy(policy)
    check_sums(policy, mesh, backward=True)
    if learning_rate is not None and not callable(learning_rate):
        learning_rate = optax.constant_schedule(learning_rate)
    settings = StepSettings(
        accumulation_steps=accumulation_steps,
        clip_norm=None if clip_norm == math.inf else clip_norm,
        ema_decay=ema_decay,
        trainable=trainable,
        learning_rate=learning_rate or rate_of(optimizer),
        loss_scaling=loss_scaling or LossScaling(),
        parallelism=parallelism,
        offload_optimizer=offload_optimizer,
        sliced_norm=mesh.size == 1 and mesh.devices.flat[0].platform == "cpu",
        spikes=spikes,
    )
    check_rows_of(task, accumulation_steps)
    pipeline = make_pipeline(model, layout, parallelism, accumulation_steps)
    updates = mesh.size == 1 or model.convolutional
    compiled_with = choose_options(
        mesh.devices.flat[0],
        mesh.size,
        compiler_options,
        updates=updates,
        axes=[axis for axis, size in mesh.shape.items() if size > 1],
    )
    sharded_model = place_model(
        model, layout, policy, trainable=trainable, max_replicated_fraction=parallelism.max_replicated_fraction
    )
    check_trainable(sharded_model.abstract_params, trainable)
    if pipeline is not None:
        pipeline = replace(pipeline, layout=sharded_model.layout)
    return TrainStep(StepProgram(sharded_model, task, optimizer, settings, pipeline), compiled_with)
