"""What one device of a pipeline does with a microbatch, and what it holds of the model.

Everything here is local to the mesh axes `pipe` and `data`; the compiler handles the others. Virtual stage: chunk c of
stage s is number c * p + s, and layers are dealt out in that order.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.layout.sharding import Layout, path_name, use_layout
from jaxtrain.models.tasks import Sums
from jaxtrain.parallel.gradients import split_microbatches
from jaxtrain.parallel.programs import collectives
from jaxtrain.parallel.schedules import Schedule
from jaxtrain.parallel.traced import calls_back, traced

Tree = Any


class StageCode(Protocol):
    """What the stages compute, on one microbatch; `outer` are the parameters outside the stack."""

    def embed(self, outer: Tree, rows: Tree, key: jax.Array) -> Tree: ...

    def layers(self, stack: Tree, carry: Tree, rows: Tree, first_layer: jax.Array, key: jax.Array) -> Tree: ...

    def loss(self, outer: Tree, carry: Tree, rows: Tree) -> tuple[jax.Array, jax.Array, Sums]: ...


@dataclass(frozen=True)
class Pipeline:
    """A schedule for a model on a mesh.

    Attributes:
        schedule: who does what when.
        layout: of the step; its mesh has pipe = schedule.num_stages.
        stack: key of the stacked parameters.
        num_layers: of the stack; a multiple of stages x chunks.
    """

    schedule: Schedule
    layout: Layout
    stack: str
    num_layers: int

    @property
    def layers_per_chunk(self) -> int:
        return self.num_layers // (self.schedule.num_stages * self.schedule.num_chunks)


def index(tree: Tree, number: jax.Array) -> Tree:
    """Entry `number` of every leaf's first dim."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), tree)


