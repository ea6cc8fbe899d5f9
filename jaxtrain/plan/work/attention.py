"""What attention runs on where a step is planned for, by the table of `ops/attention/table.py`, and what that holds."""

from dataclasses import dataclass, replace

from jaxtrain.config.models import TransformerConfig
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.ops.attention.blocks import block_size, computed_share, pairs_at_once, visible_pairs
from jaxtrain.ops.attention.ring_blocks import score_elements
from jaxtrain.plan.catalogue.hardware import Target

# Bytes moved for each score that is computed outside a kernel: in float32 it is written, masked, reduced and
# normalised, and read again for the values. Each pass of a CPU over them goes through memory.
_SCORE_BYTES = {"cpu": 64}
_SCORE_BYTES_ELSEWHERE = 16


@dataclass(frozen=True)
class AttentionWork:
    """Attention of one layer on one device.

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
    score_bytes: int
    keeps_output: bool
    again: float = 0.5


def attention_work(config: Config, target: Target, length: int) -> AttentionWork | None:
    """The attention of a config on a target; None: the model has none.

    Args:
        config: with degrees resolved.
        target: hardware and count.
        length: tokens of a row.
    """
    model = config.model
    if not isinstance(model, TransformerConfig):
        return None
    score_bytes = _SCORE_BYTES.get(target.hardware.kind, _SCORE_BYTES_ELSEWHERE)
    context = int(config.parallel.context)
    match context_way(config, model):
        case "ring":  # one block of keys at a time
            # Zig-zag order gives every device of a ring as many.
            elements = score_elements(0, size=context, length=length, causal=model.causal)
            computed = elements / (length * length / context)
            return AttentionWork("context", computed, (length / context) ** 2, score_bytes, False)
        case "gather":  # all keys, for the queries of this device
            return AttentionWork("context", 1.0, length * length / context, score_bytes, False, again=0.0)
        case "all_to_all":  # whole sequences of some of the heads
            whole = _whole_sequence(config, model, target, length)
            return replace(whole, pairs_at_once=whole.pairs_at_once / context)
        case _:
            return _whole_sequence(config, model, target, length)


def context_way(config: Config, model: TransformerConfig) -> str | None:
    """How attention crosses `context`, as `ops/attention/context.py` chooses; None: it does not.

    Args:
        config: with degrees resolved.
        model: its model.
    """
    parallel = config.parallel
    if int(parallel.context) == 1 or parallel.context_attention != "auto":
        return None if int(parallel.context) == 1 else parallel.context_attention
    if int(parallel.pipe) == 1 and model.sliding_window is None and model.attention_softcap is None:
        return "ring"
    return "gather" if model.num_heads % (int(parallel.tensor) * int(parallel.context)) else "all_to_all"


def _whole_sequence(config: Config, model: TransformerConfig, target: Target, length: int) -> AttentionWork:
    """Attention of whole sequences on one device."""
    kind = target.hardware.kind
    score_bytes = _SCORE_BYTES.get(kind, _SCORE_BYTES_ELSEWHERE)
    name = _implementation(config, model, target, length)
    causal, window = model.causal, model.sliding_window
    match name:
        case "cudnn" | "splash":
            seen = visible_pairs(length, causal=causal, window=window) / length**2
            return AttentionWork(name, seen, 0.0, 0, name == "splash")
        case "blockwise":
            block = block_size(kind, length)
            pairs = pairs_at_once(length, block, causal=causal, window=window)
            return AttentionWork(
                name, computed_share(length, block, causal=causal, window=window), pairs, score_bytes, True
            )
        case _:
            return AttentionWork(name, 1.0, length * length, score_bytes, False, again=0.0)


def _implementation(config: Config, model: TransformerConfig, target: Target, length: int) -> str:
    """The first of the platform's table that takes the case, or the one that the config names."""
    kind = target.hardware.kind
    head_dim = model.head_dim or model.embed_dim // model.num_heads
    ampere = target.hardware.title.startswith("NVIDIA") and "bf16" in target.hardware.peak_flops
    sixteen_bits = config.precision.policy in ("bf16", "bf16_pure", "fp16", "fp8")
    plain = model.attention_softcap is None and (model.causal or model.sliding_window is None)
    runs = {
        "cudnn": ampere and sixteen_bits and plain and head_dim % 8 == 0 and head_dim <= 128,
        "splash": kind == "tpu" and length % 128 == 0 and head_dim % 64 == 0,
    }
    if model.attention != "auto":
        if not runs.get(model.attention, True):
            raise ConfigError(
                f"model.attention={model.attention} cannot run on {target.name} with head_dim={head_dim}, "
                f"data.sequence_length={length} and precision.policy={config.precision.policy}; "
                "use model.attention=auto"
            )
        return model.attention
    for name, possible in runs.items():
        if possible:
            return name
    return "blockwise" if length > block_size(kind, length) else "reference"
