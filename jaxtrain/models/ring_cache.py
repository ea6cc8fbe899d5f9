"""How long the caches of layers with a window are, and which texts such a cache can go on from. No jax here."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtrain.models.decoder import Decoder


@dataclass(frozen=True)
class Ring:
    """The positions that layers with a window keep: position p is at p modulo `size`.

    Attributes:
        size: positions that are kept.
        window: positions that a query sees.
    """

    size: int
    window: int


def ring_of(decoder: "Decoder", length: int, chunk: int) -> Ring | None:
    """Find what the layers with a window keep; None: all positions, as the other layers do.

    Args:
        decoder: of the model.
        length: positions of the cache.
        chunk: most tokens of a row that are written at a time.
    """
    if decoder.windows is None:
        return None
    window = decoder.windows.window
    # The first token of a chunk sees its window although the last one is written already.
    size = window + chunk - 1
    return Ring(size, window) if size < length else None


def make_cache(decoder: "Decoder", batch: int, length: int, dtype: Any, *, chunk: int) -> Any:
    """An empty cache, in which layers with a window keep what is seen of it alone.

    Args:
        decoder: of the model.
        batch: rows.
        length: positions of each.
        dtype: of keys and values.
        chunk: most tokens of a row that are written at a time.
    """
    if ring_of(decoder, length, chunk) is None:
        return decoder.init_cache(batch, length, dtype)
    assert decoder.windows is not None
    return decoder.windows.init_cache(batch, length, dtype, chunk)


def can_go_on(ring: Ring | None, position: int, written: int) -> bool:
    """Whether a text can go on from a position although later ones were written in its row.

    Args:
        ring: of the layers with a window; None: all positions are kept.
        position: of the next token.
        written: one more than the last position that was written in the row since its position 0 was.
    """
    if ring is None or position == 0 or written <= ring.size:
        return True
    # The window of the next token begins behind what was overwritten.
    return written - ring.size <= position - ring.window + 1
