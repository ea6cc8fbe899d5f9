"""Random data that a model can learn, generated when it is opened, for benchmarks, smoke tests and plans."""

import numpy as np

from jaxtrain.config.data import SyntheticData
from jaxtrain.data.rows import ArrayRows, Examples, Row, Rows
from jaxtrain.data.tokens import TokenSource, token_dtype

# Constant, because synthetic data is one data set: the run's seed decides only the order of its rows.
_SEED = 1729

# Each token has this many successors, so the best loss is well below the log of the vocabulary.
_NUM_SUCCESSORS = 4

# Images of noise kept in memory; a row adds one of them to the pattern of its class.
_NUM_NOISE_IMAGES = 61

# Side of the pattern of a class: coarse, so that convolutions and crops keep it.
_PATTERN_SIZE = 4


def num_validation_rows(config: SyntheticData) -> int:
    """Returns how many rows are generated for evaluation, in addition to `num_rows`."""
    return max(1, config.num_rows // 8)


def markov_tokens(config: SyntheticData, *, sequence_length: int) -> TokenSource:
    """Generates the tokens of all rows by a fixed random Markov chain of order 1.

    The entropy of the chain, about 1.2 nats, is the lowest loss that a model can reach; the uniform distribution has a
    loss of log(vocab_size).

    Args:
        config: Number of rows and of token ids.
        sequence_length: Tokens per row.
    """
    random = np.random.default_rng(_SEED)
    successors_VxS = random.integers(0, config.vocab_size, (config.vocab_size, _NUM_SUCCESSORS))
    cumulative_VxS = np.cumsum(random.dirichlet(np.full(_NUM_SUCCESSORS, 2.0), config.vocab_size), axis=1)
    num_rows = config.num_rows + num_validation_rows(config)
    # One chain per row, all advanced together: a Python loop over single tokens would take minutes.
    tokens_RxL = np.empty((num_rows, sequence_length), token_dtype(config.vocab_size))
    state_R = random.integers(0, config.vocab_size, num_rows)
    for position in range(sequence_length):
        tokens_RxL[:, position] = state_R
        drawn_R = (random.random(num_rows)[:, None] > cumulative_VxS[state_R]).sum(axis=1)
        state_R = successors_VxS[state_R, np.minimum(drawn_R, _NUM_SUCCESSORS - 1)]
    # The last row of each part needs one more token, as its last target.
    tokens = np.append(tokens_RxL.reshape(-1), tokens_RxL[0, :1])
    return TokenSource(
        segments=(tokens,),
        vocab_size=config.vocab_size,
        tokenizer=None,
        label="synthetic tokens",
        identity={"kind": "synthetic", "task": "tokens", "vocab_size": config.vocab_size, "seed": _SEED},
    )


def open_examples(config: SyntheticData) -> Examples:
    """Generates images or table rows around a mean for each class.

    Args:
        config: Task "images" or "table", and the sizes.

    Returns:
        Rows of inputs, float32 [H, W, C] for images or [D] for tables, and targets int32 [].
    """
    total = config.num_rows + num_validation_rows(config)
    random = np.random.default_rng(_SEED)
    labels = random.integers(0, config.num_classes, total).astype(np.int32)
    if config.task == "images":
        side, channels = config.image_size, config.num_channels
        shape = (side, side, channels)
        pattern_size = min(_PATTERN_SIZE, side)
        patterns = random.standard_normal((config.num_classes, pattern_size, pattern_size, channels), np.float32)
        noise = random.standard_normal((_NUM_NOISE_IMAGES, *shape), np.float32)
        train: Rows = _SyntheticImages(labels[: config.num_rows], patterns=patterns, noise=noise, first=0)
        validation: Rows = _SyntheticImages(
            labels[config.num_rows :], patterns=patterns, noise=noise, first=config.num_rows
        )
    else:
        shape = (config.num_columns,)
        means = random.standard_normal((config.num_classes, *shape), np.float32)
        inputs = means[labels] + random.standard_normal((total, *shape), np.float32)
        train = ArrayRows({"inputs": inputs[: config.num_rows], "targets": labels[: config.num_rows]})
        validation = ArrayRows({"inputs": inputs[config.num_rows :], "targets": labels[config.num_rows :]})
    return Examples(
        train=train,
        validation=validation,
        num_outputs=config.num_classes,
        input_shape=shape,
        identity={"kind": "synthetic", "task": config.task, "num_classes": config.num_classes, "seed": _SEED},
        description=(f"synthetic {config.task}: a mean for each of {config.num_classes} classes, plus noise",),
    )


class _SyntheticImages(Rows):
    """Rows whose image i is the pattern of its class plus one of a few noise images, cheap at any size and count."""

    def __init__(self, labels: np.ndarray, *, patterns: np.ndarray, noise: np.ndarray, first: int):
        super().__init__(len(labels))
        self._labels = labels
        self._patterns = patterns
        self._noise = noise
        self._first = first
        side = noise.shape[1]
        self._cell = np.arange(side) * patterns.shape[1] // side

    def gather(self, indices: np.ndarray) -> Row:
        indices = indices % len(self)
        labels = self._labels[indices]
        inputs_BxHxWxC = self._noise[(self._first + indices) % len(self._noise)]
        inputs_BxHxWxC += self._patterns[labels][:, self._cell[:, None], self._cell[None, :]]
        return {"inputs": inputs_BxHxWxC, "targets": labels}
