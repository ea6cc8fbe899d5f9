"""The time of each block of a step, forward and backward on one device, against its roofline.

A block's roofline is the larger of its FLOPs over the measured rate of matmuls in the policy's format and its bytes
over the measured rate of memory (Williams et al. 2009); FLOPs and bytes are those of `plan/work.py`, attention
counted as a kernel that skips masked pairs and keeps scores to itself.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.bench.limits import Limits, call_seconds
from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.sharded import model_context
from jaxtrain.models.shipped.block import Block, Context
from jaxtrain.models.shipped.shapes import norm_names
from jaxtrain.models.task import task_sums
from jaxtrain.ops.attention.rules import visible_pairs
from jaxtrain.optim.optimizers import trainable_predicate
from jaxtrain.plan.compile import sharded_bytes
from jaxtrain.plan.layers import AttentionWork, least_experts
from jaxtrain.plan.state import finetuned
from jaxtrain.plan.step import DeviceStep
from jaxtrain.plan.work import BlockWork, step_blocks
from jaxtrain.plan.workload import Workload, model_structure, model_tensors
from jaxtrain.runtime.devices import FORMATS
from jaxtrain.train.state import select_leaves
from jaxtrain.train.step import TrainStep

_FORWARD_AND_BACKWARD = 3


@dataclass(frozen=True)
class TimedBlock:
    """One block of a step on one device.

    Attributes:
        name: for people.
        count: how often a step runs it.
        seconds: of once forward and backward, measured.
        flops, bytes: of the same, counted.
        roofline_seconds: the least time for those.
        bound: compute or memory, whichever takes longer.
    """

    name: str
    count: int
    seconds: float
    flops: float
    bytes: float
    roofline_seconds: float
    bound: str

    @property
    def share_of_roofline(self) -> float:
        """1 is the limit of the device."""
        return self.roofline_seconds / self.seconds


def has_blocks(config: Config, step: TrainStep) -> bool:
    """Whether the blocks of a model can be timed: a transformer of equal blocks with its usual head and loss."""
    model = config.model
    if not isinstance(model, TransformerConfig) or model.leading is not None:
        return False
    usual = model.head is None and not model.token_types
    return usual and not step.task.calls_model


def time_blocks(config: Config, workload: Workload, step: TrainStep, limits: Limits) -> list[TimedBlock]:
    """Time the blocks of a transformer at its shapes, for the rows that one device has of a microbatch.

    Args:
        config: the run. Tensor parallelism and a sharded sequence are left out: no block is partitioned.
        workload: its sizes.
        step: its step.
        limits: from `measure_limits`.
    """
    model = config.model
    assert isinstance(model, TransformerConfig), "has_blocks"
    shards = math.prod(step.mesh.shape[axis] for axis in ("data", "fsdp", "expert"))
    microbatches = config.train.accumulation_steps
    rows = max(1, workload.rows // (microbatches * shards))
    # The format that matmuls run in; where there are no units for it, the one they fall back to.
    rate = limits.matmul.get(FORMATS[config.precision.policy]) or limits.matmul["bf16"] or limits.matmul["fp32"]
    assert rate is not None
    # Attention takes at least the pairs that are seen, and no score in memory.
    (length,) = workload.input_shape
    pairs = sum(visible_pairs(length, causal=model.causal, window=window) for window in model.windows)
    attention = AttentionWork("roofline", pairs / model.num_layers / length**2, 0.0, 0, True)
    alone = dict.fromkeys(step.mesh.shape, 1)
    work = DeviceStep(
        config,
        workload,
        alone,
        microbatches,
        rows,
        structure=model_structure(model, workload),
        stored=finetuned(config, model_tensors(model, workload)),
        attention=(attention,),
        experts=least_experts(model),
    )
    counted = {block.name: block for block in step_blocks(work)}
    device = jax.local_devices()[0]
    mesh = make_mesh(devices=[device])
    layout = dataclasses.replace(step.layout, mesh=mesh)
    timed = []
    with model_context(layout, step.policy), jax.default_device(device):
        for work, call in _transformer_calls(model, workload, step, rows, counted):
            flops, moved = _FORWARD_AND_BACKWARD * work.flops, _FORWARD_AND_BACKWARD * work.bytes
            compute, memory = flops / rate, moved / limits.memory
            bound, least = ("compute" if compute > memory else "memory"), max(compute, memory)
            timed.append(TimedBlock(work.name, work.count, call_seconds(call), flops, moved, least, bound))
    if not config.optimizer.offload:  # it would be timed on arrays that lie elsewhere
        timed.append(_optimizer(config, step, limits))
    return timed


def _random_like(shapes: Any, dtype: Any) -> Any:
    """Values for a tree of shapes: small normal numbers in the compute dtype, zeros for integers."""

    def make(shape: Any, key: jax.Array) -> jax.Array:
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            return jnp.zeros(shape.shape, shape.dtype)
        return 0.1 * jax.random.normal(key, shape.shape, jnp.bfloat16).astype(dtype)

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    made = jax.jit(lambda keys: [make(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])(keys[: len(leaves)])
    return jax.tree.unflatten(structure, made)


def _forward_and_backward(function: Callable[..., Any], shapes: Sequence[Any], dtype: Any) -> Callable[[], Any]:
    """A call that runs a function of trees and its gradient with respect to all of them."""
    arguments = [_random_like(shape, dtype) for shape in shapes]

    def both(*arguments: Any) -> Any:
        outputs, backward = jax.vjp(function, *arguments)
        # Its own values as gradients: dense numbers of the right shapes.
        return backward(outputs)

    run = jax.jit(both)
    return lambda: run(*arguments)


# Parameters that a transformer reads before its first block.
_EMBEDS = ("embedding", "positions", "embedding_norm", "relative_positions")


def _transformer_calls(
    model: TransformerConfig, workload: Workload, step: TrainStep, rows: int, counted: Mapping[str, BlockWork]
) -> Iterator[tuple[BlockWork, Callable[[], Any]]]:
    """Each block with its forward work, and a call that runs it forward and backward."""
    dtype, length, parts = step.policy.compute_dtype, workload.input_shape[0], step.model.parts
    assert parts is not None, "transformers have parts"
    assert workload.vocab_size is not None
    params = {name: leaf for name, leaf in step.abstract_state.params.items() if name != parts.stack}
    embedding = {name: params[name] for name in _EMBEDS if name in params}
    head = {name: params[name] for name in params if name not in _EMBEDS}
    head |= {"embedding": params["embedding"]} if model.tie_embeddings else {}
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, workload.vocab_size)
    positions = jnp.arange(length)[None]
    x = jax.ShapeDtypeStruct((rows, length, model.embed_dim), dtype)
    block = nnx.eval_shape(lambda: Block(model, nnx.Rngs(0)))

    def of_module(name: str, call: Callable[[Any, jax.Array], jax.Array]) -> Callable[[], Any]:
        graph, state = nnx.split(getattr(block, name))
        return _forward_and_backward(lambda state, x: call(nnx.merge(graph, state), x), (state, x), dtype)

    def embed(some: Any) -> Any:
        return parts.embed({**params, **some}, tokens, key=None, train=True)

    def loss(some: Any, carry: Any) -> jax.Array:
        outputs = parts.head({**params, **some}, carry, train=True)
        return task_sums(step.task, outputs, {"inputs": tokens, "targets": tokens}, train=True)[0]

    yield counted["embedding"], _forward_and_backward(embed, (embedding,), dtype)
    attention, scores = counted["attention projections"], counted["attention scores"]
    both = BlockWork("attention", attention.count, attention.flops + scores.flops, attention.bytes + scores.bytes)
    yield both, of_module("attention", lambda module, x: module(x, Context(positions))[0])
    mlp = "MLP" if model.experts is None else "experts"
    yield counted[mlp], of_module("mlp", lambda module, x: module(x) if model.experts is None else module(x)[0])
    # Of a norm: the input read twice and the gradients of both sides once, the output written.
    norm_bytes = 5 / _FORWARD_AND_BACKWARD * rows * length * model.embed_dim * jnp.dtype(dtype).itemsize
    norms = len(norm_names(model)) * attention.count
    yield BlockWork("norm", norms, 0.0, norm_bytes), of_module("attention_norm", lambda module, x: module(x))
    carry = jax.eval_shape(embed, embedding)
    output = dataclasses.replace(counted["output and loss"], name="head and loss")
    yield output, _forward_and_backward(loss, (head, carry), dtype)


def _optimizer(config: Config, step: TrainStep, limits: Limits) -> TimedBlock:
    """The update of what each device holds of the parameters, on the step's own mesh; clipping left out."""
    trainable = trainable_predicate(config.optimizer.freeze, list(parameter_shapes(step.model)))
    shapes = step.abstract_state
    trained = select_leaves(shapes.params, trainable)
    gradients = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), trained
    )

    def make(shapes: Any, value: float) -> Any:
        # On the device, also what a step keeps on the host: the update is timed, not the way there.
        shardings = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind(None), shapes)
        fill = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), shapes), out_shardings=shardings
        )
        return fill()

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = step.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(update, donate_argnums=(1, 2))
    held = [make(trained, 0.1), make(shapes.optimizer_state, 0.0)]
    given = make(gradients, 0.1)

    def call() -> Any:
        held[0], held[1] = run(given, held[1], held[0])
        return held[0]

    with model_context(step.layout, step.policy):
        seconds = call_seconds(call)
    moved = 2 * (sharded_bytes(trained) + sharded_bytes(shapes.optimizer_state)) + sharded_bytes(gradients)
    return TimedBlock("optimizer", 1, seconds, 0.0, moved, moved / limits.memory, "memory")
