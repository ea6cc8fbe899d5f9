"""How attention crosses mesh axis `context`: what each way takes, and the order in which they are tried. No jax here.

The step and the planner both ask.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import nearest_multiples
from jaxtrain.ops.attention.form import AttentionForm


@dataclass(frozen=True)
class ContextWay:
    """What one way of attending over a sharded sequence takes.

    Attributes:
        with_pipe: may run inside a pipeline. A collective-permute that only some stages reach waits forever, because
            its rendezvous is among all devices; the other collectives have groups.
        splits_heads: the heads must divide by `context` as well.
        halves: a causal sequence is partitioned into two chunks per device.
        plain: knows neither window nor softcap.
    """

    with_pipe: bool
    splits_heads: bool
    halves: bool
    plain: bool = False


# In the order in which "auto" tries them: ring moves least and needs least memory, gather runs on any heads.
CONTEXT_WAYS: Mapping[str, ContextWay] = {
    "ring": ContextWay(with_pipe=False, splits_heads=False, halves=True, plain=True),
    "all_to_all": ContextWay(with_pipe=True, splits_heads=True, halves=False),
    "gather": ContextWay(with_pipe=True, splits_heads=False, halves=False),
}


@dataclass(frozen=True)
class ContextCase:
    """What decides which way attention crosses `context`.

    Attributes:
        context: degree of the axis.
        pipe: degree of the axis.
        head_parts: into how many parts the other axes shard the heads.
        num_heads, num_kv_heads: of the model.
        form: which pairs of a query and a key are computed.
    """

    context: int
    pipe: int
    head_parts: int
    num_heads: int
    num_kv_heads: int
    form: AttentionForm


def _problem(name: str, case: ContextCase) -> str | None:
    """Why a way cannot be taken; None: it can."""
    way, heads, parts = CONTEXT_WAYS[name], case.num_heads, case.head_parts
    if case.form.relative:
        return (
            f"parallel.context={case.context} shards the sequence, which model.position=relative does not support; "
            "use parallel.context=1 with fsdp or tensor in its place, or model.position=rotary"
        )
    if way.plain and (case.form.window is not None or case.form.softcap is not None):
        return (
            f"parallel.context_attention={name} knows neither model.sliding_window nor model.attention_softcap; "
            "use all_to_all, gather or auto"
        )
    if heads % case.num_kv_heads:
        return f"model.num_heads={heads} is not a multiple of model.num_kv_heads={case.num_kv_heads}"
    if not way.with_pipe and case.pipe > 1:
        return (
            f"parallel.context_attention={name} cannot run with parallel.pipe={case.pipe}; "
            "use all_to_all, gather or auto"
        )
    if heads % parts:
        return (
            f"model.num_heads={heads} does not divide by parallel.tensor={parts}; "
            f"make it {nearest_multiples(heads, parts)}, or use parallel.tensor={math.gcd(heads, parts)}"
        )
    if way.splits_heads and heads % (parts * case.context):
        other = "gather" if case.pipe > 1 else "ring"
        return (
            f"parallel.context_attention={name}: model.num_heads={heads} does not divide by "
            f"parallel.context={case.context} x parallel.tensor={parts}; make it "
            f"{nearest_multiples(heads, parts * case.context)}, or use "
            f"parallel.context={math.gcd(heads // parts, case.context)} or parallel.context_attention={other}"
        )
    return None


def choose_context_way(wanted: str, case: ContextCase) -> str:
    """The way that is taken: ring, all_to_all or gather.

    Args:
        wanted: one of them, or auto: the first of `CONTEXT_WAYS` that can be taken.
        case: mesh, heads and form.

    Raises:
        ConfigError: an unknown name, or a way that cannot be taken on this mesh with these heads.
    """
    if wanted != "auto" and wanted not in CONTEXT_WAYS:
        raise ConfigError(f"unknown parallel.context_attention={wanted!r}; known: auto, {', '.join(CONTEXT_WAYS)}")
    problem = None
    for name in CONTEXT_WAYS if wanted == "auto" else (wanted,):
        problem = _problem(name, case)
        if problem is None:
            return name
    raise ConfigError(str(problem))


def check_context_length(wanted: str, case: ContextCase, sequence_length: int) -> None:
    """Raise where a sequence cannot be sharded over `context` as the chosen way needs it.

    Args:
        wanted: as in `choose_context_way`.
        case: mesh, heads and form.
        sequence_length: tokens per row.

    Raises:
        ConfigError: from `choose_context_way`, or a length that does not divide; names sizes that work.
    """
    size = case.context
    if size == 1:
        return
    halves = case.form.causal and CONTEXT_WAYS[choose_context_way(wanted, case)].halves
    chunks = size * 2 if halves else size
    if sequence_length % chunks:
        shown = f"2 x parallel.context={size} (causal ring attention)" if halves else f"parallel.context={size}"
        fits_gather = halves and sequence_length % size == 0
        other = "context_attention=gather" if fits_gather else f"context={math.gcd(sequence_length, size)}"
        raise ConfigError(
            f"data.sequence_length={sequence_length} does not divide by {shown}; "
            f"make it {nearest_multiples(sequence_length, chunks)}, or use parallel.{other}"
        )
