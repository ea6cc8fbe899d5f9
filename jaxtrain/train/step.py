"""The train step: one pure function over a sharded state, compiled once and used by trainer, planner and tests."""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import Layout, gather_parameters
from jaxtrain.models.model import Apply, Model, PartsApply, key_for
from jaxtrain.models.tasks import Batch, Task, divisor, task_sums
from jaxtrain.optim.offload import to_host
from jaxtrain.parallel.division import microbatches_by_name
from jaxtrain.parallel.gradients import compute_gradients
from jaxtrain.parallel.stage import Pipeline, check_branches
from jaxtrain.precision.policy import LossScale, LossScaling, Policy, cast_floats, get_policy
from jaxtrain.runtime.choices import record_choices
from jaxtrain.runtime.compiler_options import CompilerOptions, Value, choose_options
from jaxtrain.train import given_state
from jaxtrain.train.batch import BatchSource, batch_shardings, id_limits, is_placed
from jaxtrain.train.checks import check_batch, check_ids, check_options, check_parts, random_key
from jaxtrain.train.context import step_context
from jaxtrain.train.model_checks import check_axes, check_compute_dtype, check_trainable
from jaxtrain.train.parallelism import Parallelism, make_layout, make_pipeline
from jaxtrain.train.pipelined import step_gradients
from jaxtrain.train.placement import state_on_host, state_shardings
from jaxtrain.train.state import SkippedSteps, TrainState, floating_leaves, merge_leaves, select_leaves
from jaxtrain.train.update import Metrics, StepSettings, update_state


