"""Handwritten digits: 1,797 images of 8x8 pixels (Alpaydin & Kaynak 1998, UCI), from scikit-learn."""

import hashlib

import numpy as np

from jaxtrain.config.data import DigitsData
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import ArrayRows, Examples
from jaxtrain.errors import DataError

# Mean and standard deviation of all pixels, whose range is 0 to 16.
_MEAN, _DEVIATION = 4.88, 6.02


def open_digits(config: DigitsData) -> Examples:
    """Loads the digits.

    Args:
        config: Fraction of the images for validation.

    Returns:
        Rows of inputs float32 [8, 8, 1] with mean about 0 and variance about 1, and targets int32 [].

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("data.kind digits needs scikit-learn; run: pip install scikit-learn") from None
    images, labels = load_digits(return_X_y=True)
    inputs = ((images.reshape(-1, 8, 8, 1) - _MEAN) / _DEVIATION).astype(np.float32)
    targets = labels.astype(np.int32)
    train, validation = split_examples(len(targets), validation_fraction=config.validation_fraction, label="digits")
    return Examples(
        train=ArrayRows({"inputs": inputs[train], "targets": targets[train]}),
        validation=ArrayRows({"inputs": inputs[validation], "targets": targets[validation]})
        if len(validation)
        else None,
        num_outputs=10,
        input_shape=(8, 8, 1),
        identity={
            "kind": "digits",
            "content_sha256": hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest(),
        },
        description=("scikit-learn digits: 8x8 grey images of 10 classes",),
    )
