"""The records of a step's work on one device, and what is run again of it. No jax here."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.config.schema import RematConfig
from jaxtrain.plan.work.attention import AttentionWork
from jaxtrain.plan.work.experts import ExpertWork

# Gradients of inputs and of weights: twice the forward pass.
BACKWARD = 2


@dataclass(frozen=True)
class BlockWork:
    """The work of one kind of block.

    Attributes:
        name: for people.
        count: how often a device runs it in one step.
        flops: of one forward pass.
        bytes: of one forward pass.
        recomputed: share of the forward pass that the backward pass repeats.
        backward: passes of the same size that the backward pass has: two where all parameters are trained.
        stage: whether it belongs to the layers that a pipeline deals out.
        linear: whether its FLOPs are those of linear layers, which a policy may run in a format of their own.
    """

    name: str
    count: int
    flops: float
    bytes: float
    recomputed: float = 0.0
    backward: float = BACKWARD
    stage: bool = False
    linear: bool = False

    @property
    def total_flops(self) -> float:
        """Of one step: forward, backward, recomputation."""
        return self.count * self.flops * (1 + self.backward + self.recomputed)

    @property
    def total_bytes(self) -> float:
        """Bytes of one step: forward, backward, recomputation."""
        return self.count * self.bytes * (1 + self.backward + self.recomputed)


@dataclass(frozen=True)
class DeviceBatch:
    """What one device works on.

    Attributes:
        microbatches: of a step.
        rows: of one microbatch on one device.
        degrees: of the mesh.
        attention: of each stack of transformer blocks to itself, then that of a decoder to the encoder's output.
        scaled: whether linear layers round their operands to 8 bits, each by its own largest magnitude.
        experts: what they multiply; None: the model has none.
    """

    microbatches: int
    rows: float
    degrees: Mapping[str, int]
    attention: tuple[AttentionWork, ...] = ()
    scaled: bool = False
    experts: ExpertWork | None = None


def recomputed_share(remat: RematConfig, *, matmul: bool, names: tuple[str, ...] = ()) -> float:
    """Share of a block's forward pass that is run again in the backward pass."""
    match remat.policy:
        case "none":
            return 0.0
        case "full" if not set(names) & set(remat.offload):
            return 1.0
        case "sqrt":
            # A segment runs again, and each of its blocks once more.
            return 2.0
        case "dots":
            return 0.0 if matmul else 1.0
        case _:
            kept = {*remat.offload, *(remat.names if remat.policy == "names" else ())}
            return 1 - sum(name in kept for name in names) / len(names) if names else 1.0
