"""The data of a run from any source: rows by index, their shapes, and the values that identify them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from jaxtrain.config import load_config
from jaxtrain.config.arguments import check_choice, check_whole, refusal
from jaxtrain.config.base import Group
from jaxtrain.config.data import (
    CalledData,
    ChatData,
    DataConfig,
    DigitsData,
    DocumentsData,
    ImageFolderData,
    ImageRecordsData,
    JsonlData,
    LabelledTextData,
    MixtureData,
    SyntheticData,
    TableData,
    TaggedTextData,
    TextData,
    TextPairData,
    TokenData,
    gives_pairs,
)
from jaxtrain.config.schema import TaskName
from jaxtrain.data.batches import check_rows
from jaxtrain.data.remote import with_local_paths
from jaxtrain.data.skipped import SkippedRecords
from jaxtrain.data.sources.parts import Part, RowForm, describe, row_form, row_length, spans, split, tokenizer_lines
from jaxtrain.data.sources.texts import text_source
from jaxtrain.data.stream import BatchStream
from jaxtrain.data.text.corrupt import SpanNoise, corrupted, noise_identity, noise_of
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.data.tokens import Span, TokenSource
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.runtime.call import call_function

if TYPE_CHECKING:
    import grain

    from jaxtrain.data.rows import Examples, Rows


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
        skipped: Count the bad records that were left out, under data.on_bad_record=skip; empty for others.
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
    vocab_size: int | None
    num_outputs: int | None
    input_shape: tuple[int, ...]
    unit: str
    units_per_row: int
    tokenizer: Tokenizer | None
    description: tuple[str, ...]
    reading: dict[str, Any] | None = None
    decoder_length: int | None = None
    counts: dict[str, int] | None = None
    skipped: tuple[SkippedRecords, ...] = ()

    def __post_init__(self) -> None:
        for name, rows in (("train", self.train), ("validation", self.validation)):
            if (rows is not None or name == "train") and not isinstance(rows, BatchStream):
                check_rows(rows, what=f"Data: {name}", write=f"{name}=jaxtrain.ArrayRows({{...}})")
        check_choice(self.unit, ("tokens", "examples"), what="Data: unit", write="unit='examples'")

    def __repr__(self) -> str:
        return "\n  ".join([f"Data: {self._sizes()}", *self.description[:3]])

    def _sizes(self) -> str:
        rows = "batches of an iterable" if isinstance(self.train, BatchStream) else f"{len(self.train):,} training rows"
        found = [rows, f"{'none' if self.validation is None else f'{len(self.validation):,}'} held out"]
        found += [f"inputs {list(self.input_shape)}"] if self.input_shape else []
        found += [f"{self.vocab_size:,} ids"] if self.vocab_size is not None else []
        found += [f"{self.num_outputs} outputs"] if self.vocab_size is None and self.num_outputs is not None else []
        return ", ".join(found)


def open_data(
    config: DataConfig | Mapping[str, Any],
    *,
    sequence_length: int | None = None,
    seed: int = 0,
    task: str | None = None,
    reading: Mapping[str, Any] | None = None,
) -> Data:
    """Opens the data of a config.

    Args:
        config: Which data: a data group, or its keys as a mapping ({"kind": "digits"}).
        sequence_length: Tokens per row where `config` does not say it.
        seed: Decides random augmentation; the split into training and validation never depends on it.
        task: The task of the run ("classification", "regression"), for tables whose targets could be either.
        reading: `Data.reading` of the data that a model was trained on: tables and image folders use its class numbers
            and scales instead of their own. A reading of another kind of data is ignored.

    Raises:
        ConfigError: A key or value of a mapping is wrong, or an argument is of another type.
        DataError: The data is missing, empty or corrupt, or has too few tokens for a row.

    Example:
        >>> data = jt.open_data({"kind": "synthetic", "task": "images", "image_size": 8})
        >>> batches = jt.Batches(data.train, 8, seed=0, shuffle=True)
    """
    if isinstance(config, Mapping) and config:
        config = load_config({"data": config}).config.data
    _check_call(config, sequence_length, seed, task, reading)
    config = with_local_paths(config)
    match config:
        case DocumentsData(rows="document"):
            return _document_data(config, row_length(config.sequence_length, sequence_length))
        case TextData() | JsonlData() | DocumentsData():
            rows = row_form(config, text_source(config), sequence_length, seed)
            return _token_data([split(rows.source, rows, config.validation_fraction)], rows, weights=None)
        case TokenData():
            from jaxtrain.data.sources.shards import shard_source

            rows = row_form(config, shard_source(config), sequence_length, seed)
            return _token_data([split(rows.source, rows, config.validation_fraction)], rows, weights=None)
        case MixtureData():
            from jaxtrain.data.sources.mixture import open_mixture

            sources = open_mixture(config)
            rows = row_form(config, sources[0], sequence_length, seed)
            fractions = [component.source.validation_fraction for component in config.components]
            parts = [split(source, rows, fraction) for source, fraction in zip(sources, fractions, strict=True)]
            return _token_data(parts, rows, weights=[component.weight for component in config.components])
        case SyntheticData(task="tokens"):
            return _synthetic_tokens(config, row_length(config.sequence_length, sequence_length), seed)
        case LabelledTextData() | TaggedTextData() | TextPairData():
            length = row_length(config.sequence_length, sequence_length)
            return _text_data(config, length, task=task, reading=reading)
        case ChatData():
            length = row_length(config.sequence_length, sequence_length)
            return _chat_data(config, length, task=task, reading=reading)
        case SyntheticData():
            from jaxtrain.data.sources.synthetic import open_examples

            return _example_data(open_examples(config))
        case DigitsData():
            from jaxtrain.data.sources.digits import open_digits

            return _example_data(open_digits(config))
        case ImageFolderData():
            from jaxtrain.data.sources.images import open_image_folder

            return _example_data(open_image_folder(config, seed=seed, reading=reading))
        case ImageRecordsData():
            from jaxtrain.data.sources.image_records import open_image_records

            return _example_data(open_image_records(config, seed=seed, reading=reading))
        case TableData():
            from jaxtrain.data.sources.tables import open_table

            return _example_data(open_table(config, task=task, reading=reading))
        case CalledData():
            made = call_function("data", config.call, config.args, error=DataError)
            return made if isinstance(made, Data) else _array_data(config, made)
        case _:
            raise ConfigError(f"open_data takes the group data of a config, not a {type(config).__name__}")


def _array_data(config: CalledData, made: Any) -> Data:
    """The data of a function that returned arrays."""
    from jaxtrain.data.sources.arrays import open_arrays

    found = open_arrays(made, label=config.call)
    return Data(
        train=found.train,
        validation=found.validation,
        fingerprint=found.identity,
        vocab_size=None,
        num_outputs=found.num_outputs,
        input_shape=found.input_shape,
        unit="tokens" if found.are_tokens else "examples",
        units_per_row=found.input_shape[0] if found.are_tokens else 1,
        tokenizer=None,
        description=found.description,
    )


def _check_call(config: Any, sequence_length: Any, seed: Any, task: Any, reading: Any) -> None:
    """Raises a ConfigError where an argument of `open_data` is of another type."""
    if not isinstance(config, Group):
        word = config if isinstance(config, str) else "digits"
        write = f"open_data({{'kind': {word!r}}})"
        if isinstance(getattr(config, "shape", None), tuple):
            write = "jaxtrain.ArrayRows({'inputs': x, 'targets': y}) for arrays of your own"
        raise ConfigError(refusal("open_data", "a dict with the kind of data", config, write))
    if sequence_length is not None:
        check_whole(sequence_length, what="open_data: sequence_length", least=1, write="sequence_length=256")
    check_whole(seed, what="open_data: seed", least=None, write="seed=0")
    if task is not None:
        check_choice(task, get_args(TaskName), what="open_data: task", write="task='classification'")


def _synthetic_tokens(config: SyntheticData, sequence_length: int, seed: int) -> Data:
    from jaxtrain.data.sources.synthetic import markov_tokens

    plain = TokenSource((), config.vocab_size, None, "synthetic tokens")
    noise = noise_of(config, plain, None, sequence_length=sequence_length)
    rows = RowForm(plain, sequence_length, config.corruption, noise, seed)
    source = markov_tokens(config, sequence_length=rows.stream_length)
    border = config.num_rows * rows.stream_length
    # The parts share one token, the last target of training, so that both have all their rows.
    return _token_data([Part(source, Span(0, border + 1), Span(border, source.num_tokens))], rows, weights=None)


def _token_data(parts: Sequence[Part], form: RowForm, *, weights: Sequence[float] | None) -> Data:
    from jaxtrain.data.rows import ConcatenatedRows, TokenRows

    sequence_length, noise = form.length, form.noise

    def rows(source: TokenSource, span: Span) -> "Rows":
        return TokenRows(source.segments, span=span, sequence_length=form.stream_length)

    def hidden(rows: "Rows", seed: int) -> "Rows":
        return rows if noise is None else corrupted(rows, noise, seed=seed)

    train = [rows(part.source, part.train) for part in parts]
    validation = [rows(part.source, part.validation) for part in parts if part.validation is not None]
    identities = [
        {**part.source.identity, "num_tokens": part.source.num_tokens, "split": spans(part)} for part in parts
    ]
    fingerprint: dict[str, Any] = {"sequence_length": sequence_length, "num_rows": sum(map(len, train))}
    if weights is None:
        fingerprint |= identities[0]
    else:
        fingerprint |= {"kind": "mixture", "components": identities, "weights": list(weights)}
    if noise is not None and form.corruption is not None:
        fingerprint["corruption"] = noise_identity(form.corruption, noise)
    tokenizer = parts[0].source.tokenizer
    vocab_size = max(part.source.vocab_size for part in parts) if noise is None else noise.vocab_size
    shares = [None] * len(parts) if weights is None else [weight / sum(weights) for weight in weights]
    lines = [describe(part, share=share) for part, share in zip(parts, shares, strict=True)]
    lines.append(
        f"{sum(map(len, train)):,} training rows and {sum(map(len, validation)):,} validation rows "
        f"of {sequence_length:,} tokens"
    )
    lines += tokenizer_lines(tokenizer, vocab_size)
    decoder_length = noise.sizes.targets_length if isinstance(noise, SpanNoise) else None
    return Data(
        train=hidden(train[0] if weights is None else ConcatenatedRows(train, weights=weights), form.seed),
        # The same tokens are hidden whatever the seed of the run is, so that runs can be compared.
        validation=None
        if not validation
        else hidden(ConcatenatedRows(validation), 0)
        if len(validation) > 1
        else hidden(validation[0], 0),
        fingerprint=fingerprint,
        vocab_size=vocab_size,
        num_outputs=None,
        input_shape=(sequence_length,),
        unit="tokens",
        units_per_row=sequence_length + (decoder_length or 0),
        tokenizer=tokenizer,
        description=tuple(lines),
        decoder_length=decoder_length,
        skipped=tuple(part.source.skipped for part in parts if part.source.skipped is not None),
    )


def _document_data(config: DocumentsData, sequence_length: int) -> Data:
    """The data of texts that are read by row."""
    from jaxtrain.data.sources.document_rows import open_document_rows

    found = open_document_rows(config, sequence_length=sequence_length)
    return Data(
        train=found.train,
        validation=found.validation,
        fingerprint=found.identity,
        vocab_size=found.tokenizer.vocab_size,
        num_outputs=None,
        input_shape=(sequence_length,),
        unit="tokens",
        units_per_row=sequence_length,
        tokenizer=found.tokenizer,
        description=found.description,
        skipped=() if found.skipped is None else (found.skipped,),
    )


def _text_data(
    config: LabelledTextData | TaggedTextData | TextPairData,
    sequence_length: int,
    *,
    task: str | None,
    reading: Mapping[str, Any] | None,
) -> Data:
    """The data of a table of texts."""
    from jaxtrain.data.text.labelled import open_labelled_text, open_tagged_text, open_text_pairs

    match config:
        case LabelledTextData():
            found = open_labelled_text(config, sequence_length=sequence_length, task=task, reading=reading)
        case TaggedTextData():
            found = open_tagged_text(config, sequence_length=sequence_length, reading=reading)
        case TextPairData():
            found = open_text_pairs(config, sequence_length=sequence_length)
    return _encoded_data(found, (sequence_length,))


def _chat_data(config: ChatData, sequence_length: int, *, task: object, reading: Mapping[str, Any] | None) -> Data:
    """The data of conversations or of pairs of answers."""
    from jaxtrain.data.chat.rows import open_chat

    pairs = gives_pairs(config, task)
    scored = pairs and task == "reward"
    found = open_chat(config, sequence_length=sequence_length, pairs=pairs, scored=scored, reading=reading)
    return _encoded_data(found, (2, sequence_length) if pairs else (sequence_length,))


def _encoded_data(found: "Examples", input_shape: tuple[int, ...]) -> Data:
    assert found.tokenizer is not None
    return Data(
        train=found.train,
        validation=found.validation,
        fingerprint=found.identity,
        vocab_size=found.tokenizer.vocab_size,
        num_outputs=found.num_outputs,
        input_shape=input_shape,
        unit="tokens",
        units_per_row=math.prod(input_shape) + (found.decoder_length or 0),
        tokenizer=found.tokenizer,
        description=found.description,
        reading=found.reading,
        decoder_length=found.decoder_length,
        counts=found.counts,
    )


def _example_data(examples: "Examples") -> Data:
    sizes = [len(examples.train), 0 if examples.validation is None else len(examples.validation)]
    return Data(
        train=examples.train,
        validation=examples.validation,
        fingerprint={**examples.identity, "num_rows": sizes[0], "num_validation_rows": sizes[1]},
        vocab_size=None,
        num_outputs=examples.num_outputs,
        input_shape=examples.input_shape,
        unit="examples",
        units_per_row=1,
        tokenizer=None,
        description=(*examples.description, f"{sizes[0]:,} training rows and {sizes[1]:,} validation rows"),
        reading=examples.reading,
        skipped=() if examples.skipped is None else (examples.skipped,),
    )
