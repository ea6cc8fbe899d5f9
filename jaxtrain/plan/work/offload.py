"""What offloading to the memory of the host takes on the device: bytes that are on their way. No jax here."""

from collections.abc import Sequence

from jaxtrain.config.schema import Config
from jaxtrain.optim import update_slices
from jaxtrain.optim.rules import updates_elementwise
from jaxtrain.optim.update_slices import num_slices
from jaxtrain.plan.work.state import Parameter, StateBytes, local_size


def state_on_its_way(config: Config, placed: Sequence[Parameter], state: StateBytes, degrees: dict[str, int]) -> int:
    """Bytes of an offloaded optimizer state that are on one device at once: as they came, and as they go back."""
    trained = [one for one in placed if one.trained]
    if not updates_elementwise(config.optimizer):
        return 2 * state.optimizer
    small = largest = total = 0
    for one in trained:
        size = 4 * local_size(one.shape, one.state_entries, degrees)
        total += size
        shape = tuple(
            local_size((dim,), (entry,), degrees) for dim, entry in zip(one.shape, one.state_entries, strict=True)
        )
        cut = size // num_slices(shape)
        small += size if size <= update_slices.SLICE_BYTES else 0
        largest = max(largest, cut)
    moments = state.optimizer / max(total, 1)
    return round(2 * moments * max(largest, min(small, update_slices.SLICE_BYTES)))
