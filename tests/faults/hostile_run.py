"""Rows for a run whose function takes a secret."""

import numpy as np


def rows(api_key: str, path: str) -> dict[str, np.ndarray]:
    """Sixteen rows; the secret is for somebody else."""
    assert api_key
    assert path
    return {"inputs": np.ones((16, 4), np.float32), "targets": np.arange(16, dtype=np.int32) % 3}
