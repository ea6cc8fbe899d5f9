"""The train step: one pure function over a sharded state, compiled once and used by trainer, planner and tests."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.layout.sharding import Layout
from jaxtrain.models.model import Model, ModelState, Params
from jaxtrain.models.sharded import with_sharding
from jaxtrain.models.task import Batch
from jaxtrain.parallel.stage import check_branches
from jaxtrain.precision.policy import Policy
from jaxtrain.runtime.compiler import CompilerOptions, record_choices
from jaxtrain.runtime.host import give_back_free_memory
from jaxtrain.train import given_state
from jaxtrain.train.batch import BatchFeed, BatchSource
from jaxtrain.train.checks import random_key
from jaxtrain.train.first_state import FirstState
from jaxtrain.train.given_params import path_given
from jaxtrain.train.gradient_program import compile_gradients
from jaxtrain.train.optimizer_arguments import check_optimizer_state
from jaxtrain.train.option_checks import check_compiled
from jaxtrain.train.parallelism import microbatches
from jaxtrain.train.placement import state_on_host, state_shardings
from jaxtrain.train.program import StepProgram, create_state, first_optimizer_state, take_step
from jaxtrain.train.separate_rows import check_separate_rows
from jaxtrain.train.start import accept_start
from jaxtrain.train.state import TrainState
from jaxtrain.train.update import MeanGradients, Metrics


class TrainStep:
    """A train step on a mesh: `state, metrics = step(state, batch)`.

    Built by `make_train_step`. Calling it compiles on first use; `compile` does so ahead of time, after which a
    batch of another shape is an error instead of a silent second compilation. The state passed in is donated.

    Attributes:
        program: what the step is made of, and what its pure functions take.
        sharded_model: the model, its layout on the mesh and its number formats.
        task: what outputs are compared with.
        optimizer: the transformation that updates the trained parameters.
        pipeline: schedule of the stages; None: the mesh has one.
        feed: how batches reach the mesh.
        abstract_state: a `TrainState` of `ShapeDtypeStruct`s with their shardings: the target to restore into.
        state_shardings: those shardings.
        state_on_host: a `TrainState` that says of each array whether it is kept in the host's memory.
        compiler_options: what every program of the step is compiled with.
        initial_state: what is remembered of the last state from `init`.
        last_state: gives the state that the last step returned, or None once that is gone.
        choices: what was chosen when the program that runs was traced, and why, one line per operation ("attention:
            cudnn"); empty before `compile`, `use` or the first step.

    Example:
        >>> step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3))
        >>> compiled = step.compile(batches.spec())  # ahead of time; another shape is an error from then on
        >>> state = step.init(0)
        >>> for batch in jt.prefetch(step.loader(batches), 0, 2):
        ...     state, metrics = step(state, batch)
        >>> sorted(metrics)
        ['accuracy', 'grad_norm', 'learning_rate', 'loss', 'skipped_in_a_row', 'skipped_steps', 'weight']
    """

    def __init__(self, program: StepProgram, compiler_options: CompilerOptions):
        self.program = program
        self.sharded_model, self.task, self.optimizer = program.sharded_model, program.task, program.optimizer
        self.pipeline = program.pipeline
        divided = microbatches(program.pipeline, program.settings.accumulation_steps)
        self.feed = BatchFeed(self.sharded_model, self.task, divided)
        self.compiler_options = compiler_options

        def create(key: jax.Array, *, params: Any = None, model_state: Any = None) -> TrainState:
            return create_state(program, key, params=params, model_state=model_state)

        # One function for both uses: jax then traces it once.
        shapes = jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)))
        check_optimizer_state(shapes.optimizer_state)
        offload = program.settings.offload_optimizer
        self.state_shardings: TrainState = state_shardings(shapes, self.sharded_model, offload_optimizer=offload)
        self.state_on_host: TrainState = state_on_host(shapes, offload_optimizer=offload)
        self.abstract_state: TrainState = jax.tree.map(with_sharding, shapes, self.state_shardings)
        self._first_state = FirstState(create, self.abstract_state, self.state_shardings)
        self._jitted = self._make_jitted()
        self._find_gradients = compile_gradients(program, self.state_shardings, compiler_options)
        self._compiled: jax.stages.Compiled | None = None
        self._compiled_for: given_state.LeafShapes = {}
        # Emulated devices share a small thread pool: with several steps in flight, devices of a later step can hold
        # all threads while an earlier one still waits in a collective, and XLA aborts after 40 s (jax 0.10.2, 0.12.0).
        self._one_at_a_time = self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"
        self._last_metrics: Metrics = {}
        self._checked_rows = False
        self._has_run = False
        self.choices: tuple[str, ...] = ()
        self.last_state: Callable[[], TrainState | None] = lambda: None  # weak: a step keeps no state alive
        self.initial_state: given_state.InitialState | None = None

    def __repr__(self) -> str:
        compiled = "" if self._compiled is None else ", compiled"
        return f"TrainStep of {self.model.name!r} for {self.task.name!r}: {self.sharded_model.summary}{compiled}"

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self.sharded_model.model

    @property
    def mesh(self) -> Mesh:
        """The mesh that the step runs on."""
        return self.sharded_model.mesh

    @property
    def layout(self) -> Layout:
        """The layout of the model on the mesh."""
        return self.sharded_model.layout

    @property
    def policy(self) -> Policy:
        """The number formats of the step."""
        return self.sharded_model.policy

    def init(
        self,
        seed: int | jax.Array,
        *,
        params: Params | str | os.PathLike[str] | None = None,
        model_state: ModelState | None = None,
        skip: Sequence[str] = (),
        adapter: str | Path | None = None,
    ) -> TrainState:
        """The state at step 0, created sharded: the same numbers on every mesh.

        Moving average and optimizer state are made from the parameters, whichever these are.

        Args:
            seed: an int or a typed key.
            params: parameters to start from; None: what `model.init` draws. A tree of jax or NumPy arrays like that of
                `model.init`, on any devices, in the dtypes of `model.init` or of the state. Or the path of a run
                ("runs/x"), of its `checkpoints` folder, or of one step in it ("runs/x/checkpoints/400"): its newest
                intact step, or that one, is read straight into the shardings of this step. Of a run with a moving
                average (`ema_decay`) the average is taken where a parameter has one, else what its optimizer keeps for
                evaluation (Lookahead, schedule-free); its model_state comes along. What `open_run` and `fit` return
                stands for the path of its run, or of the step that was opened.
            model_state: batch statistics and the like to start from, a tree like that of `model.init`; None: those of
                the run in `params`, else those of `model.init`.
            skip: patterns of paths of parameters (and of model_state), with `*`, that are not taken from what is given
                but drawn: `["head/*"]` for another number of classes.
            adapter: folder of an adapter (see `load_adapter`) whose factors an adapted model starts from, over the
                published model that `params` names; None: adapters that begin at 0.

        Raises:
            ConfigError: another structure, shape or dtype, or a pattern that matches nothing; names the first path
                that differs, and the pattern to write.
            CheckpointError: no checkpoint at that path, or none that is intact.

        Example:
            >>> state = step.init(0, params="runs/pretrained", skip=["head/*"])
        """
        key = random_key(seed, self.abstract_state.key)
        trains = self.program.settings.trainable
        start = accept_start(
            path_given(params), model_state, skip, sharded_model=self.sharded_model, trains=trains, adapter=adapter
        )
        state = self._first_state(key, start)
        give_back_free_memory()  # what reading took beside the arrays
        self.initial_state = given_state.remember(state, reads_parameters=self._optimizer_reads_parameters)
        return state

    def _optimizer_reads_parameters(self) -> bool:
        return given_state.reads_numbers(
            lambda params: first_optimizer_state(self.program, params), self.abstract_state.params
        )

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """How a batch (arrays or shapes, global) is sharded: rows over the batch axes; scalars are replicated.

        Raises:
            ConfigError: no entry `inputs`, or a batch that does not divide by the devices or by the microbatches.
        """
        return self.feed.shardings(batch)

    def loader(self, batches: BatchSource) -> Callable[[int], dict[str, Any]]:
        """k -> batch k on the mesh, for `prefetch`; each process reads only the rows of its own devices.

        Loading raises a `DataError` where a row holds an id that the model does not have.
        """
        return self.feed.loader(batches)

    def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of host arrays, numbers or arrays elsewhere, on the mesh.

        Raises:
            ConfigError: no dict with `inputs`, or sizes that do not divide.
            DataError: a host array with an id that the model does not have.
        """
        return self.feed.place(batch)

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Trace and lower for a batch of these global shapes (arrays or `ShapeDtypeStruct`s).

        The step itself does not change: `compile` or `use` makes it run a program. What is chosen in tracing is
        collected by `record_choices` around this call.

        Raises:
            ConfigError: a batch that does not fit, or something asked of the model that shows in tracing.
        """
        return self.trace(batch).lower()

    def trace(self, batch: Mapping[str, Any]) -> jax.stages.Traced:
        """Trace as `lower` does, which it begins: the equations of the step, in `jaxpr`.

        Raises:
            ConfigError: as for `lower`.
        """
        shardings = self.batch_shardings(batch)
        specs = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, _on_device(leaf.dtype), sharding=sharding),
            dict(batch),
            shardings,
        )
        self._check_rows(batch)
        # A function of its own, so that it is traced, and choices are reported, whatever was traced before.
        return self._make_jitted().trace(self.abstract_state, specs)

    def compile(self, batch: Mapping[str, Any]) -> jax.stages.Compiled:
        """Compile for a batch of these global shapes and keep the result: later calls run exactly this program.

        Where the mesh has devices of all of several processes, every process calls it: all take the same program.
        """
        with record_choices() as choices:
            lowered = self.lower(batch)
        return self.use(lowered.compile(), choices=choices)

    def use(self, compiled: jax.stages.Compiled, *, choices: Sequence[str] | None = None) -> jax.stages.Compiled:
        """Make later calls run this compiled program (the result of `lower(batch).compile(...)`).

        Args:
            compiled: takes a state and a batch.
            choices: what `record_choices` collected while it was lowered; None: `choices` of the step stays.

        Raises:
            ConfigError: something that is no compiled step, or a pipeline stage that would wait for other stages for
                ever.
        """
        check_compiled(compiled)
        if self.pipeline is not None:
            check_branches(compiled.as_text() or "", self.layout)
        arguments, _ = compiled.args_info
        self._compiled, self._compiled_for = compiled, given_state.leaf_shapes(arguments[1])
        give_back_free_memory()
        self.choices = self.choices if choices is None else tuple(choices)
        return compiled

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step.

        Args:
            state: donated; do not use it afterwards. Arrays elsewhere (NumPy, other devices) are placed.
            batch: leaves [global batch, ...]; host arrays, and arrays that are sharded in another way, are placed on
                the mesh.

        Returns:
            The new state, and scalars: `loss`, `grad_norm`, `weight`, `skipped_steps`, `skipped_in_a_row`, the
            task's metrics, `learning_rate` and `loss_scale` where there is one.

        Raises:
            ConfigError: a state or batch that was donated before, or that does not fit this step.
        """
        state, batch = self._accept(state, batch)
        if self._compiled is not None:
            given_state.check_batch_shapes(batch, self._compiled_for)
        if self._compiled is None and self.pipeline is not None:
            self.compile(batch)  # checked, as a program compiled on the way would not be
        if self._compiled is not None:
            new_state, self._last_metrics = self._compiled(state, batch)
        else:
            self._check_rows(batch)
            with record_choices() as choices:
                if not self._has_run:
                    # The call below finds this program; what compiling took is given back before it runs.
                    self._jitted.trace(state, batch).lower().compile()
                    give_back_free_memory()
                new_state, self._last_metrics = self._jitted(state, batch)
            self.choices = tuple(choices) or self.choices  # only a call that traces makes any
        self._has_run = True
        self.last_state = weakref.ref(new_state)
        return new_state, self._last_metrics

    def gradients(self, state: TrainState, batch: Batch) -> MeanGradients:
        """The mean gradients of a batch, which the next step would give to the optimizer; nothing is updated.

        They are those of the same random numbers, over all microbatches, without loss scale and before clipping.
        Compiled at the first call for a shape of batch.

        Args:
            state: not donated; it stays valid.
            batch: leaves [global batch, ...]; host arrays are placed on the mesh.

        Returns:
            Gradients like the trained parameters and sharded as they are, float32, with loss, weight and metrics.

        Raises:
            ConfigError: a state or batch that was donated before, or that does not fit this step.

        Example:
            >>> found = step.gradients(state, batch)
            >>> norm = optax.tree.norm(found.tree)
        """
        state, batch = self._accept(state, batch)
        self._check_rows(batch)
        found = self._find_gradients(state, batch)
        if self._one_at_a_time:
            jax.block_until_ready(found)
        return found

    def _check_rows(self, batch: Mapping[str, Any]) -> None:
        """Raise where microbatches would change the loss in silence; tried once."""
        if not self._checked_rows:
            check_separate_rows(self.program, batch)
            self._checked_rows = True

    def _accept(self, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """State and batch on the mesh, once they are known to fit and no other step is in flight that must not be."""
        state = given_state.accept_state(
            state, wanted=self.abstract_state, initial=self.initial_state, last=self.last_state()
        )
        self.feed.check(batch)
        given_state.check_batch_not_deleted(batch)
        if not self.feed.is_placed(batch):
            batch = self.place(batch)
        if self._one_at_a_time:
            jax.block_until_ready(self._last_metrics)
        return state, batch

    def _make_jitted(self) -> Any:
        program = self.program

        def _step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, Metrics]:
            return take_step(program, state, batch)

        return jax.jit(
            _step,
            donate_argnums=0,
            out_shardings=(self.state_shardings, NamedSharding(self.mesh, PartitionSpec())),
            compiler_options={**self.compiler_options.used} or None,
        )


def _on_device(dtype: Any) -> Any:
    """The dtype that a host array gets on a device: int32 for NumPy's int64, unless JAX is told to keep 64 bits."""
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
