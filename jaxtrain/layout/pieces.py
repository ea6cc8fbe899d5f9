"""In how many pieces a large gradient is summed. No jax here."""

# Elements that are summed in float32 at once: 64 MiB.
_PIECE = 2**24


def num_pieces(elements: int, size: int) -> int:
    """In how many equal pieces an array is summed over a dim.

    Args:
        elements: of the array.
        size: of the dim.
    """
    wanted = max(1, -(-elements // _PIECE))
    return next((count for count in range(wanted, min(4 * wanted, size) + 1) if size % count == 0), 1)
