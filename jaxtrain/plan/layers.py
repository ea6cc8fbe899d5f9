"""What attention and experts of a layer run on where a step is planned for, by the rules of the step. No jax here."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtrain.config.model import TransformerConfig
from jaxtrain.config.rope import StateSpaceConfig
from jaxtrain.config.schema import Config
from jaxtrain.layout.rules import AXES
from jaxtrain.models.shipped.shapes import Structure
from jaxtrain.ops.attention.rules import (
    ELSEWHERE,
    ORDER,
    AttentionCase,
    AttentionForm,
    ContextCase,
    block_size,
    check_context_length,
    choose_context_way,
    choose_kernel,
    computed_share,
    pairs_at_once,
    refusal,
    score_elements,
    visible_pairs,
)
from jaxtrain.ops.experts.rows import is_one_round, multiplied_rows, round_rows
from jaxtrain.parallel.division import microbatches_of
from jaxtrain.plan.targets import Target
from jaxtrain.precision.dtypes import POLICY_DTYPES

# Bytes moved for each score that is computed outside a kernel: in float32 it is written, masked, reduced and
# normalised, and read again for the values. Each pass of a CPU over them goes through memory.
_SCORE_BYTES = {"cpu": 64, "gpu": 16, "tpu": 16}


@dataclass(frozen=True)
class AttentionWork:
    """Attention of one layer on one device; of layers of several kinds the mean, and what the largest holds.

    Attributes:
        name: implementation: cudnn, splash, blockwise or reference; context for a ring and gathered keys.
        computed: of all pairs of a query and a key, those that are multiplied.
        pairs_at_once: scores that exist in memory at once, a row and head; 0 where they stay inside a kernel.
        score_bytes: moved for each computed score.
        keeps_output: its result and statistics are named for the remat policies, so that "dots" keeps them.
        again: share of its forward pass that its backward pass computes again whatever the remat policy keeps: the
            scores, one product of the two, where none are kept.
    """

    name: str
    computed: float
    pairs_at_once: float
    score_bytes: float
    keeps_output: bool
    again: float = 0.5


def stack_attention(config: Config, target: Target, structure: Structure | None) -> tuple[AttentionWork, ...]:
    """The attention of each stack of a model to itself, and after those that of a decoder to the encoder's output.

    Raises:
        ConfigError: attention that the step would refuse.
    """
    stacks = () if structure is None else structure.stacks
    found = [attention_work(config, stack.blocks, target, stack.length) for stack in stacks]
    for stack in stacks:
        if stack.memory_length is not None:  # the plain formula on every platform
            pairs = stack.length * stack.memory_length / int(config.parallel.context)
            found.append(AttentionWork("reference", 1.0, pairs, _SCORE_BYTES[target.hardware.kind], False, again=0.0))
    return tuple(found)


def attention_work(config: Config, model: TransformerConfig, target: Target, length: int) -> AttentionWork:
    """The attention of a stack of blocks to itself, in rows of so many tokens."""
    forms = attention_forms(model)
    return _mixed([(layers, _of_form(config, model, form, target, length)) for form, layers in forms.items()])


def attention_forms(model: TransformerConfig) -> dict[AttentionForm, int]:
    """The kinds of attention that a model's layers have, with the number of layers of each."""
    learned = (model.position == "relative", model.attention_sinks, model.state_space is not None)
    forms = [AttentionForm(model.causal, window, model.attention_softcap, *learned) for window in model.windows]
    return dict(Counter(forms))


def _mixed(kinds: Sequence[tuple[int, AttentionWork]]) -> AttentionWork:
    """Attention of a stack whose layers are of several kinds, from (layers, attention of one of them)."""
    if len(kinds) == 1:
        return kinds[0][1]
    computed = sum(count * one.computed for count, one in kinds)
    return replace(
        max((one for _, one in kinds), key=lambda one: one.pairs_at_once),
        computed=computed / sum(count for count, _ in kinds),
        score_bytes=sum(count * one.computed * one.score_bytes for count, one in kinds) / computed,
        keeps_output=all(one.keeps_output for _, one in kinds),
        again=sum(count * one.computed * one.again for count, one in kinds) / computed,
    )


def _of_form(
    config: Config, model: TransformerConfig, form: AttentionForm, target: Target, length: int
) -> AttentionWork:
    """Attention of the layers of one kind."""
    score_bytes, context = _SCORE_BYTES[target.hardware.kind], int(config.parallel.context)
    check_context_length(config.parallel.context_attention, _context_case(config, model, form), length)
    match context_way(config, model, form):
        case "ring":  # one block of keys at a time
            # Zig-zag order gives every device of a ring as many.
            elements = score_elements(0, size=context, length=length, causal=form.causal)
            computed = elements / (length * length / context)
            return AttentionWork("context", computed, (length / context) ** 2, score_bytes, False)
        case "gather":  # all keys, for the queries of this device
            return AttentionWork("context", 1.0, length * length / context, score_bytes, False, again=0.0)
        case "all_to_all":  # whole sequences of some of the heads
            whole = _whole_sequence(config, model, form, target, length)
            return replace(whole, pairs_at_once=whole.pairs_at_once / context)
        case _:
            return _whole_sequence(config, model, form, target, length)


