"""Settings of the data sources: one class per kind."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxtrain.config.base import Group
from jaxtrain.config.call import Call
from jaxtrain.config.chat import ChatData
from jaxtrain.config.numbers import Fraction, Ids, Length, PositiveShare, Rows, Scale, Share, TokenId, Units, Width
from jaxtrain.config.tokenizer import TokenizerConfig


class MaskCorruption(Group):
    """Hides some tokens, which the model names (BERT); every epoch hides others."""

    kind: Literal["mask"] = "mask"
    """Which corruption this group describes."""
    probability: PositiveShare = 0.15
    """Chance of each token to be chosen; special tokens never are."""
    mask_fraction: Share = 0.8
    """Fraction of the chosen tokens that the mask token replaces."""
    random_fraction: Share = 0.1
    """Fraction of the chosen tokens that a random token replaces; the rest stays as it is."""

    @model_validator(mode="after")
    def _check_fractions(self) -> "MaskCorruption":
        total = self.mask_fraction + self.random_fraction
        if total > 1 + 1e-9:
            raise ValueError(f"mask_fraction + random_fraction is {total:g}; let them sum to at most 1")
        return self


class SpanCorruption(Group):
    """Replaces spans of tokens by one sentinel each, and lets a decoder write the spans (T5)."""

    kind: Literal["spans"] = "spans"
    """Which corruption this group describes."""
    noise_density: Annotated[Fraction, Field(gt=0)] = 0.15
    """Fraction of the tokens that lies in spans."""
    mean_span_length: Annotated[float, Field(ge=1, le=1e6)] = 3.0
    """Mean number of tokens per span."""
    decoder_start: TokenId = 0
    """Token before the first one that a decoder writes; that of the model (model.start_token)."""


Corruption = Annotated[MaskCorruption | SpanCorruption, Field(discriminator="kind")]


class Stored(Group):
    """Data whose paths may be addresses: s3://, gs:// or https://."""

    cache: str | None = None
    """Folder for the copies of remote files (s3://, gs://, https://); null: the user's cache folder."""


class _TokenData(Stored):
    """The settings that all sources of tokens share."""

    sequence_length: Length | None = None
    """Tokens per row; null: the model's max_sequence_length."""
    validation_fraction: Share = 0.05
    """Fraction of the tokens, taken from the end, that is kept for evaluation."""
    corruption: Corruption | None = None
    """What is hidden: mask for task=masked_language_modeling, spans for sequence_to_sequence; null: the next token."""


class TextData(_TokenData):
    """Plain text from files, or text that is built in."""

    kind: Literal["text"] = "text"
    """Which source this group describes."""
    builtin: Literal["python_prose", "python_source"] | None = "python_prose"
    """Text that comes with Python, used when path is null: the language reference, or the standard library."""
    path: str | None = None
    """A file, a folder (all its .txt files) or a glob."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""


class _RecordData(Group):
    """The settings of sources whose bad records can be skipped."""

    on_bad_record: Literal["error", "skip"] = "error"
    """What a record that cannot be read does: error ends the run, skip leaves it out and names it."""
    max_bad_fraction: Fraction = 1e-4
    """Largest fraction of the records that skip leaves out, but at least one record (0: none); more end the run."""


class JsonlData(_TokenData, _RecordData):
    """JSON lines, one document each."""

    kind: Literal["jsonl"] = "jsonl"
    """Which source this group describes."""
    path: str
    """A file, a folder (all its .jsonl files) or a glob."""
    field: str = "text"
    """Key of the text in each line."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""


