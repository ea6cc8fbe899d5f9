"""What one device of a pipeline holds of the model and of the batch, and what it computes on a microbatch.

Everything here is local to the mesh axes `pipe` and `data`; the compiler handles the others. With p stages of v chunks,
chunk c of stage s is virtual stage c * p + s; layers are dealt out to virtual stages in order, n to each.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.layout.keys import microbatch_key
from jaxtrain.layout.sharding import Layout, path_name, use_layout
from jaxtrain.models.task import TaskSums
from jaxtrain.parallel.microbatches import Tree, split_microbatches
from jaxtrain.parallel.programs import collectives
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.runtime.tree import merge_leaves


class StageCode(Protocol):
    """What the stages compute on one microbatch.

    `outer` are the parameters outside the stack, `rows` the batch entries of the microbatch, and the carry is what one
    stage sends to the next: a tree of float arrays.
    """

    def embed(self, outer: Tree, rows: Tree, key: jax.Array) -> Tree:
        """Compute the carry into the first layer."""
        ...

    def layers(self, stack: Tree, carry: Tree, rows: Tree, first_layer: jax.Array, key: jax.Array) -> Tree:
        """Apply consecutive layers, whose parameters have a leading layer dim, to a carry."""
        ...

    def loss(self, outer: Tree, carry: Tree, rows: Tree) -> TaskSums:
        """Compute the loss from the carry out of the last layer."""
        ...


@dataclass(frozen=True)
class Pipeline:
    """A schedule for a model on a mesh.

    Attributes:
        schedule: who does what when.
        layout: of the step; its mesh has pipe = schedule.num_stages.
        stack: key of the stacked parameters.
        num_layers: of the stack; a multiple of stages x chunks.
        zero: ZeRO stage of a step, see `DataReduction`.
    """

    schedule: Schedule
    layout: Layout
    stack: str
    num_layers: int
    zero: int = 0

    @property
    def layers_per_chunk(self) -> int:
        """Consecutive layers that a stage applies in one tick."""
        return self.num_layers // (self.schedule.num_stages * self.schedule.num_chunks)


def index(tree: Tree, number: jax.Array) -> Tree:
    """Take entry `number` (int32 []) of the first dim of every array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def store(buffer: Tree, value: Tree, slot: jax.Array) -> Tree:
    """Put a value into a slot (int32 []) of a buffer [slots, ...]; at -1 the buffer stays as it is."""

    def one(slots: jax.Array, x: jax.Array) -> jax.Array:
        at = jnp.maximum(slot, 0)
        old = jax.lax.dynamic_index_in_dim(slots, at, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(slots, jnp.where(slot >= 0, x, old), at, 0)

    return jax.tree.map(one, buffer, value)


def deal(leaf: jax.Array, stages: int, chunks: int) -> jax.Array:
    """Bring each layer from the stage that stores it to the stage that runs it: [v * n, ...] -> [v, n, ...].

    Parameters are stored in layer order on every layout, so that a checkpoint knows no schedule; with several chunks
    a stage runs others than it stores, and they change places once a step, in v rounds of a permutation each. In
    round r stage s sends its stored chunk (r + s // (p / g)) mod v, g = gcd(v, p), which is a permutation because
    stages with equal destinations (p / g apart) then send chunks of different remainders by g.
    """
    own = leaf.reshape(chunks, leaf.shape[0] // chunks, *leaf.shape[1:])
    if chunks == 1:
        return own
    stage = jax.lax.axis_index("pipe")
    dealt = jnp.zeros_like(own)
    period = stages // np.gcd(chunks, stages)
    for turn in range(chunks):
        sent = [(turn + s // period) % chunks for s in range(stages)]
        number = [s * chunks + sent[s] for s in range(stages)]
        received = {n % stages: n // stages for n in number}
        assert len(received) == stages
        chunk = index(own, jnp.asarray(sent)[stage])
        chunk = jax.lax.ppermute(chunk, "pipe", [(s, number[s] % stages) for s in range(stages)])
        dealt = store(dealt, chunk, jnp.asarray([received[s] for s in range(stages)])[stage])
    return dealt


def undeal(stage: "Stage", dealt: Tree) -> Tree:
    """Bring gradients of chunks [v, n, ...] back to the stage that stores their layers: the transpose of `deal`."""

    def one(leaf: jax.Array) -> jax.Array:
        stored = jax.ShapeDtypeStruct((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), leaf.dtype)
        return jax.linear_transpose(lambda x: deal(x, stage.num_stages, stage.num_chunks), stored)(leaf)[0]

    return jax.tree.map(one, dealt)


@dataclass(frozen=True)
class Stage:
    """What one device holds; everything is local to `pipe` and `data`.

    Attributes:
        pipeline: schedule, layout and stack.
        code: what stages compute.
        number: int32 [], of this stage.
        outer, outer_fixed: trained and frozen parameters outside the stack.
        stack, stack_fixed: those of the chunks that this stage runs, arrays [v, n, ...].
        microbatches: batch entries [microbatches, rows, ...].
        key: of the step.
    """

    pipeline: Pipeline
    code: StageCode
    number: jax.Array
    outer: Tree
    outer_fixed: Tree
    stack: Tree
    stack_fixed: Tree
    microbatches: Tree
    key: jax.Array

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pipeline.schedule.num_stages

    @property
    def num_chunks(self) -> int:
        """Chunks of layers per stage."""
        return self.pipeline.schedule.num_chunks


def make_stage(pipeline: Pipeline, code: StageCode, arguments: tuple[Tree, Tree, Tree, Tree, Tree, jax.Array]) -> Stage:
    """Deal the layers out and split the batch.

    `arguments`: outer, outer_fixed, stack, stack_fixed, batch and key; local arrays, stacks in stored order.
    """
    outer, outer_fixed, stack, stack_fixed, batch, key = arguments
    schedule = pipeline.schedule

    def dealt(stack: Tree) -> Tree:
        return jax.tree.map(lambda leaf: deal(leaf, schedule.num_stages, schedule.num_chunks), stack)

    return Stage(
        pipeline=pipeline,
        code=code,
        number=jax.lax.axis_index("pipe"),
        outer=outer,
        outer_fixed=outer_fixed,
        stack=dealt(stack),
        stack_fixed=dealt(stack_fixed),
        microbatches=split_microbatches(batch, schedule.num_microbatches),
        key=key,
    )


def empty_carry(stage: Stage) -> Tree:
    """Return what a stage sends when it has nothing to send: zeros like the carry between two stages."""
    at = jnp.int32(0)
    carry = jax.eval_shape(lambda: embed(stage, stage.outer, rows_of(stage, at), at))
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"embed returns {leaf.dtype} at {path_name(path) or 'its top'}, but stages pass floats only: "
                "take it from the inputs, which every block gets"
            )
    return _zeros(carry)


def empty_sums(stage: Stage, carry: Tree) -> TaskSums:
    """Return the sums of the loss before the first microbatch: zeros like those of one microbatch with this carry."""
    return _zeros(jax.eval_shape(lambda: loss(stage, stage.outer, carry, rows_of(stage, jnp.int32(0)))))


def _zeros(shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def rows_of(stage: Stage, microbatch: jax.Array) -> Tree:
    """Take the batch entries of a microbatch; those of the first one where the number is -1."""
    return index(stage.microbatches, jnp.maximum(microbatch, 0))


def is_first(stage: Stage, chunk: jax.Array) -> jax.Array:
    """Return whether a chunk of this stage is the first virtual stage, which embeds."""
    return (stage.number == 0) & (chunk == 0)


def is_last(stage: Stage, chunk: jax.Array) -> jax.Array:
    """Return whether a chunk of this stage is the last virtual stage, which computes the loss."""
    return (stage.number == stage.num_stages - 1) & (chunk == stage.num_chunks - 1)


def embed(stage: Stage, outer: Tree, rows: Tree, microbatch: jax.Array) -> Tree:
    """Compute the carry into the first layer from `outer`, the trained parameters outside the stack."""
    key = microbatch_key(stage.key, microbatch, stage.microbatches)
    return stage.code.embed(merge_leaves(outer, stage.outer_fixed), rows, key)


def layers(stage: Stage, stack: Tree, carry: Tree, rows: Tree, microbatch: jax.Array, chunk: jax.Array) -> Tree:
    """Apply the layers of a chunk; `stack` are its trained parameters, arrays [n, ...]."""
    first = (chunk * stage.num_stages + stage.number) * stage.pipeline.layers_per_chunk
    stack = merge_leaves(stack, index(stage.stack_fixed, chunk))
    key = microbatch_key(stage.key, microbatch, stage.microbatches)
    return stage.code.layers(stack, carry, rows, first, key)


def loss(stage: Stage, outer: Tree, carry: Tree, rows: Tree) -> TaskSums:
    """Compute the sums of the loss from the carry out of the last layer."""
    return stage.code.loss(merge_leaves(outer, stage.outer_fixed), carry, rows)


def forward(stage: Stage, microbatch: jax.Array, chunk: jax.Array, carry: Tree) -> Tree:
    """Apply the layers of a chunk, after the embedding on the first virtual stage, which reads no carry."""
    rows = rows_of(stage, microbatch)
    first = (lambda _: embed(stage, stage.outer, rows, microbatch), lambda carry: carry)
    carry = jax.lax.cond(is_first(stage, chunk), *first, carry)
    return layers(stage, index(stage.stack, chunk), carry, rows, microbatch, chunk)


def send_up(stage: Stage, carry: Tree) -> Tree:
    """Send a carry to the next stage of the ring, and receive that of the stage before."""
    return jax.lax.ppermute(carry, "pipe", [(s, (s + 1) % stage.num_stages) for s in range(stage.num_stages)])


def send_down(stage: Stage, gradient: Tree) -> Tree:
    """Send the gradient of a carry to the stage before in the ring, and receive that of the next."""
    return jax.lax.ppermute(gradient, "pipe", [((s + 1) % stage.num_stages, s) for s in range(stage.num_stages)])


def check_branches(text: str, layout: Layout) -> None:
    """Raise a `ConfigError` where a stage of a compiled pipeline (HLO text) would wait forever.

    It would for a permutation in a branch that others do not take, which the compiler makes to move an array between
    two automatic axes inside a stage.
    """
    stuck = [c for c in collectives(text) if c.kind == "collective-permute" and c.in_branch]
    if not stuck:
        return
    named = re.search(r'op_name="([^"]*)"', stuck[0].line)
    operation = named.group(1)[-60:] if named else "unnamed"
    degrees = " ".join(f"parallel.{axis}={layout.mesh.shape[axis]}" for axis in ("fsdp", "tensor"))
    raise ConfigError(
        f"a pipeline stage of this model permutes data between devices ({operation}), which would wait for other "
        f"stages forever under {degrees}; use 1 for one of them, or jaxtrain.embedding_lookup and an axes table"
    )


def enter(pipeline: Pipeline, function: Callable[..., Tree], in_specs: Tree, out_specs: Tree) -> Callable[..., Tree]:
    """Make a function of local shards of `pipe` and `data` one of global arrays; specs as for `jax.shard_map`."""
    inside = dataclasses.replace(pipeline.layout, manual=frozenset({"pipe", "data"}))

    def local(*args: Tree) -> Tree:
        with use_layout(inside):
            return function(*args)

    # Unchecked for the reason given in gradients.py.
    return jax.shard_map(
        local,
        mesh=pipeline.layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={"pipe", "data"},
        check_vma=False,
    )
