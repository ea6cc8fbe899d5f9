"""The train step: one pure function over a sharded state, compiled once and used by trainer, planner and tests."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import Layout
from jaxtrain.models.model import Model, ModelState, Params
from jaxtrain.models.sharded import with_sharding
from jaxtrain.models.task import Batch
from jaxtrain.parallel.stage import check_branches
from jaxtrain.precision.policy import Policy
from jaxtrain.runtime.compiler import CompilerOptions, record_choices
from jaxtrain.runtime.host import give_back_free_memory
from jaxtrain.runtime.tree import first_deleted
from jaxtrain.train.batch import BatchFeed, BatchSource
from jaxtrain.train.first_state import FirstState, Weights, place_tree
from jaxtrain.train.program import take_step
from jaxtrain.train.state import (
    StepProgram,
    TrainState,
    create_state,
    random_key,
    state_on_host,
    state_shardings,
)
from jaxtrain.train.update import Metrics


class TrainStep:
    """A train step on a mesh: `state, metrics = step(state, batch)`.

    Built by `make_train_step`. Calling it compiles on first use; `compile` does so ahead of time, after which a
    batch of another shape is an error instead of a silent second compilation. The state passed in is donated.

    Attributes:
        program: what the step is made of, and what its pure functions take.
        sharded_model, task, optimizer, pipeline: its parts.
        feed: how batches reach the mesh.
        drawn: the trace of how a state is drawn from a key.
        abstract_state: a `TrainState` of `ShapeDtypeStruct`s with their shardings: the target to restore into.
        state_shardings: those shardings.
        state_on_host: a `TrainState` that says of each array whether it is kept in the host's memory.
        compiler_options: what every program of the step is compiled with.
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
        ['accuracy', 'grad_norm', 'loss', 'skipped_in_a_row', 'skipped_steps', 'weight']
    """

    def __init__(self, program: StepProgram, compiler_options: CompilerOptions):
        self.program = program
        self.sharded_model = program.sharded_model
        self.task = program.task
        self.optimizer = program.optimizer
        self.pipeline = program.pipeline
        self.feed = BatchFeed(self.sharded_model, self.task, program.microbatches)
        self.compiler_options = compiler_options

        def create(key: jax.Array, *, params: Any = None, model_state: Any = None) -> TrainState:
            return create_state(program, key, params=params, model_state=model_state)

        self.drawn = jax.jit(create).trace(jax.eval_shape(lambda: jax.random.key(0)))
        shapes = self.drawn.out_info
        self.state_shardings: TrainState = state_shardings(shapes, program)
        self.state_on_host: TrainState = state_on_host(shapes, program)
        self.abstract_state: TrainState = jax.tree.map(with_sharding, shapes, self.state_shardings)
        self.choices: tuple[str, ...] = ()
        self.last_state: Callable[[], TrainState | None] = lambda: None  # weak: a step keeps no state alive
        self._first_state = FirstState(create, self.drawn, self.abstract_state)
        self._jitted = self._make_jitted()
        self._compiled: jax.stages.Compiled | None = None
        # Emulated devices share a small thread pool: with several steps in flight, devices of a later step can hold
        # all threads while an earlier one still waits in a collective, and XLA aborts after 40 s (jax 0.10.2, 0.12.0).
        self._one_at_a_time = self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu"
        self._last_metrics: Metrics = {}
        self._has_run = False

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
        weights: Weights | None = None,
        *,
        params: Params | None = None,
        model_state: ModelState | None = None,
    ) -> TrainState:
        """Create the state at step 0, sharded: the same numbers on every mesh.

        Moving average and optimizer state are made from the parameters, whichever these are.

        Args:
            seed: an int or a typed key.
            weights: what `load_weights` read, from a run, a published model or a tree without some parts; one state
                takes its arrays over.
            params: a tree of jax or NumPy arrays like that of `model.init`, on any devices, of any float dtypes; None,
                also in place of single leaves: what `model.init` draws.
            model_state: batch statistics and the like, in the same form.

        Raises:
            ConfigError: another structure or shape; names the first path that differs.

        Example:
            >>> state = step.init(0)
            >>> again = step.init(1, params=state.params)
        """
        if weights is None:
            model = self.sharded_model
            weights = Weights(
                place_tree("params", params, model.abstract_params),
                place_tree("model_state", model_state, model.abstract_model_state),
            )
        elif params is not None or model_state is not None:
            raise ConfigError("init takes weights, or params and model_state; load_weights takes model_state too")
        state = self._first_state(random_key(seed), weights)
        give_back_free_memory()  # what reading took beside the arrays
        return state

    def batch_shardings(self, batch: Mapping[str, Any]) -> dict[str, NamedSharding]:
        """How a batch (arrays or shapes, global) is sharded: rows over the batch axes; scalars are replicated.

        Without `inputs`, or where rows do not divide by devices and microbatches, a `ConfigError`.
        """
        return self.feed.shardings(batch)

    def loader(self, batches: BatchSource) -> Callable[[int], dict[str, Any]]:
        """k -> batch k on the mesh, for `prefetch`; each process reads only the rows of its own devices.

        Loading raises a `DataError` where a row holds an id that the model does not have; batches that do not divide by
        the devices or the microbatches are a `ConfigError`.
        """
        return self.feed.loader(batches)

    def place(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch of host arrays, numbers or arrays elsewhere, on the mesh; raises what `loader` does."""
        return self.feed.place(batch)

    def lower(self, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """Trace and lower for a batch of these global shapes (arrays or `ShapeDtypeStruct`s).

        The step itself does not change: `compile` or `use` makes it run a program.
        """
        return self.trace(batch).lower()

    def trace(self, batch: Mapping[str, Any]) -> jax.stages.Traced:
        """Trace as `lower` does, which it begins: the equations of the step, in `jaxpr`."""
        specs = jax.tree.map(with_sharding, dict(batch), self.batch_shardings(batch))
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

        `choices` is what `record_choices` collected while it was lowered; None: that of the step stays. A program
        whose pipeline stages would wait for one another for ever is a `ConfigError`.
        """
        if self.pipeline is not None:
            check_branches(compiled.as_text() or "", self.layout)
        self._compiled = compiled
        give_back_free_memory()
        if choices is not None:
            self.choices = tuple(choices)
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
            ConfigError: a state that was given to an earlier step, or a batch that does not divide.
            TypeError: another shape than the step was compiled for.
        """
        state = self._accept(state)
        batch = self.feed.accept(batch)
        if self._compiled is None and self.pipeline is not None:
            self.compile(batch)  # checked, as a program compiled on the way would not be
        if self._compiled is not None:
            new_state, self._last_metrics = self._compiled(state, batch)
        else:
            with record_choices() as choices:
                if not self._has_run:
                    # The call below finds this program; what compiling took is given back before it runs.
                    self._jitted.trace(state, batch).lower().compile()
                    give_back_free_memory()
                new_state, self._last_metrics = self._jitted(state, batch)
            if choices:  # only a call that traces makes any
                self.choices = tuple(choices)
        self._has_run = True
        self.last_state = weakref.ref(new_state)
        return new_state, self._last_metrics

    def _accept(self, state: TrainState) -> TrainState:
        """Return a state on the mesh, once no other step is in flight that must not be."""
        if state is not self.last_state():
            check_not_donated(state)
            state = _place_state(state, self.abstract_state)
        if self._one_at_a_time:
            jax.block_until_ready(self._last_metrics)
        return state

    def _make_jitted(self) -> Any:
        program = self.program

        def _step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, Metrics]:
            return take_step(program, state, batch)

        shardings = (self.state_shardings, NamedSharding(self.mesh, PartitionSpec()))
        options = dict(self.compiler_options.used) or None
        return jax.jit(_step, donate_argnums=0, out_shardings=shardings, compiler_options=options)


def check_not_donated(state: Any) -> None:
    """Raise a `ConfigError` where arrays of a state are gone, which ends the process on several devices."""
    gone = first_deleted(state)
    if gone is not None:
        raise ConfigError(
            f"this state was given to an earlier step, which takes over its arrays ({gone} is deleted); go on with "
            "what the step returns: state, metrics = step(state, batch)"
        )


def _place_state(state: TrainState, abstract: TrainState) -> TrainState:
    """Place a state of jax or NumPy arrays, from anywhere, as a step takes it over.

    Containers (a list for a tuple) may differ.
    """
    leaves, structure = jax.tree.flatten(abstract)
    placed = []
    for leaf, like in zip(jax.tree.leaves(state), leaves, strict=True):
        if not isinstance(leaf, jax.Array):
            # A copy first: on CPU an aligned NumPy array is the buffer itself, also with may_alias=False (jax 0.10.2).
            leaf = jax.device_put(np.array(leaf, like.dtype), like.sharding)
        elif leaf.sharding != like.sharding:
            # Moving may share the buffer of a device that both have; donating it would take the user's array along.
            leaf = jnp.copy(jax.device_put(leaf, like.sharding))
        placed.append(leaf)
    return jax.tree.unflatten(structure, placed)
