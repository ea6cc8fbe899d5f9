"""What attention computes, with which kernel, in which blocks, and how it crosses `context`. No jax here.

The step asks with its arrays on its devices (`table.py`), the planner with a config on hardware that may be absent.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import nearest_multiples


@dataclass(frozen=True)
class AttentionForm:
    """A kind of attention, apart from its arrays; every implementation takes all of it or refuses.

    Attributes:
        causal: a query sees keys at or before its own position only.
        window: a query sees keys less than this many positions away (its own counts as one); None: any distance.
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2); None: as they are.
        relative: a bias by the distance of key and query is added to the scores (T5; see `distance_bias`).
        sinks: each head's softmax counts one more, learned score, whose value is 0 (gpt-oss).
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    relative: bool = False
    sinks: bool = False


CAUSAL = AttentionForm()


# --- Blocks of queries on one device. ---

# Queries of a block: (sequences up to this, block). Small ones skip more of the future, large ones make better
# products: on CPU a step of bench_cpu (256 tokens) takes 2.7 % less with 128 than with 64, one of quickstart (128) 10 %
# more. Accelerators want them larger.
_BLOCKS = {"cpu": ((128, 64), (math.inf, 128))}
_LARGE = ((math.inf, 256),)
# Groups of blocks, each with its own keys: 8 leave 1/16 of the products above the causal diagonal's half.
_MAX_GROUPS = 8
# Bytes of float32 scores, for each core of a CPU, that its caches keep from one operation to the next. Measured on 2
# cores with 1 MiB of second-level cache each, 16 rows of 6 heads, 256 tokens: 48 ms in parts of 0.8 MiB a core, 51 in
# parts of 0.4 or 1.6, 60 all at once.
_SCORES_IN_CACHE = 2**20
_FP32 = 4


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of `size` queries from `start` on, each of which meets `width` keys.

    The keys are those from 0 on, or with a window, which moves with the block, those from `window - 1` before its first
    query on (moved inwards at the ends of the sequence).
    """

    start: int
    size: int
    blocks: int
    width: int
    window: int | None


def block_size(platform: str, length: int) -> int:
    """Queries of a block on a platform (cpu, gpu, tpu) for sequences of a length."""
    return next(block for limit, block in _BLOCKS.get(platform, _LARGE) if length <= limit)


def cut_sequence(length: int, block: int, *, causal: bool, window: int | None) -> list[QueryBlocks]:
    """The blocks of a sequence, grouped by the keys that they meet; the last holds the rest of the queries."""
    block = min(block, length)
    rest = [(length - length % block, 1, length % block)] if length % block else []
    if window is not None:
        width = window - 1 + block + (0 if causal else window - 1)
        if width < length:
            return [
                QueryBlocks(start, size, count, width, window)
                for start, count, size in [(0, length // block, block), *rest]
            ]
    full = length // block
    num_groups = min(full, _MAX_GROUPS) if causal else 1
    bounds = [full * index // num_groups for index in range(num_groups + 1)]
    rows = [(low * block, high - low, block) for low, high in itertools.pairwise(bounds)] + rest
    return [
        QueryBlocks(start, size, count, start + count * size if causal else length, None) for start, count, size in rows
    ]


def computed_share(length: int, block: int, *, causal: bool, window: int | None) -> float:
    """Of all pairs of a query and a key, those that are multiplied."""
    groups = cut_sequence(length, block, causal=causal, window=window)
    return sum(group.blocks * group.size * group.width for group in groups) / length**2


def visible_pairs(length: int, *, causal: bool, window: int | None, chunked: bool = False) -> float:
    """Pairs of a query and a key that see each other, as areas: half of all where order matters; window None: all."""
    window = length if window is None else min(window, length)
    if chunked:
        return (0.5 if causal else 1) * (length // window * window**2 + (length % window) ** 2)
    return (1 if causal else 2) * (window * length - window**2 / 2)


def pairs_at_once(length: int, block: int, *, causal: bool, window: int | None) -> int:
    """The most pairs of a query and a key, of one row and head, whose scores exist at once."""
    return max(group.size * group.width for group in cut_sequence(length, block, causal=causal, window=window))


def row_parts(rows: int, scores: int, cores: int) -> int:
    """In how many parts of equal size a CPU attends to its rows: the fewest whose scores stay in its caches.

    Of one row so many scores, of all heads, exist at once; they are divided among the cores.
    """
    for parts in range(1, rows):
        if rows % parts == 0 and rows // parts * scores * _FP32 <= _SCORES_IN_CACHE * cores:
            return parts
    return rows


# --- Kernels. ---

# Every implementation, by its name in `model.attention`.
KERNELS = ("cudnn", "splash", "blockwise", "reference")
# Platform of the step -> implementations in the order in which they are tried.
ORDER: Mapping[str, tuple[str, ...]] = {
    "gpu": ("cudnn", "blockwise", "reference"),
    "tpu": ("splash", "blockwise", "reference"),
    "cpu": ("blockwise", "reference"),
}
ELSEWHERE = ("blockwise", "reference")
_CUDNN_DTYPES = ("bfloat16", "float16")
_CUDNN_HEAD_DIMS, _CUDNN_LARGEST_HEAD_DIM, _HOPPER_LARGEST_HEAD_DIM = 8, 128, 256
# The splash kernel's tiles are lanes of a TPU register wide.
SPLASH_LANES = 128
# Mosaic refuses head dims that fill neither a register nor half of one.
_SPLASH_HEAD_DIMS = 64


@dataclass(frozen=True)
class AttentionCase:
    """What decides whether a kernel takes an attention of a sequence to itself.

    Attributes:
        platform: gpu (NVIDIA's), tpu, cpu or another one.
        dtype: name of the dtype of the queries, as in bfloat16.
        length: tokens of a sequence.
        head_dim: width of a head.
        form: which pairs of a query and a key are computed.
        packed: whether several documents, or chunks, share a row and do not see each other.
        divides: whether batch and heads divide by the mesh.
        capability: major and minor compute capability of a GPU; None: not known.
        before_ampere: whether a GPU of unknown capability is known to be older than compute capability 8.0.
        hopper_here: whether the process runs on a GPU of the Hopper generation or a later one.
    """

    platform: str
    dtype: str
    length: int
    head_dim: int
    form: AttentionForm
    packed: bool = False
    divides: bool = True
    capability: tuple[int, int] | None = None
    before_ampere: bool = False
    hopper_here: bool = False


def _cudnn_reasons(case: AttentionCase) -> dict[str, bool]:
    form, capability = case.form, case.capability
    # jax compiles for Hopper's larger heads only where such a card is present.
    largest = _HOPPER_LARGEST_HEAD_DIM if case.hopper_here else _CUDNN_LARGEST_HEAD_DIM
    return {
        f"the platform is {case.platform}": case.platform != "gpu",
        f"the dtype is {case.dtype}, it takes {' and '.join(_CUDNN_DTYPES)}": case.dtype not in _CUDNN_DTYPES,
        "documents or chunks are packed": case.packed,  # the kernel knows documents by their ends only
        "scores are capped": form.softcap is not None,
        "positions are relative": form.relative,  # its bias would have to be [H, L, L] in memory
        "attention has sinks": form.sinks,
        "the window looks ahead": form.window is not None and not form.causal,
        "batch or heads do not divide by the mesh": not case.divides,
        # The tensor cores of the Ampere generation.
        "the GPU is older than compute capability 8.0": case.before_ampere or (capability or (8, 0)) < (8, 0),
        f"the head dim is {case.head_dim}, it takes multiples of {_CUDNN_HEAD_DIMS} up to {largest}": bool(
            case.head_dim % _CUDNN_HEAD_DIMS or case.head_dim > largest
        ),
        # jax refuses it where the kernel is differentiated.
        f"the sequence is {case.length} long, it takes even lengths": bool(case.length and case.length % 2),
    }


def _splash_reasons(case: AttentionCase) -> dict[str, bool]:
    return {
        f"the platform is {case.platform}": case.platform != "tpu",
        "positions are relative": case.form.relative,
        "attention has sinks": case.form.sinks,
        "batch or heads do not divide by the mesh": not case.divides,
        f"the sequence is {case.length} long, it takes multiples of {SPLASH_LANES}": bool(
            case.length and case.length % SPLASH_LANES
        ),
        f"the head dim is {case.head_dim}, it takes multiples of {_SPLASH_HEAD_DIMS}": bool(
            case.head_dim % _SPLASH_HEAD_DIMS
        ),
    }


def refusal(kernel: str, case: AttentionCase) -> str | None:
    """Why an implementation cannot or should not run a case, or None."""
    block, reasons = block_size(case.platform, case.length), {}
    match kernel:
        case "cudnn":
            reasons = _cudnn_reasons(case)
        case "splash":
            reasons = _splash_reasons(case)
        case "blockwise":  # it can always compute it
            reasons = {f"the sequence is one block of {block}": case.length <= block}
    return next((why for why, holds in reasons.items() if holds), None)


def choose_kernel(
    order: Sequence[str], refuses: Callable[[str], str | None], wanted: str, *, where: str = ""
) -> tuple[str, list[tuple[str, str]]]:
    """The first implementation that takes a case, or the one that a user names, and (name, reason) of those before it.

    Args:
        order: names in the order in which they are tried; the last one refuses nothing.
        refuses: name -> why it cannot or should not run, or None.
        wanted: auto, or a name.
        where: hardware for the message, as in " on h100x8".

    Raises:
        ConfigError: a wanted implementation that is unknown or cannot take the case.
    """
    if wanted != "auto":
        if wanted not in KERNELS:
            raise ConfigError(f"unknown model.attention={wanted!r}; known: auto, {', '.join(KERNELS)}")
        # Blockwise refuses because another one would be faster, not because it cannot.
        why = None if wanted == "blockwise" else refuses(wanted)
        if why is not None:
            raise ConfigError(f"model.attention={wanted} cannot run{where}: {why}; use model.attention=auto")
        return wanted, []
    refused: list[tuple[str, str]] = []
    for name in order[:-1]:
        if (why := refuses(name)) is None:
            return name, refused
        refused.append((name, why))
    return order[-1], refused


# --- A sequence that is sharded over mesh axis `context`. ---


# In the order in which "auto" tries them: ring moves least and needs least memory, gather runs on any heads.
_CONTEXT_WAYS = ("ring", "all_to_all", "gather")


@dataclass(frozen=True)
class ContextCase:
    """What decides which way attention crosses `context`.

    Attributes:
        context, pipe: degrees of the axes.
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
    heads, parts, use = case.num_heads, case.head_parts, "use all_to_all, gather or auto"
    if case.form.relative or case.form.sinks:
        key = "model.position=relative" if case.form.relative else "model.attention_sinks"
        return (
            f"parallel.context={case.context} shards the sequence, which {key} does not support; "
            "use parallel.context=1 with fsdp or tensor in its place"
        )
    if name == "ring" and (case.form.window is not None or case.form.softcap is not None):
        return f"parallel.context_attention=ring has no model.sliding_window and no model.attention_softcap; {use}"
    # A collective-permute that only some stages reach waits forever, because its rendezvous is among all devices; the
    # other collectives have groups.
    if name == "ring" and case.pipe > 1:
        return f"parallel.context_attention=ring cannot run with parallel.pipe={case.pipe}; {use}"
    if heads % parts:
        return (
            f"model.num_heads={heads} does not divide by parallel.tensor={parts}; "
            f"make it {nearest_multiples(heads, parts)}, or use parallel.tensor={math.gcd(heads, parts)}"
        )
    if name == "all_to_all" and heads % (parts * case.context):
        other = "gather" if case.pipe > 1 else "ring"
        return (
            f"parallel.context_attention={name}: model.num_heads={heads} does not divide by "
            f"parallel.context={case.context} x parallel.tensor={parts}; make it "
            f"{nearest_multiples(heads, parts * case.context)}, or use "
            f"parallel.context={math.gcd(heads // parts, case.context)} or parallel.context_attention={other}"
        )
    return None


def choose_context_way(wanted: str, case: ContextCase) -> str:
    """The way that is taken, for auto the first that can be; a ConfigError where none can with these heads."""
    problem = None
    for name in _CONTEXT_WAYS if wanted == "auto" else (wanted,):
        problem = _problem(name, case)
        if problem is None:
            return name
    raise ConfigError(str(problem))


def check_context_length(wanted: str, case: ContextCase, sequence_length: int) -> None:
    """Raise a ConfigError with sizes that work where a sequence cannot be sharded as the chosen way needs it."""
    size = case.context
    if size == 1:
        return
    halves = case.form.causal and choose_context_way(wanted, case) == "ring"
    chunks = size * 2 if halves else size
    if sequence_length % chunks:
        shown = f"2 x parallel.context={size} (causal ring attention)" if halves else f"parallel.context={size}"
        fits_gather = halves and sequence_length % size == 0
        other = "context_attention=gather" if fits_gather else f"context={math.gcd(sequence_length, size)}"
        raise ConfigError(
            f"data.sequence_length={sequence_length} does not divide by {shown}; "
            f"make it {nearest_multiples(sequence_length, chunks)}, or use parallel.{other}"
        )


# --- Blocks of a ring, in the zig-zag order of `context.py`: of 2n chunks, device i computes chunks i and 2n-1-i. ---

# A block of scores as (query half, key half): 0 or 1, or bool [] where it depends on the device.
ScoreBlock = tuple[Any, Any]


def home(chunk: int, size: int) -> int:
    """Return the device of a ring of `size` devices that computes a chunk, of 2 * size in the order of the sequence."""
    return min(chunk, 2 * size - 1 - chunk)


def own_blocks(*, causal: bool) -> tuple[ScoreBlock, ...]:
    """Return the blocks of a device's queries and its own keys.

    Pairs of equal halves come first; in a causal model their upper triangles are masked.
    """
    return ((0, 0), (1, 1), (1, 0)) if causal else ((0, 0),)


def passing_blocks(own: Any, source: Any, *, causal: bool) -> tuple[ScoreBlock, ...]:
    """Return the blocks of a device's queries and the keys of another device; nothing in them is masked.

    In zig-zag order the late half of each device's queries sees the early half of every device's keys. Besides, its
    early half sees the early half of an earlier device's keys, and its late half the late half of a later device's.

    Args:
        own, source: index of the device with the queries, and of that with the keys; int or int32 [].
        causal: whether a query sees only keys at or before its own position.
    """
    later = source > own
    return ((1, 0), (later, later)) if causal else ((0, 0),)


def score_elements(own: int, *, size: int, length: int, causal: bool) -> int:
    """Count the products of a query and a key that device `own` of a ring computes per head, masked ones included."""
    others = (passing_blocks(own, source, causal=causal) for source in range(size) if source != own)
    count = len(own_blocks(causal=causal)) + sum(len(blocks) for blocks in others)
    return count * (length // (size * (2 if causal else 1))) ** 2
