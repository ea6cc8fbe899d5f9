"""Settings of the data sources: one class a kind."""

from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.base import Group
from jaxtrain.config.models import Fraction, PositiveInt


class TokenizerConfig(Group):
    """How text becomes token ids."""

    kind: Literal["byte", "bpe", "file"] = "byte"
    """byte: ids 0-255; bpe: trained on the data and saved with the run; file: a saved tokenizer.json."""
    vocab_size: Annotated[int, Field(ge=257)] = 1024
    """Size of a trained BPE vocabulary: 256 bytes, the end of text, and merges."""
    path: str | None = None
    """The tokenizer.json of kind file."""


class _TokenData(Group):
    """What sources of tokens share."""

    sequence_length: PositiveInt | None = None
    """Tokens a row; null: the model's max_sequence_length."""
    validation_fraction: Fraction = 0.05
    """Share of the tokens, at the end, kept for evaluation."""


class TextData(_TokenData):
    """Plain text: built in, or files."""

    kind: Literal["text"] = "text"
    """Which source this group describes."""
    builtin: Literal["python_prose", "python_source"] | None = "python_prose"
    """Text that every Python carries: the language reference, or the standard library; used when path is null."""
    path: str | None = None
    """A file, a folder (all its .txt files) or a glob."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""


class JsonlData(_TokenData):
    """JSON lines, one document each."""

    kind: Literal["jsonl"] = "jsonl"
    """Which source this group describes."""
    path: str
    """A file, a folder (all its .jsonl files) or a glob."""
    field: str = "text"
    """Key of the text in each line."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""


class TokenData(_TokenData):
    """Memory-mapped token shards, as `jaxtrain data prepare` writes them."""

    kind: Literal["tokens"] = "tokens"
    """Which source this group describes."""
    path: str
    """Folder of the shards."""


class DigitsData(Group):
    """1,797 handwritten digits of 8x8 pixels (scikit-learn's copy)."""

    kind: Literal["digits"] = "digits"
    """Which source this group describes."""
    validation_fraction: Fraction = 0.2
    """Share of the images kept for evaluation."""


class ImageFolderData(Group):
    """A folder a class of image files."""

    kind: Literal["image_folder"] = "image_folder"
    """Which source this group describes."""
    path: str
    """Folder of class folders; with train/ and val/ inside, those are the splits."""
    image_size: PositiveInt = 224
    """Side of the square the images are cropped to."""
    validation_fraction: Fraction = 0.1
    """Share kept for evaluation where there is no val/ folder."""
    augment: bool = True
    """Random crop and flip in training."""


class TableData(Group):
    """Rows of numbers from a .csv (with header) or .npz (arrays inputs and targets) file."""

    kind: Literal["table"] = "table"
    """Which source this group describes."""
    path: str
    """The file; builtin:breast_cancer, wine or diabetes are scikit-learn's."""
    target: str | None = None
    """Column to predict (csv); null: the last."""
    validation_fraction: Fraction = 0.2
    """Share of the rows kept for evaluation."""
    task: Literal["classification", "regression"] | None = None
    """What the target is; null: the run's task and the values decide, and where they could be both, an error asks."""
    standardize: bool = True
    """Scale inputs to zero mean and unit variance of the training rows."""


class SyntheticData(Group):
    """Random rows of the right shape; tokens follow a fixed random chain, so that there is something to learn."""

    kind: Literal["synthetic"] = "synthetic"
    """Which source this group describes."""
    task: Literal["tokens", "images", "table"] = "tokens"
    """What the rows look like."""
    num_rows: PositiveInt = 4096
    """Rows before they repeat."""
    sequence_length: PositiveInt | None = None
    """Tokens a row; null: the model's max_sequence_length."""
    vocab_size: PositiveInt = 256
    """Token ids (tokens)."""
    image_size: PositiveInt = 32
    """Side of an image (images)."""
    num_channels: PositiveInt = 3
    """Channels of an image (images)."""
    num_classes: PositiveInt = 10
    """Classes (images, table)."""
    num_columns: PositiveInt = 16
    """Input columns (table)."""


class Component(Group):
    """One source of a mixture."""

    source: Annotated[TextData | JsonlData | TokenData, Field(discriminator="kind")]
    """The source; all sources of a mixture use the tokenizer of the mixture."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the rows, relative to the other weights."""


class MixtureData(Group):
    """Several token sources, mixed by weight."""

    kind: Literal["mixture"] = "mixture"
    """Which source this group describes."""
    components: Annotated[tuple[Component, ...], Field(strict=False, min_length=1)]
    """The sources and their weights."""
    sequence_length: PositiveInt | None = None
    """Tokens a row; null: the model's max_sequence_length."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens, for all components."""


DataConfig = Annotated[
    TextData | JsonlData | TokenData | DigitsData | ImageFolderData | TableData | SyntheticData | MixtureData,
    Field(discriminator="kind"),
]
