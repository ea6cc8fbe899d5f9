"""The time of each block of a step, forward and backward on one device, against its roofline.

A block's roofline is the larger of its FLOPs over the measured rate of matmuls in the policy's format and its bytes
over the measured rate of memory (Williams et al. 2009); FLOPs and bytes are those of `plan/work/blocks.py`, attention
counted as a kernel that skips masked pairs and keeps scores to itself.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain.bench.limits import Limits
from jaxtrain.bench.timing import call_seconds
from jaxtrain.config.models import TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.models.context import model_context
from jaxtrain.models.model import parameter_shapes
from jaxtrain.models.shipped.block import Block
from jaxtrain.ops.attention.blocks import visible_pairs
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, cross_entropy
from jaxtrain.optim.masks import trainable_predicate
from jaxtrain.plan.compilers.exact import sharded_bytes
from jaxtrain.plan.work.attention import AttentionWork
from jaxtrain.plan.work.block import BlockWork, DeviceBatch
from jaxtrain.plan.work.blocks import step_blocks
from jaxtrain.plan.work.experts import least_experts
from jaxtrain.plan.workload.parameters import model_structure
from jaxtrain.plan.workload.record import Workload
from jaxtrain.precision.dtypes import POLICY_DTYPES
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


def roofline(flops: float, moved: float, flops_per_second: float, limits: Limits) -> tuple[float, str]:
    """The least seconds of some work, and what binds it."""
    compute, memory = flops / flops_per_second, moved / limits.memory
    return (compute, "compute") if compute > memory else (memory, "memory")


def time_blocks(config: Config, workload: Workload, step: TrainStep, limits: Limits) -> list[TimedBlock]:
    """Time the blocks of a config's model at its shapes, for the rows that one device has of a microbatch.

    Args:
        config: the run. Tensor parallelism and a sharded sequence are left out: no block is partitioned.
        workload: its sizes.
        step: its step.
        limits: from `measure_limits`.
    """
    shards = math.prod(step.mesh.shape[axis] for axis in ("data", "fsdp", "expert"))
    microbatches = config.train.accumulation_steps
    rows = max(1, workload.rows // (microbatches * shards))
    # The format that matmuls run in; where there are no units for it, the one they fall back to.
    rate = limits.matmul.get(FORMATS[config.precision.policy]) or limits.matmul["bf16"] or limits.matmul["fp32"]
    assert rate is not None
    experts = least_experts(config.model) if isinstance(config.model, TransformerConfig) else None
    attention = _least_attention(config, workload)
    alone = dict.fromkeys(step.mesh.shape, 1)
    batch = DeviceBatch(microbatches, rows, alone, tuple(attention), experts=experts)
    counted = {block.name: block for block in step_blocks(config, workload, batch)}
    device = jax.local_devices()[0]
    mesh = make_mesh(devices=[device])
    layout = dataclasses.replace(step.layout, mesh=mesh)
    # Other heads, and what else a model embeds, are timed as one.
    if isinstance(config.model, TransformerConfig) and config.model.head is None and not config.model.token_types:
        calls = _transformer_calls(config.model, config, workload, step, rows, counted)
    else:
        calls = [_whole_model(workload, step, rows, list(counted.values()), microbatches)]
    timed = []
    for call in calls:
        with model_context(layout, step.policy), jax.default_device(device):
            seconds = call_seconds(call.make())
        least, bound = roofline(call.flops, call.bytes, rate, limits)
        timed.append(TimedBlock(call.name, call.count, seconds, call.flops, call.bytes, least, bound))
    if not config.optimizer.offload:  # it would be timed on arrays that lie elsewhere
        timed.append(_optimizer(config, step, limits))
    return timed


def _least_attention(config: Config, workload: Workload) -> tuple[AttentionWork, ...]:
    """What the attention of each stack takes at least: the pairs that are seen, no score in memory."""
    structure = model_structure(config.model, workload)
    found = []
    for stack in () if structure is None else structure.stacks:
        length, model = stack.length, stack.blocks
        pairs = sum(visible_pairs(length, causal=model.causal, window=window) for window in model.windows)
        found.append(AttentionWork("roofline", pairs / model.num_layers / length**2, 0.0, 0, True))
    if structure is not None and structure.stacks[-1].memory_length is not None:
        found.append(AttentionWork("roofline", 1.0, 0.0, 0, True))
    return tuple(found)


@dataclass(frozen=True)
class _Call:
    """A block that can be timed."""

    name: str
    count: int
    flops: float
    bytes: float
    make: Callable[[], Callable[[], Any]]


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
    model: TransformerConfig,
    config: Config,
    workload: Workload,
    step: TrainStep,
    rows: int,
    counted: Mapping[str, BlockWork],
) -> list[_Call]:
    dtype, length, microbatches = step.policy.compute_dtype, workload.input_shape[0], config.train.accumulation_steps
    parts, task = step.model.parts, step.task
    assert parts is not None, "transformers have parts"
    params = {name: leaf for name, leaf in step.abstract_state.params.items() if name != parts.stack}
    embedding = {name: params[name] for name in _EMBEDS if name in params}
    head = {name: params[name] for name in params if name not in _EMBEDS}
    head |= {"embedding": params["embedding"]} if model.tie_embeddings else {}
    assert workload.vocab_size is not None
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, workload.vocab_size)
    positions = jnp.arange(length)[None]
    carry = jax.eval_shape(lambda p: parts.embed({**params, **p}, tokens, key=None, train=True), embedding)
    x = jax.ShapeDtypeStruct((rows, length, model.embed_dim), dtype)
    block = nnx.eval_shape(lambda: Block(model, nnx.Rngs(0)))

    def module_call(name: str, call: Callable[[Any, jax.Array], jax.Array]) -> Callable[[], Callable[[], Any]]:
        graph, state = nnx.split(getattr(block, name))
        return lambda: _forward_and_backward(lambda state, x: call(nnx.merge(graph, state), x), (state, x), dtype)

    def embed_and_back(some: Any) -> Any:
        return parts.embed({**params, **some}, tokens, key=None, train=True)

    def head_and_back(some: Any, carry: Any) -> jax.Array:
        outputs = parts.head({**params, **some}, carry, train=True)
        if task.calls_model:  # losses of pairs, which compare log-probabilities of tokens or numbers per text
            logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
            if isinstance(logits, DeferredLogits) or logits.ndim == 3:
                return jnp.sum(cross_entropy(logits, tokens))
            return jnp.sum(logits)
        return task.loss(outputs, {"inputs": tokens, "targets": tokens})[0]

    def of(name: str, *blocks: BlockWork) -> tuple[str, int, float, float]:
        work = [(_FORWARD_AND_BACKWARD * one.flops, _FORWARD_AND_BACKWARD * one.bytes) for one in blocks]
        return name, blocks[0].count, sum(flops for flops, _ in work), sum(moved for _, moved in work)

    attention = counted["attention projections"], counted["attention scores"]
    # Of a norm: the input read twice and the gradients of both sides once, the output written.
    norm_bytes = 5 * POLICY_DTYPES[config.precision.policy].compute_bytes * rows * length * model.embed_dim
    norms = (4 if model.block == "sandwich" else 2) * model.num_layers * microbatches
    mlp = "MLP" if model.experts is None else "experts"
    calls = [
        _Call(
            *of("embedding", counted["embedding"]), lambda: _forward_and_backward(embed_and_back, (embedding,), dtype)
        ),
        _Call(
            *of("attention", *attention),
            module_call("attention", lambda attention, x: attention(x, positions, None, None, None)[0]),
        ),
        _Call(
            *of(mlp, counted[mlp]),
            module_call("mlp", lambda mlp, x: mlp(x) if model.experts is None else mlp(x)[0]),
        ),
        _Call("norm", norms, 0.0, norm_bytes, module_call("attention_norm", lambda norm, x: norm(x))),
        _Call(
            *of("head and loss", counted["output and loss"]),
            lambda: _forward_and_backward(head_and_back, (head, carry), dtype),
        ),
    ]
    return calls


def _whole_model(workload: Workload, step: TrainStep, rows: int, blocks: list[BlockWork], microbatches: int) -> _Call:
    """Forward and backward of a model that is not batch, as one row."""
    state = step.abstract_state
    inputs = jax.ShapeDtypeStruct((rows, *workload.input_shape), step.policy.compute_dtype)
    key = jax.random.key(0)
    tokens: Any = None
    if workload.unit == "tokens":  # which have no gradient
        tokens = jnp.zeros((rows, *workload.input_shape), jnp.int32)
        if workload.decoder_length is not None:
            tokens = {"tokens": tokens, "decoder_tokens": jnp.zeros((rows, workload.decoder_length), jnp.int32)}

    def make() -> Callable[[], Any]:
        model_state = _random_like(state.model_state, jnp.float32)

        def outputs(params: Any, inputs: Any) -> Any:
            return step.model.apply(params, model_state, inputs, key=key, train=True)[0]

        if tokens is None:
            return _forward_and_backward(outputs, (state.params, inputs), step.policy.compute_dtype)
        return _forward_and_backward(lambda params: outputs(params, tokens), (state.params,), step.policy.compute_dtype)

    flops = sum(_FORWARD_AND_BACKWARD * block.count * block.flops for block in blocks) / microbatches
    moved = sum(_FORWARD_AND_BACKWARD * block.count * block.bytes for block in blocks) / microbatches
    return _Call("whole model", microbatches, flops, moved, make)


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
