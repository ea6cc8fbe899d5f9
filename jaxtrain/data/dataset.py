"""The data of a run: rows by index, their shapes, and the values that identify them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtrain.data.batches import check_rows
from jaxtrain.data.stream import BatchStream
from jaxtrain.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    import grain


@dataclass(frozen=True)
class Data:
    """Training and validation rows, and what the rest of a run needs to know about them.

    Attributes:
        train: The training rows, finite and in their own order; `train[i]` is a dict of NumPy arrays. Or batches
            without an index, which `jaxtrain.fit` makes of an iterable.
        validation: The rows kept for evaluation; None: there are none.
        fingerprint: JSON values that identify the rows; they depend on the content of the data and not on its path.
        vocab_size: Number of token ids; None for sources other than tokens.
        num_outputs: Number of classes, or of columns to predict; None for tokens.
        input_shape: Shape of one row's "inputs".
        unit: "tokens" or "examples".
        units_per_row: Places for tokens: sequence_length, with the decoder's where rows have some; else 1.
        tokenizer: The tokenizer that made the tokens; None: not known, or no tokens.
        description: Lines that describe the data to the user.
        reading: JSON values with which inputs and classes were turned into numbers: the names of the classes in the
            order of their numbers, the mean and deviation of the columns of a table, the template of chats. `open_data`
            accepts it, so that other rows are read in the same way. None for sources that need none.
        decoder_length: Tokens per row of a decoder beside an encoder; None: rows have no such tokens.
        counts: Of chats: conversations or pairs, tokens, trained tokens, and what was cut or dropped; None for others.

    Example:
        >>> import dataclasses
        >>> data = jt.open_data({"kind": "synthetic", "task": "images", "image_size": 8})
        >>> data.input_shape, data.num_outputs, data.unit
        ((8, 8, 3), 10, 'examples')
        >>> mine = dataclasses.replace(data, train=rows, validation=None, fingerprint={"name": "mine"})
    """

    # Any: rows by index for nearly everybody, who pass them on as such; fit alone makes a BatchStream.
    train: Any
    validation: "grain.MapDataset | None"
    fingerprint: dict[str, Any]
    vocab_size: int | None = None
    num_outputs: int | None = None
    input_shape: tuple[int, ...] = ()
    unit: str = "examples"
    units_per_row: int = 1
    tokenizer: Tokenizer | None = None
    description: tuple[str, ...] = ()
    reading: dict[str, Any] | None = None
    decoder_length: int | None = None
    counts: dict[str, int] | None = None

    def __post_init__(self) -> None:
        for name, rows in (("train", self.train), ("validation", self.validation)):
            if (rows is not None or name == "train") and not isinstance(rows, BatchStream):
                check_rows(rows, what=f"Data: {name}", write=f"{name}=jaxtrain.ArrayRows({{...}})")

    def __repr__(self) -> str:
        rows = "batches of an iterable" if isinstance(self.train, BatchStream) else f"{len(self.train):,} training rows"
        found = [rows, f"{'none' if self.validation is None else f'{len(self.validation):,}'} held out"]
        found += [f"inputs {list(self.input_shape)}"] if self.input_shape else []
        found += [f"{self.vocab_size:,} ids"] if self.vocab_size is not None else []
        found += [f"{self.num_outputs} outputs"] if self.vocab_size is None and self.num_outputs is not None else []
        return "\n  ".join([f"Data: {', '.join(found)}", *self.description[:3]])


def example_data(
    train: Any,
    validation: Any,
    *,
    identity: dict[str, Any],
    description: tuple[str, ...],
    after: tuple[str, ...] = (),
    **more: Any,
) -> Data:
    """Returns the data of rows with an index, whose numbers it adds to the fingerprint and the description.

    `identity` is what identifies them beside their numbers, `description` are lines before that with the numbers,
    `after` those that follow it, `more` other attributes of `Data`. No validation rows are left out.
    """
    sizes = [len(train), 0 if validation is None else len(validation)]
    return Data(
        train,
        validation if sizes[1] else None,
        {**identity, "num_rows": sizes[0], "num_validation_rows": sizes[1]},
        description=(*description, f"{sizes[0]:,} training rows and {sizes[1]:,} validation rows", *after),
        **more,
    )