class DocumentsData(_TokenData, _RecordData):
    """Texts in a column of files of any format: Parquet, Arrow, ArrayRecord, tar, JSON lines."""

    kind: Literal["documents"] = "documents"
    """Which source this group describes."""
    path: str
    """A file, a folder (all its files, of one format, or one of datasets' save_to_disk) or a glob."""
    field: str = "text"
    """Column of the text; of tar files the ending of its members, such as txt."""
    rows: Literal["stream", "document"] = "stream"
    """What a row is: stream: tokens of all texts, encoded at the start; document: one text, encoded when it is read."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""

    @model_validator(mode="after")
    def _check_rows(self) -> "DocumentsData":
        if self.rows == "document" and self.corruption is not None:
            raise ValueError("corruption takes rows=stream; leave one of them out")
        return self


class TokenData(_TokenData):
    """Memory-mapped files of token ids, as `jaxtrain data prepare` writes them."""

    kind: Literal["tokens"] = "tokens"
    """Which source this group describes."""
    path: str
    """Folder of the files."""


class _LabelledData(Stored):
    """The settings that all tables of texts share."""

    path: str | None = None
    """A .csv (with header), .jsonl or .parquet file."""
    validation_path: str | None = None
    """File with the rows for evaluation; null: validation_fraction of the rows."""
    validation_fraction: Share = 0.1
    """Fraction of the rows that is kept for evaluation where there is no validation_path."""
    sequence_length: Length | None = None
    """Tokens per row, special ones included; longer texts are truncated. null: the model's max_sequence_length."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""


# The classes of the built-in docstrings: packages of the standard library with many of them, about different things.
DOCSTRING_PACKAGES = ("asyncio", "email", "importlib", "logging", "tkinter", "unittest", "xml")


class LabelledTextData(_LabelledData):
    """Texts, or pairs of texts, with one class (or one number, under task=regression) each."""

    kind: Literal["labelled_text"] = "labelled_text"
    """Which source this group describes."""
    builtin: Literal["python_docstrings"] | None = None
    """Texts that come with Python, used when path is null: docstrings, and the package that each is from."""
    text: str = "text"
    """Column of the text."""
    second_text: str | None = None
    """Column of a second text, for pairs."""
    label: str = "label"
    """Column of the class or number."""


class TaggedTextData(_LabelledData):
    """Lists of words with one class per word."""

    kind: Literal["tagged_text"] = "tagged_text"
    """Which source this group describes."""
    words: str = "words"
    """Column of the words: a list, or text with spaces between the words."""
    tags: str = "tags"
    """Column of the classes: a list, or text with spaces between the classes."""


class TextPairData(_LabelledData):
    """Pairs of a text and the text that a decoder writes for it."""

    kind: Literal["text_pairs"] = "text_pairs"
    """Which source this group describes."""
    builtin: Literal["python_docstrings"] | None = None
    """Texts that come with Python, used when path is null: the first sentence of a docstring, and the function."""
    source: str = "source"
    """Column of the text that is read."""
    target: str = "target"
    """Column of the text that is written."""
    target_length: Length | None = None
    """Tokens per target, the end included; null: as sequence_length."""
    decoder_start: TokenId = 0
    """Token before the first one that a decoder writes; that of the model (model.start_token)."""


class DigitsData(Group):
    """1,797 images of handwritten digits, 8x8 pixels each (scikit-learn's copy)."""

    kind: Literal["digits"] = "digits"
    """Which source this group describes."""
    validation_fraction: Share = 0.2
    """Fraction of the images that is kept for evaluation."""


class ImageFolderData(_RecordData):
    """Image files in one folder per class."""

    kind: Literal["image_folder"] = "image_folder"
    """Which source this group describes."""
    path: str
    """Folder that holds the class folders, or train/ and val/ with the class folders of each split."""
    image_size: Units = 224
    """Side of the square that images are cropped to, in pixels."""
    validation_fraction: Share = 0.1
    """Fraction of the images that is kept for evaluation where there is no val/ folder."""
    augment: bool = True
    """Crop and flip training images at random."""


class ImageRecordsData(Stored, _RecordData):
    """Images with a class each, in tar shards or in columns of Parquet, Arrow or ArrayRecord files."""

    kind: Literal["images"] = "images"
    """Which source this group describes."""
    path: str
    """A file, a folder (all its files, of one format, or one of datasets' save_to_disk) or a glob."""
    validation_path: str | None = None
    """The same for the images for evaluation; null: validation_fraction of path."""
    image: str | None = None
    """Column of the encoded image, or ending of the members of tar files; null: the first that is called like one."""
    label: str | None = None
    """Column of the class; null: label, labels, cls or class, whichever there is."""
    image_size: Units = 224
    """Side of the square that images are cropped to, in pixels."""
    validation_fraction: Share = 0.1
    """Fraction of the images that is kept for evaluation where there is no validation_path."""
    augment: bool = True
    """Crop and flip training images at random."""