def context_way(config: Config, model: TransformerConfig, form: AttentionForm | None = None) -> str | None:
    """How attention of a form (None: of the first layer) crosses `context`, by the rule of the step; None: it does not.

    Raises:
        ConfigError: a way that cannot be taken on this mesh with these heads.
    """
    case = _context_case(config, model, form or next(iter(attention_forms(model))))
    return None if case.context == 1 else choose_context_way(config.parallel.context_attention, case)


def _context_case(config: Config, model: TransformerConfig, form: AttentionForm) -> ContextCase:
    context, pipe, tensor = (int(getattr(config.parallel, axis)) for axis in ("context", "pipe", "tensor"))
    return ContextCase(context, pipe, tensor, model.num_heads, model.kv_heads, form)


def _whole_sequence(
    config: Config, model: TransformerConfig, form: AttentionForm, target: Target, length: int
) -> AttentionWork:
    """Attention of whole sequences on one device, by the kernel that the step would run there."""
    if model.state_space is not None:
        return _state_space(model.state_space, model, length, _SCORE_BYTES[target.hardware.kind])
    hardware, visible = target.hardware, {"causal": form.causal, "window": form.window}
    nvidia = hardware.vendor == "nvidia"
    case = AttentionCase(
        # What jax calls AMD's GPUs, for which it has no kernel.
        platform="rocm" if hardware.kind == "gpu" and not nvidia else hardware.kind,
        dtype=POLICY_DTYPES[config.precision.policy].compute,
        length=length,
        head_dim=model.head_width,
        form=form,
        packed=model.local_layers is not None and model.local_layers.chunked and length > (form.window or length),
        # bf16 came with that generation.
        before_ampere=nvidia and "bf16" not in hardware.peak_flops,
    )
    order, refuses = ORDER.get(case.platform, ELSEWHERE), functools.partial(refusal, case=case)
    name = choose_kernel(order, refuses, model.attention, where=f" on {target.name}")[0]
    score_bytes = _SCORE_BYTES[hardware.kind]
    if name in ("cudnn", "splash"):
        return AttentionWork(name, visible_pairs(length, **visible) / length**2, 0.0, 0, name == "splash")
    if name == "blockwise":
        block = block_size(hardware.kind, length)
        pairs = pairs_at_once(length, block, **visible)
        return AttentionWork(name, computed_share(length, block, **visible), pairs, score_bytes, True)
    return AttentionWork(name, 1.0, length * length, score_bytes, False, again=0.0)


def _state_space(said: StateSpaceConfig, model: TransformerConfig, length: int, score_bytes: float) -> AttentionWork:
    """A state space by chunks as the attention that multiplies as much: scores of a chunk, and a state of N numbers."""
    chunk, width, states = min(said.chunk, length), model.head_width, said.state_dim
    # Scores are products of the groups; values, writing a state and reading it are of the heads.
    products = chunk * (states * said.groups / model.num_heads + width) + 2 * width * states
    computed = products / (2 * width * length)
    return AttentionWork("state space", computed, chunk**2, score_bytes * chunk / length / computed, False, again=1.0)


@dataclass(frozen=True)
class ExpertWork:
    """Experts of one layer on one device, for each token of the device.

    Attributes:
        rows: of the grouped matmuls.
        multiplied: rows that are multiplied with the kernel of one expert each, those that fill up blocks among them.
        again: forward passes that the backward pass runs whatever the remat policy keeps.
        sums_gradients: whether a loop sums gradients of the kernels in float32, beside those of the first round.
    """

    rows: float
    multiplied: float
    again: float = 0.0
    sums_gradients: bool = False


def expert_work(config: Config, target: Target, tokens: float) -> ExpertWork | None:
    """The experts of a config on a target for tokens of one microbatch on one device, where the routing is even."""
    model = config.model
    if not isinstance(model, TransformerConfig) or model.experts is None:
        return None
    shards, choices, total = int(config.parallel.expert), model.experts.experts_per_token, model.experts.num_experts
    sizes = (tokens, choices, total, shards)
    # A device gets from each as many rows as it sends to each.
    rows = tokens * min(choices, total) if shards == 1 else shards * round_rows(*sizes)
    multiplied = multiplied_rows(target.hardware.kind, rows, tokens * choices, total // shards)
    again = 1.0 if in_manual_region(config) else 0.0
    return ExpertWork(rows / tokens, multiplied / tokens, again, shards > 1 and not is_one_round(*sizes))


def in_manual_region(config: Config) -> bool:
    """Whether `run_manually` enters inside another manual region, and its backward pass computes the forward again.

    A stage of a pipeline is such a region, and so is accumulation over `data`.
    """
    parallel = config.parallel
    held = {"pipe", "data"} if int(parallel.pipe) > 1 else {"data"}
    outer = int(parallel.pipe) > 1 or (int(parallel.data) > 1 and microbatches_of(config) > 1)
    return outer and any(int(getattr(parallel, axis)) > 1 for axis in AXES if axis not in held)
