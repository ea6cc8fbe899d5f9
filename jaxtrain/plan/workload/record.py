"""Sizes of the rows that a step works on. No jax here."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Sizes of the rows of a run.

    Attributes:
        unit: tokens or examples.
        input_shape: of one row, without the batch.
        vocab_size: of tokens, as the model has it.
        num_outputs: classes or targets, as the model has them.
        rows: of a step, over all devices and microbatches.
        flops_per_row: model FLOPs, forward and the backward that the trained parameters need (`metrics/flops.py`);
            None: those of a model of the user's own, which are not known.
        notes: what was assumed because the config leaves it to the data.
        decoder_length: tokens of a row of a decoder beside an encoder; None: rows have none.
        numbers: 32-bit numbers of a row, targets included; None: tokens and targets, or inputs and a target.
        pairs: whether the data gives pairs of answers, each of which is two rows here.
        weighted: whether each target has a weight, as conversations have.
    """

    unit: str
    input_shape: tuple[int, ...]
    vocab_size: int | None
    num_outputs: int | None
    rows: int
    flops_per_row: float | None
    notes: tuple[str, ...] = ()
    decoder_length: int | None = None
    numbers: int | None = None
    pairs: bool = False
    weighted: bool = False

    @property
    def sequence_length(self) -> int | None:
        """Tokens a row, of tokens."""
        return self.input_shape[0] if self.unit == "tokens" else None

    @property
    def tokens(self) -> int | None:
        """Tokens a step, of tokens."""
        if self.sequence_length is None:
            return None
        return self.rows * (self.sequence_length + (self.decoder_length or 0))

    @property
    def row_bytes(self) -> int:
        """Of one row on the device: int32 tokens and targets, or float32 inputs and a target."""
        if self.numbers is not None:
            return 4 * self.numbers
        return 4 * (2 * math.prod(self.input_shape) if self.unit == "tokens" else math.prod(self.input_shape) + 1)