class TrainStep:
    """A train step on a mesh: `state, metrics = step(state, batch)`.

    Built by `make_train_step`. Calling it compiles on first use; `compile` does so ahead of time, after which a
    batch of another shape is an error instead of a silent second compilation. The state passed in is donated.

    Attributes:
        mesh: the mesh it runs on.
        abstract_state: a `TrainState` of `ShapeDtypeStruct`s with their shardings: the target to restore into.
        state_on_host: a `TrainState` that says of each array whether it lies in the host's memory.
        optimizer: the transformation that updates the trained parameters.
        compiler_options: what every program of the step is compiled with, however it comes about.
        initial_state: what is remembered of the last state from `init`.
        last_state: gives the state that the last step returned, or None once that is gone.
        choices: what was chosen when the step was lowered, and why: a line an operation ("attention: cudnn").
        generators: jitted text generation by what it was made for, kept here so that it lives as long as the step.
    """

    def __init__(
        self,
        model: Model,
        task: Task,
        optimizer: optax.GradientTransformation,
        layout: Layout,
        settings: StepSettings,
        pipeline: Pipeline | None,
        compiler_options: CompilerOptions,
    ):
        self.model, self.task, self.mesh = model, task, layout.mesh
        self.policy = settings.policy
        self.layout, self.pipeline = layout, pipeline
        self.compiler_options = compiler_options
        self._settings = settings
        self.optimizer = optimizer
        create = self._create  # one object for both uses: jax then traces it once
        shapes = jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))
        check_axes(shapes.params, model, layout)
        check_trainable(shapes.params, settings.trainable)
        self.state_shardings: TrainState = state_shardings(
            shapes, layout, settings.parallelism, offload_optimizer=settings.offload_optimizer
        )
        self.state_on_host: TrainState = state_on_host(shapes, offload_optimizer=settings.offload_optimizer)
        self.abstract_state: TrainState = jax.tree.map(
            lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
            shapes,
            self.state_shardings,
        )
        whole = NamedSharding(self.mesh, PartitionSpec())
        self._jitted = jax.jit(
            self._step,
            donate_argnums=0,
            out_shardings=(self.state_shardings, whole),
            compiler_options={**compiler_options.used} or None,
        )
        self._initialize = jax.jit(create, out_shardings=self.state_shardings)
        self.choices: tuple[str, ...] = ()
        self.generators: dict[Hashable, Callable[..., jax.Array]] = {}
        self._compiled: jax.stages.Compiled | None = None
        self._batch_spec: dict[str, tuple[tuple[int, ...], str]] = {}
        # Emulated devices share a small thread pool: with several steps in flight, devices of a later step can hold
        # all threads while an earlier one still waits in a collective, and XLA aborts after 40 s (jax 0.10.2, 0.12.0).
        self._one_at_a_time = self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"
        self._last_metrics: Metrics = {}
        self._id_limits: dict[str, int] | None = None
        schedule = None if pipeline is None else pipeline.schedule
        self._microbatches = microbatches_by_name(schedule, settings.accumulation_steps)
        self.last_state: Callable[[], TrainState | None] = lambda: None  # weak: a step keeps no state alive
        self.initial_state: given_state.InitialState | None = None

    def init(self, seed: int | jax.Array, *, params: Any = None, model_state: Any = None) -> TrainState:
        """The state at step 0, created sharded: the same numbers on every mesh.

        Moving average and optimizer state are made from the parameters, whichever these are.

        Args:
            seed: an int or a typed key.
            params: parameters to start from: a tree of jax or NumPy arrays like that of `model.init`, wherever they
                lie, in the dtypes of `model.init` or of the state; None: what `model.init` draws.
            model_state: batch statistics and the like to start from, in the same form; None: those of `model.init`.

        Raises:
            ConfigError: another structure, shape or dtype; names the first path that differs.
        """
        key = random_key(seed, self.abstract_state.key)
        state = self._initialize(key, **given_state.accept_parts(self, params, model_state))
        self.initial_state = given_state.remember(state)
        return state

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """How a batch (arrays or shapes, global) is sharded: rows over the batch axes; scalars are replicated.

        Raises:
            ConfigError: no entry `inputs`, or a batch that does not divide by the devices or by the microbatches.
        """
        check_batch(batch)
        return batch_shardings(batch, self.layout, self.task.batch_axes, self._microbatches)

    def loader(self, batches: BatchSource) -> Callable[[int], dict[str, Any]]:
        """k -> batch k on the mesh, for `prefetch`; each process reads only the rows of its own devices.

        Loading raises a `DataError` where a row holds an id that the model does not have.
        """
        spec = batches.spec()
        shardings, limits = self.batch_shardings(spec), self._limits(spec)

        def load(k: int) -> dict[str, Any]:
            return batches.load(k, shardings, check=functools.partial(check_ids, limits=limits, where=f"batch {k}"))

        return load

    def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of host arrays, numbers or arrays elsewhere, on the mesh.

        Raises:
            ConfigError: no dict with `inputs`, or sizes that do not divide.
            DataError: a host array with an id that the model does not have.
        """
        check_batch(batch)
        batch = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf), dict(batch))
        shardings = self.batch_shardings(batch)
        check_ids(batch, limits=self._limits(batch), where="the batch")
        return jax.device_put(batch, shardings)

    def _limits(self, batch: Mapping[str, Any]) -> dict[str, int]:
        """Entry of a batch -> number of ids it may hold, where that is known."""
        if self._id_limits is None:
            with self.context():
                self._id_limits = id_limits(self.model, self.task, self.apply_model, self.abstract_state, batch)
        return self._id_limits

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Trace and lower for a batch of these global shapes (arrays or `ShapeDtypeStruct`s)."""
        specs = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            dict(batch),
            self.batch_shardings(batch),
        )
        self._batch_spec = given_state.leaf_shapes(specs)
        with record_choices() as choices:
            lowered = self._jitted.lower(self.abstract_state, specs)
        # Nothing is chosen anew for shapes that were traced before.
        self.choices = tuple(choices) or self.choices
        return lowered

    def compile(self, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        """Compile for a batch of these global shapes and keep the result: later calls run exactly this program."""
        return self.use(self.lower(batch).compile())

    def use(self, compiled: jax.stages.Compiled) -> jax.stages.Compiled:
        """Run this compiled program from now on (the result of `lower(batch).compile(...)`).

        Raises:
            ConfigError: a pipeline stage that would wait for other stages for ever.
        """
        if self.pipeline is not None:
            check_branches(compiled.as_text() or "", self.layout)
        self._compiled = compiled
        return compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step.

        Args:
            state: donated; do not use it afterwards. Arrays that lie elsewhere (NumPy, other devices) are placed.
            batch: leaves [global batch, ...]; host arrays are placed on the mesh.

        Returns:
            The new state, and scalars: `loss`, `grad_norm`, `weight`, `skipped_steps`, `skipped_in_a_row`, the
            task's metrics, `learning_rate` and `loss_scale` where there is one.

        Raises:
            ConfigError: a state or batch that was donated before, or that does not fit this step.
        """
        state = given_state.accept_state(state, self)
        given_state.check_batch_not_deleted(batch)
        if not is_placed(batch, self.mesh):
            batch = self.place(batch)
        if self._compiled is not None:
            given_state.check_batch_shapes(batch, self._batch_spec)
        if self._compiled is None and self.pipeline is not None:
            self.compile(batch)  # checked, as a program compiled on the way would not be
        run = self._jitted if self._compiled is None else self._compiled
        if self._one_at_a_time:
            jax.block_until_ready(self._last_metrics)
        new_state, self._last_metrics = run(state, batch)
        self.last_state = weakref.ref(new_state)
        return new_state, self._last_metrics

    def _create(self, key: jax.Array, *, params: Any = None, model_state: Any = None) -> TrainState:
        settings = self._settings
        init_key, run_key = jax.random.split(key)
        drawn = given_state.to_arrays(self.model.init(init_key))
        params = drawn[0] if params is None else params
        model_state = drawn[1] if model_state is None else model_state
        trained = select_leaves(params, settings.trainable)
        averaged = settings.ema_decay is not None
        ema = cast_floats(trained, jnp.float32) if averaged else None
        # Frozen parameters keep the dtype that they came in: they may be quantized.
        trained = cast_floats(trained, settings.policy.param_dtype)
        params = merge_leaves(trained, params)
        optimizer_state = self.first_optimizer_state(params)
        return TrainState(
            step=jnp.int32(0),
            params=params,
            optimizer_state=to_host(optimizer_state) if settings.offload_optimizer else optimizer_state,
            model_state=model_state,
            loss_scale=LossScale.create(settings.loss_scaling) if settings.policy.loss_scaled else None,
            key=run_key,
            skipped=SkippedSteps(jnp.int32(0), jnp.int32(0)),
            ema=ema,
            ema_model_state=floating_leaves(model_state) if averaged else None,
        )

    def first_optimizer_state(self, params: Any) -> Any:
        """The optimizer's state at step 0, of the parameters that are trained."""
        # In float32 under every policy: gradients come in float32, and a second moment in bf16 would stand still.
        return self.optimizer.init(cast_floats(select_leaves(params, self._settings.trainable), jnp.float32))

    def apply_model(
        self, params: Any, model_state: Any, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        """The model in the compute dtype, its parameters gathered from their `fsdp` shards."""
        return self._apply(self.model.apply, params, model_state, inputs, key=key, train=train)

    def apply_for_loss(
        self, params: Any, model_state: Any, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        """The same for the task's loss: with `DeferredLogits` in place of logits where model and task know them."""
        apply = self.model.apply
        if self.task.takes_deferred_logits and isinstance(apply, PartsApply):
            apply = apply.deferred
        return self._apply(apply, params, model_state, inputs, key=key, train=train)

    def _apply(
        self, apply: Apply, params: Any, model_state: Any, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        compute = self.policy.compute_dtype
        params = gather_parameters(cast_floats(params, compute), skip=self.model.gathers_itself)
        key = key_for(self.model.apply, key)
        return apply(params, model_state, cast_floats(inputs, compute), key=key, train=train)

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Layout and number formats for whatever is traced inside."""
        return step_context(self.layout, self.policy)

    def _step(self, state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, Metrics]:
        with step_context(self.layout, self.policy, required_of=self.model.name):
            count = sum(self._microbatches.values())
            check_compute_dtype(self.apply_model, state, batch["inputs"], self.model, self.policy, count)
            return self._traced_step(state, batch)

    def _traced_step(self, state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, Metrics]:
        settings = self._settings
        trained = select_leaves(state.params, settings.trainable)
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale

        def loss(
            trained: Any, fixed: tuple[Any, jax.Array], model_state: Any, rows: Batch, key: jax.Array
        ) -> tuple[jax.Array, Any]:
            frozen, scale = fixed
            params = merge_leaves(trained, frozen)
            outputs, model_state = self.apply_for_loss(params, model_state, rows["inputs"], key=key, train=True)
            with jax.named_scope("loss"):
                loss_sum, weight, metrics = task_sums(self.task, outputs, rows, train=True)
            weight = jax.lax.stop_gradient(weight)
            return loss_sum / divisor(weight) * scale, (loss_sum, weight, model_state, metrics)

        step_key = jax.random.fold_in(state.key, state.step)
        if self.pipeline is not None:
            parts = (self.pipeline, self.model, self.task, self.policy)
            gradients = step_gradients(*parts, trained, state.params, batch, step_key, scale=scale, zero=settings.zero)
        else:
            gradients = compute_gradients(
                loss,
                trained,
                (state.params, scale),
                state.model_state,
                batch,
                step_key,
                accumulation_steps=settings.accumulation_steps,
                layout=self.layout,
                zero=settings.zero,
            )
        with jax.named_scope("optimizer"):
            return update_state(
                state, trained, gradients, scale, optimizer=self.optimizer, layout=self.layout, settings=settings
            )


def make_train_step(
    model: Model,
    task: Task,
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
) -> TrainStep:
    """A train step for any model, task and optimizer, on any mesh.

    Args:
        model: from `from_nnx`, `from_linen`, `from_functions`, or a shipped one.
        task: what outputs are compared with.
        optimizer: any optax transformation; its learning rate is inside it.
        mesh: from `make_mesh`; None: all devices on the `data` axis.
        policy: number formats: fp32, tf32, bf16, bf16_pure, fp16 or fp8.
        accumulation_steps: microbatches a step; results equal those of the whole batch at once, except that batch
            statistics are those of each (global) microbatch.
        clip_norm: largest global norm of the gradient; None: no clipping.
        ema_decay: keep a moving average of the parameters and of model_state (batch statistics), which is evaluated.
            After t updates the decay is (1 + t) / (10 + t), at most this.
        trainable: parameter path -> whether it is trained, True for some and False for others; None: all are.
        learning_rate: only reported, as `learning_rate` in the metrics.
        loss_scaling: how the fp16 loss scale moves.
        rules: logical axes -> mesh axes, beside or in place of those of `rules.DEFAULT_RULES`.
        parallelism: ZeRO stage, pipeline schedule, kind of context attention; None: the defaults.
        compiler_options: over those of `jaxtrain/runtime/compiler_options.py`.
        offload_optimizer: keep the arrays of the optimizer state in the host's memory between steps.

    Returns:
        A `TrainStep`.

    Raises:
        ConfigError: sizes that do not divide by the mesh, too many replicated bytes, or something that is asked of the
            model and would do nothing.

    Example:
        >>> step = make_train_step(model, classification(), optax.adamw(1e-3))
        >>> state = step.init(0)
        >>> state, metrics = step(state, {"inputs": images, "targets": labels})
    """
    check_parts(model, task, optimizer)
    check_options(accumulation_steps, clip_norm, ema_decay, trainable)
    mesh = make_mesh() if mesh is None else mesh
    parallelism = parallelism or Parallelism()
    layout = make_layout(model, task, mesh, parallelism, rules)
    settings = StepSettings(
        policy=get_policy(policy),
        accumulation_steps=accumulation_steps,
        clip_norm=None if clip_norm == math.inf else clip_norm,
        ema_decay=ema_decay,
        trainable=trainable,
        learning_rate=learning_rate if learning_rate is None or callable(learning_rate) else lambda _: learning_rate,
        loss_scaling=loss_scaling or LossScaling(),
        parallelism=parallelism,
        offload_optimizer=offload_optimizer,
    )
    pipeline = make_pipeline(model, layout, parallelism, accumulation_steps)
    compiled_with = choose_options(mesh.devices.flat[0], mesh.size, compiler_options)
    return TrainStep(model, task, optimizer, layout, settings, pipeline, compiled_with)
