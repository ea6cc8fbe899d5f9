"""Data that needs no files: scikit-learn's digits, and random tokens, images and tables that a model can learn."""

import hashlib
from typing import Any

import numpy as np

from jaxtrain.config.data import DigitsData, SyntheticData
from jaxtrain.data.dataset import Data, example_data
from jaxtrain.data.permutation import split_examples
from jaxtrain.data.rows import ArrayRows, Row, Rows
from jaxtrain.data.sources.tokens import TokenSource, token_dtype
from jaxtrain.errors import DataError

# Synthetic data is one data set: the run's seed decides only the order of its rows.
SYNTHETIC_SEED = 1729
# Each token has this many successors, so the best loss is well below the log of the vocabulary.
_NUM_SUCCESSORS = 4

# Mean and standard deviation of all pixels of the digits, whose range is 0 to 16.
_MEAN, _DEVIATION = 4.88, 6.02
# Images of noise kept in memory; a row adds one of them to the pattern of its class.
_NUM_NOISE_IMAGES = 61
# Side of the pattern of a class: coarse, so that convolutions and crops keep it.
_PATTERN_SIZE = 4


def scikit_learn(what: str) -> Any:
    """Returns the data sets of scikit-learn; a DataError, which says `what` needs it, where it is not installed."""
    try:
        import sklearn.datasets
    except ImportError:
        raise DataError(f"{what} needs scikit-learn; run: pip install scikit-learn") from None
    return sklearn.datasets


def open_digits(config: DigitsData) -> Data:
    """Loads 1,797 handwritten digits of 8x8 pixels (Alpaydin & Kaynak 1998, UCI).

    Rows of inputs float32 [8, 8, 1] with mean about 0 and variance about 1, and targets int32 [].
    """
    images, labels = scikit_learn("data.kind digits").load_digits(return_X_y=True)
    inputs = ((images.reshape(-1, 8, 8, 1) - _MEAN) / _DEVIATION).astype(np.float32)
    targets = labels.astype(np.int32)
    train, validation = (
        ArrayRows({"inputs": inputs[side], "targets": targets[side]})
        for side in split_examples(len(targets), validation_fraction=config.validation_fraction, label="digits")
    )
    digest = hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()
    return example_data(
        train,
        validation,
        identity={"kind": "digits", "content_sha256": digest},
        description=("scikit-learn digits: 8x8 grey images of 10 classes",),
        num_outputs=10,
        input_shape=(8, 8, 1),
    )


def open_synthetic_examples(config: SyntheticData) -> Data:
    """Generates images [H, W, C] or table rows [D], float32: a pattern for each class, plus noise; targets int32 []."""
    count, side, channels = config.num_rows, config.image_size, config.num_channels
    random = np.random.default_rng(SYNTHETIC_SEED)
    labels = random.integers(0, config.num_classes, count + max(1, count // 8)).astype(np.int32)
    if config.task == "table":
        means = random.standard_normal((config.num_classes, config.num_columns), np.float32)
        inputs = means[labels] + random.standard_normal((len(labels), config.num_columns), np.float32)
        train, validation = (
            ArrayRows({"inputs": inputs[side], "targets": labels[side]}) for side in (slice(count), slice(count, None))
        )
        return _synthetic(config, train, validation, (config.num_columns,))
    pattern_size = min(_PATTERN_SIZE, side)
    patterns = random.standard_normal((config.num_classes, pattern_size, pattern_size, channels), np.float32)
    noise = random.standard_normal((_NUM_NOISE_IMAGES, side, side, channels), np.float32)
    train = _SyntheticImages(labels[:count], patterns=patterns, noise=noise, first=0)
    validation = _SyntheticImages(labels[count:], patterns=patterns, noise=noise, first=count)
    return _synthetic(config, train, validation, (side, side, channels))


def _synthetic(config: SyntheticData, train: Rows, validation: Rows, input_shape: tuple[int, ...]) -> Data:
    return example_data(
        train,
        validation,
        identity={"kind": "synthetic", "task": config.task, "num_classes": config.num_classes, "seed": SYNTHETIC_SEED},
        description=(f"synthetic {config.task}: a mean for each of {config.num_classes} classes, plus noise",),
        num_outputs=config.num_classes,
        input_shape=input_shape,
    )


class _SyntheticImages(Rows):
    """Rows whose image i is the pattern of its class plus one of a few noise images, cheap at any size and count."""

    def __init__(self, labels: np.ndarray, *, patterns: np.ndarray, noise: np.ndarray, first: int):
        super().__init__(len(labels))
        self._labels, self._patterns, self._noise, self._first = labels, patterns, noise, first
        self._cell = np.arange(noise.shape[1]) * patterns.shape[1] // noise.shape[1]

    def gather(self, indices: np.ndarray) -> Row:
        indices = indices % len(self)
        labels = self._labels[indices]
        inputs_BxHxWxC = self._noise[(self._first + indices) % len(self._noise)]
        inputs_BxHxWxC += self._patterns[labels][:, self._cell[:, None], self._cell[None, :]]
        return {"inputs": inputs_BxHxWxC, "targets": labels}


def markov_tokens(config: SyntheticData, *, sequence_length: int) -> TokenSource:
    """Generates the tokens of all rows by a fixed random Markov chain of order 1.

    The entropy of the chain, about 1.2 nats, is the lowest loss that a model can reach; the uniform distribution has a
    loss of log(vocab_size).
    """
    random = np.random.default_rng(SYNTHETIC_SEED)
    successors_VxS = random.integers(0, config.vocab_size, (config.vocab_size, _NUM_SUCCESSORS))
    cumulative_VxS = np.cumsum(random.dirichlet(np.full(_NUM_SUCCESSORS, 2.0), config.vocab_size), axis=1)
    num_rows = config.num_rows + max(1, config.num_rows // 8)
    # One chain per row, all advanced together: a Python loop over single tokens would take minutes.
    tokens_RxL = np.empty((num_rows, sequence_length), token_dtype(config.vocab_size))
    state_R = random.integers(0, config.vocab_size, num_rows)
    for position in range(sequence_length):
        tokens_RxL[:, position] = state_R
        drawn_R = (random.random(num_rows)[:, None] > cumulative_VxS[state_R]).sum(axis=1)
        state_R = successors_VxS[state_R, np.minimum(drawn_R, _NUM_SUCCESSORS - 1)]
    # The last row of each part needs one more token, as its last target.
    tokens = np.append(tokens_RxL.reshape(-1), tokens_RxL[0, :1])
    identity = {"kind": "synthetic", "task": "tokens", "vocab_size": config.vocab_size, "seed": SYNTHETIC_SEED}
    return TokenSource((tokens,), config.vocab_size, None, "synthetic tokens", identity=identity)
