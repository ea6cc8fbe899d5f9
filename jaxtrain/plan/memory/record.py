"""Bytes of a step on one device, by what they are. No jax here."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by part, at the moment of the step when most is allocated.

    Attributes:
        parts: name -> bytes, in the order to show: parameters, optimizer state, moving average, model state, gradients,
            parameters in compute dtype, activations, working set, logits, communication, batch.
        state_bytes: of the parts, what lives between steps.
        capacity_bytes: of the device; None: not known.
        reserved_bytes: of the capacity, what the runtime, the compiler's fragmentation and libraries take.
        host_parts: name -> bytes in the host's memory for one device: what is offloaded.
        is_complete: whether the parts are all there is; of functions of the user's own only some are known.
    """

    parts: dict[str, int]
    state_bytes: int
    capacity_bytes: int | None
    reserved_bytes: int = 0
    host_parts: dict[str, int] = field(default_factory=dict)
    is_complete: bool = True

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    @property
    def usable_bytes(self) -> int | None:
        """What is left of the capacity for a step; None where that is not known."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.reserved_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within what is left of the capacity; None where that is not known."""
        if self.usable_bytes is None:
            return None
        if self.total_bytes > self.usable_bytes:
            return False
        return True if self.is_complete else None


@dataclass(frozen=True)
class Work:
    """Bytes of one device that live inside a step, by what they are."""

    kept: float
    """Activations from the forward pass for the backward pass."""
    block: float
    """The most that one block needs at once in its backward pass."""
    head: float
    """Logits, or what the loss holds of them at once; the gradient of whole ones takes their place."""
    moved: float = 0.0
    """Activations that wait in the host's memory for the backward pass."""