class TableData(Stored, _RecordData):
    """Rows of numbers from a .csv (with header), .npz (arrays inputs and targets), .parquet, .arrow or .jsonl file."""

    kind: Literal["table"] = "table"
    """Which source this group describes."""
    path: str
    """Path of the file, or a table of scikit-learn: builtin:breast_cancer, builtin:wine or builtin:diabetes."""
    target: str | None = None
    """Column to predict, of files with named columns; null: the last column."""
    columns: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    """Columns that are inputs, in this order, of files with named columns; null: all but the target."""
    validation_fraction: Share = 0.2
    """Fraction of the rows that is kept for evaluation."""
    task: Literal["classification", "regression"] | None = None
    """What the target is; null: decided by the run's task and the values, with an error where both are possible."""
    standardize: bool = True
    """Scale each input column to mean 0 and variance 1 over the training rows, and an MLP's outputs to the targets."""


class SyntheticData(Group):
    """Random rows of the right shape; tokens follow a fixed random Markov chain, so that a model can learn it."""

    kind: Literal["synthetic"] = "synthetic"
    """Which source this group describes."""
    task: Literal["tokens", "images", "table"] = "tokens"
    """Kind of the rows."""
    num_rows: Rows = 4096
    """Number of distinct rows; after these they repeat."""
    sequence_length: Length | None = None
    """Tokens per row; null: the model's max_sequence_length."""
    vocab_size: Ids = 256
    """Number of token ids, for task tokens."""
    corruption: Corruption | None = None
    """What is hidden, for task tokens: as in data.kind=text; special tokens are added to the vocabulary."""
    image_size: Units = 32
    """Side of an image in pixels, for task images."""
    num_channels: Units = 3
    """Channels of an image, for task images."""
    num_classes: Ids = 10
    """Number of classes, for tasks images and table."""
    num_columns: Width = 16
    """Number of input columns, for task table."""


class Component(Group):
    """One source of a mixture."""

    source: Annotated[TextData | JsonlData | DocumentsData | TokenData, Field(discriminator="kind")]
    """The source; all sources of a mixture use the tokenizer of the mixture."""
    weight: Scale = 1.0
    """Share of the training rows, relative to the weights of the other components."""

    @model_validator(mode="after")
    def _check_corruption(self) -> "Component":
        if self.source.corruption is not None:
            raise ValueError("corruption of a component has no effect; set data.corruption of the mixture")
        if isinstance(self.source, DocumentsData) and self.source.rows == "document":
            raise ValueError("rows=document cannot be mixed with streams of tokens; leave it out")
        return self


class MixtureData(Group):
    """Several sources of tokens, mixed by weight."""

    kind: Literal["mixture"] = "mixture"
    """Which source this group describes."""
    components: Annotated[tuple[Component, ...], Field(strict=False, min_length=1)]
    """The sources and their weights."""
    sequence_length: Length | None = None
    """Tokens per row; null: the model's max_sequence_length."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens, for all components."""
    corruption: Corruption | None = None
    """What is hidden: as in data.kind=text."""

    @model_validator(mode="after")
    def _check_fractions(self) -> "MixtureData":
        if any(component.source.validation_fraction == 1 for component in self.components):
            raise ValueError(
                "validation_fraction=1 is for a source alone; to evaluate a run on all rows of a file, give it as in "
                "data.kind=text data.path=FILE data.validation_fraction=1"
            )
        return self


class CalledData(Call):
    """Data of your own: a function that returns a jaxtrain.Data or a dict of arrays."""

    kind: Literal["called"] = "called"
    """Which source this group describes."""


DataConfig = Annotated[
    TextData
    | JsonlData
    | DocumentsData
    | TokenData
    | LabelledTextData
    | TaggedTextData
    | TextPairData
    | ChatData
    | DigitsData
    | ImageFolderData
    | ImageRecordsData
    | TableData
    | SyntheticData
    | MixtureData
    | CalledData,
    Field(discriminator="kind"),
]
