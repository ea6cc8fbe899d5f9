"""Arrays of `numpy.ma`, whose masks nothing after them would read."""

from typing import Any

import numpy as np

from jaxtrain.errors import DataError


def check_unmasked(value: Any, where: str) -> None:
    """Checks that nothing of an array is masked: a device has no mask, and would take what lies under it.

    Args:
        value: Anything, or a list of it; what is no `numpy.ma` array has no mask.
        where: What holds it, for the message.

    Raises:
        DataError: An entry is masked.
    """
    if any(map(np.ma.is_masked, value)) if isinstance(value, (list, tuple)) else np.ma.is_masked(value):
        raise DataError(f"{where} with masked entries; fill them (.filled(0)), or leave their rows out")
