"""Which kernel computes attention: what each one takes, and the order in which they are tried. No jax here.

The step asks with its arrays on its devices (`table.py`), the planner with a config on hardware that may be absent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.errors import ConfigError
from jaxtrain.ops.attention.blocks import block_size
from jaxtrain.ops.attention.form import AttentionForm

# Every implementation, by its name in `model.attention`.
KERNELS = ("cudnn", "splash", "blockwise", "reference")
# Platform of the step -> implementations in the order in which they are tried.
ORDER: Mapping[str, tuple[str, ...]] = {
    "gpu": ("cudnn", "blockwise", "reference"),
    "tpu": ("splash", "blockwise", "reference"),
    "cpu": ("blockwise", "reference"),
}
ELSEWHERE = ("blockwise", "reference")
# These refuse because another one would be faster, not because they cannot: a user who names one gets it.
_ADVICE = ("blockwise",)

# cuDNN's fused attention needs tensor cores of the Ampere generation.
_LEAST_CAPABILITY = (8, 0)
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
        packed: whether several documents share a row and do not see each other.
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


def cudnn_refusal(case: AttentionCase) -> str | None:
    """Why cuDNN's kernel cannot take a case, or None."""
    form, capability = case.form, case.capability
    if case.platform != "gpu":
        return f"the platform is {case.platform}"
    if case.dtype not in _CUDNN_DTYPES:
        return f"the dtype is {case.dtype}, it takes {' and '.join(_CUDNN_DTYPES)}"
    if case.packed:  # the kernel knows documents by their ends only
        return "documents are packed"
    if form.softcap is not None:
        return "scores are capped"
    if form.relative:  # its bias would have to be [H, L, L] in memory
        return "positions are relative"
    if form.window is not None and not form.causal:
        return "the window looks ahead"
    if not case.divides:
        return "batch or heads do not divide by the mesh"
    if case.before_ampere:
        return "the GPU is older than compute capability 8.0"
    if capability is not None and capability < _LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, it takes 8.0"
    # jax compiles for Hopper's larger heads only where such a card is present.
    largest = _HOPPER_LARGEST_HEAD_DIM if case.hopper_here else _CUDNN_LARGEST_HEAD_DIM
    if case.head_dim % _CUDNN_HEAD_DIMS or case.head_dim > largest:
        return f"the head dim is {case.head_dim}, it takes multiples of {_CUDNN_HEAD_DIMS} up to {largest}"
    if case.length % 2:  # jax refuses it where the kernel is differentiated
        return f"the sequence is {case.length} long, it takes even lengths"
    return None


def splash_refusal(case: AttentionCase) -> str | None:
    """Why the splash kernel cannot take a case, or None."""
    if case.platform != "tpu":
        return f"the platform is {case.platform}"
    if case.form.relative:
        return "positions are relative"
    if not case.divides:
        return "batch or heads do not divide by the mesh"
    if case.length % SPLASH_LANES:
        return f"the sequence is {case.length} long, it takes multiples of {SPLASH_LANES}"
    if case.head_dim % _SPLASH_HEAD_DIMS:
        return f"the head dim is {case.head_dim}, it takes multiples of {_SPLASH_HEAD_DIMS}"
    return None


def blockwise_refusal(platform: str, length: int) -> str | None:
    """Why attention in blocks would not help, or None; it can always compute it."""
    block = block_size(platform, length)
    return f"the sequence is one block of {block}" if length <= block else None


def refusal(kernel: str, case: AttentionCase) -> str | None:
    """Why an implementation cannot or should not run a case, or None."""
    match kernel:
        case "cudnn":
            return cudnn_refusal(case)
        case "splash":
            return splash_refusal(case)
        case "blockwise":
            return blockwise_refusal(case.platform, case.length)
    return None


def choose_kernel(
    order: Sequence[str], refuses: Callable[[str], str | None], wanted: str, *, where: str = ""
) -> tuple[str, list[tuple[str, str]]]:
    """The first implementation that takes a case, or the one that a user names.

    Args:
        order: names in the order in which they are tried; the last one refuses nothing.
        refuses: name -> why it cannot or should not run, or None.
        wanted: auto, or a name.
        where: hardware for the message, as in " on h100x8".

    Returns:
        The name, and (name, reason) of each that was tried before it.

    Raises:
        ConfigError: a wanted implementation that is unknown or cannot take the case.
    """
    if wanted != "auto":
        if wanted not in KERNELS:
            raise ConfigError(f"unknown model.attention={wanted!r}; known: auto, {', '.join(KERNELS)}")
        why = None if wanted in _ADVICE else refuses(wanted)
        if why is not None:
            raise ConfigError(f"model.attention={wanted} cannot run{where}: {why}; use model.attention=auto")
        return wanted, []
    refused: list[tuple[str, str]] = []
    for name in order:
        why = refuses(name)
        if why is None:
            return name, refused
        refused.append((name, why))
    raise AssertionError("the reference refuses nothing")