def store(buffer: Tree, value: Tree, slot: jax.Array) -> Tree:
    """The buffer with `value` in `slot`; as it was where the slot is -1."""

    def one(b: jax.Array, x: jax.Array) -> jax.Array:
        at = jnp.maximum(slot, 0)
        old = jax.lax.dynamic_index_in_dim(b, at, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(b, jnp.where(slot >= 0, x, old), at, 0)

    return jax.tree.map(one, buffer, value)


def deal(leaf: jax.Array, stages: int, chunks: int) -> jax.Array:
    """Local layers [v * n, ...], stored in the order of the stack, as the chunks [v, n, ...] that this stage runs.

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


class Stage:
    """What one device does; everything is local to `pipe` and `data`."""

    def __init__(self, pipeline: Pipeline, code: StageCode, merge: Callable[[Tree, Tree], Tree], arguments: Any):
        outer, outer_fixed, stack, stack_fixed, batch, self.key = arguments
        schedule = pipeline.schedule
        self.pipeline, self.code, self.merge = pipeline, code, merge
        self.stages, self.chunks = schedule.num_stages, schedule.num_chunks
        self.number = jax.lax.axis_index("pipe")
        self.outer, self.outer_fixed = outer, outer_fixed
        self.stack, self.stack_fixed = self.deal(stack), self.deal(stack_fixed)
        self.microbatches = split_microbatches(batch, schedule.num_microbatches)
        self.up = [(s, (s + 1) % self.stages) for s in range(self.stages)]
        self.down = [(d, s) for s, d in self.up]
        rows, at = self.rows(jnp.int32(0)), jnp.int32(0)
        carry = jax.eval_shape(lambda: self.embed(self.outer, rows, at))
        for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ConfigError(
                    f"what embed gives holds {leaf.dtype} at {path_name(path) or 'its top'}; stages pass floats only: "
                    "take it from the inputs, which every block gets"
                )
        self.no_carry = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), carry)
        self.no_sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(lambda: self.loss(self.outer, self.no_carry, rows)),
        )

    def deal(self, stack: Tree) -> Tree:
        """The chunks that this stage runs, from the layers that it stores."""
        return jax.tree.map(lambda leaf: deal(leaf, self.stages, self.chunks), stack)

    def undeal(self, dealt: Tree) -> Tree:
        """Gradients of chunks, brought back to the layers that this stage stores: the transpose of dealing."""

        def one(leaf: jax.Array) -> jax.Array:
            stored = jax.ShapeDtypeStruct((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]), leaf.dtype)
            return jax.linear_transpose(self.deal, stored)(leaf)[0]

        return jax.tree.map(one, dealt)

    def rows(self, microbatch: jax.Array) -> Tree:
        return index(self.microbatches, jnp.maximum(microbatch, 0))

    def is_first(self, chunk: jax.Array) -> jax.Array:
        return (self.number == 0) & (chunk == 0)

    def is_last(self, chunk: jax.Array) -> jax.Array:
        return (self.number == self.stages - 1) & (chunk == self.chunks - 1)

    def embed(self, outer: Tree, rows: Tree, microbatch: jax.Array) -> Tree:
        key = jax.random.fold_in(self.key, microbatch)
        return self.code.embed(self.merge(outer, self.outer_fixed), rows, key)

    def layers(self, stack: Tree, carry: Tree, rows: Tree, microbatch: jax.Array, chunk: jax.Array) -> Tree:
        first = (chunk * self.stages + self.number) * self.pipeline.layers_per_chunk
        stack = self.merge(stack, index(self.stack_fixed, chunk))
        return self.code.layers(stack, carry, rows, first, jax.random.fold_in(self.key, microbatch))

    def loss(self, outer: Tree, carry: Tree, rows: Tree) -> tuple[jax.Array, jax.Array, Sums]:
        return self.code.loss(self.merge(outer, self.outer_fixed), carry, rows)

    def forward(self, microbatch: jax.Array, chunk: jax.Array, carry: Tree) -> Tree:
        """The layers of a chunk, after the embedding on the first stage."""
        rows = self.rows(microbatch)
        first = (lambda _: self.embed(self.outer, rows, microbatch), lambda carry: carry)
        carry = jax.lax.cond(self.is_first(chunk), *first, carry)
        return self.layers(index(self.stack, chunk), carry, rows, microbatch, chunk)


def check_branches(text: str, layout: Layout) -> None:
    """Raise where a compiled pipeline would wait for ever: a permutation in a branch that some stages do not take.

    The compiler makes one when it moves an array between two automatic axes inside a stage.

    Raises:
        ConfigError: names the operation.
    """
    stuck = [c for c in collectives(text) if c.kind == "collective-permute" and c.in_branch]
    if not stuck:
        return
    named = re.search(r'op_name="([^"]*)"', stuck[0].line)
    operation = named.group(1)[-60:] if named else "unnamed"
    degrees = " ".join(f"parallel.{axis}={layout.mesh.shape[axis]}" for axis in ("fsdp", "tensor"))
    raise ConfigError(
        f"a pipeline stage of this model permutes data between devices ({operation}), which would wait for other "
        f"stages for ever under {degrees}; use 1 for one of them, or jaxtrain.embedding_lookup and an axes table"
    )


def enter(pipeline: Pipeline, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """The function on the local shards of `pipe` and `data`.

    Raises:
        ConfigError: when it is called, where it calls back to Python.
    """
    inside = dataclasses.replace(pipeline.layout, manual=frozenset({"pipe", "data"}))

    def local(*args: Any) -> Any:
        with use_layout(inside):
            return function(*args)

    # Unchecked for the reason given in gradients.py.
    run = jax.shard_map(
        local,
        mesh=pipeline.layout.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={"pipe", "data"},
        check_vma=False,
    )

    def checked(*args: Any) -> Any:
        jitted, operations = traced(run, *args)
        if calls_back(operations):
            raise ConfigError(
                f"parallel.pipe={pipeline.schedule.num_stages}, but the model or its loss calls back to Python "
                "(jax.debug.print), which jax cannot in a pipeline stage; take that out, or use parallel.pipe=1"
            )
        return jitted(*args)

    return checked
