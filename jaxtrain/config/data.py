"""Settings of the data sources: one class per kind, with tokenizer, conversations and hidden tokens. No jax here."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from jaxtrain.config.base import Call, Count, Group, Positive, PositiveInt, Ratio, Share, SomeNames, kind_or

# The path that names the conversations made from the documentation that every Python carries.
PYTHON_DOCS = "python_docs"
# Tokens that a tokenizer made for a run gets, as the built-in template chatml writes them.
TURN_BEGINS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
# The classes of the built-in docstrings: packages of the standard library with many of them, about different things.
DOCSTRING_PACKAGES = ("asyncio", "email", "importlib", "logging", "tkinter", "unittest", "xml")
NUM_SENTINELS = 100  # as T5 has them (Raffel et al. 2020)


class TokenizerConfig(Group):
    """How text becomes token ids."""

    kind: Literal["byte", "bpe", "file"] = "byte"
    """byte: ids 0 to 255; bpe: trained on the data and saved with the run; file: a saved tokenizer.json."""
    vocab_size: Annotated[int, Field(ge=257, le=1_000_000)] = 1024
    """Size of a BPE vocabulary trained here: 256 bytes, the end-of-text id, and one id per merge."""
    path: str | None = None
    """Path of a tokenizer.json, for kind file."""
    start: str | None = None
    """Token that begins a row of an encoder; null: the usual name that the tokenizer has ([CLS], <s>)."""
    end: str | None = None
    """Token that ends a text and, except for kind byte, a document; null: from the files beside it, or a usual name."""
    mask: str | None = None
    """Token that replaces hidden tokens, for data.corruption.kind=mask; null: the usual name ([MASK], <mask>)."""
    padding: str | None = None
    """Token that pads rows; null: the usual name ([PAD], <pad>), else id 0."""

    @model_validator(mode="after")
    def _path_is_read(self) -> Self:
        if self.path is not None and self.kind != "file":
            raise ValueError(f"{self.path} is not used with kind={self.kind}; set kind=file, or leave the path out")
        return self


class MaskCorruption(Group):
    """Masks some tokens, which the model predicts (BERT); every epoch masks other tokens."""

    kind: Literal["mask"] = "mask"
    probability: Ratio = 0.15
    """Probability that a token is chosen (special ones never): of these, 80 % become the mask, 10 % a random token."""


class _Tokens(Group):
    """The settings of all sources whose rows are tokens."""

    sequence_length: PositiveInt | None = None
    """Tokens per row, special ones included; null: the model's max_sequence_length."""


class _Hidden(_Tokens):
    """The settings of sources whose tokens can be hidden."""

    corruption: MaskCorruption | None = None
    """What is hidden, for task=masked_language_modeling: {kind: mask}; null: none."""


class Stored(Group):
    """Data whose paths may be addresses: s3://, gs:// or https://."""

    cache: str | None = None
    """Folder for the copies of remote files (s3://, gs://, https://); null: the user's cache folder."""


class _TokenData(_Hidden, Stored):
    """The settings that all streams of tokens share."""

    validation_fraction: Share = 0.05
    """Fraction of the tokens, from the end of the data, held out for evaluation."""


class _Tokenized(Group):
    """The settings of sources of text."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens."""


class TextData(_Tokenized, _TokenData):
    """Plain text from files, or built-in text."""

    kind: Literal["text"] = "text"
    builtin: Literal["python_prose", "python_source"] | None = "python_prose"
    """Text that comes with Python and is used if path is null: the language reference, or the standard library."""
    path: str | None = None
    """A file, a folder (all its .txt files) or a glob."""


class JsonlData(_Tokenized, _TokenData):
    """JSON lines, one document each."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    """A file, a folder (all its .jsonl files) or a glob."""
    field: str = "text"
    """Key of the text in each line."""


class DocumentsData(_Tokenized, _TokenData):
    """Texts in a column of files of any format: Parquet, Arrow, ArrayRecord, tar, JSON lines."""

    kind: Literal["documents"] = "documents"
    path: str
    """A file, a folder (all its files, of one format, or one of datasets' save_to_disk) or a glob."""
    field: str = "text"
    """Column of the text; for tar files, the file ending of its members, such as txt."""


class TokenData(_TokenData):
    """Memory-mapped files of token ids, written by `jaxtrain data prepare`."""

    kind: Literal["tokens"] = "tokens"
    path: str
    """Folder of the files."""


class _LabelledData(_Tokenized, _Tokens, Stored):
    """The settings that all tables of texts share."""

    path: str | None = None
    """A .csv (with header), .jsonl or .parquet file."""
    validation_path: str | None = None
    """File with the rows for evaluation; null: validation_fraction of the rows."""
    validation_fraction: Share = 0.1
    """Fraction of the rows that is kept for evaluation where there is no validation_path."""


class LabelledTextData(_LabelledData):
    """Texts, or pairs of texts, with one class (or one number, under task=regression) each."""

    kind: Literal["labelled_text"] = "labelled_text"
    builtin: Literal["python_docstrings"] | None = None
    """Texts that come with Python and are used if path is null: docstrings, and the package that each is from."""
    text: str = "text"
    """Column of the text."""
    second_text: str | None = None
    """Column of a second text, for pairs."""
    label: str = "label"
    """Column of the class or number."""


class TaggedTextData(_LabelledData):
    """Lists of words with one class per word."""

    kind: Literal["tagged_text"] = "tagged_text"
    words: str = "words"
    """Column of the words: a list, or text with spaces between the words."""
    tags: str = "tags"
    """Column of the classes: a list, or text with spaces between the classes."""


class TextPairData(_LabelledData):
    """Pairs of a source text and the target text that a decoder generates."""

    kind: Literal["text_pairs"] = "text_pairs"
    builtin: Literal["python_docstrings"] | None = None
    """Texts that come with Python and are used if path is null: a docstring's first sentence, and the function."""
    source: str = "source"
    """Column of the source text, which the encoder reads."""
    target: str = "target"
    """Column of the target text, which the decoder generates."""
    target_length: PositiveInt | None = None
    """Tokens per target, including the end token; null: the same as sequence_length."""
    decoder_start: Count = 0
    """Token before the first one that a decoder writes; that of the model (model.start_token)."""


_ChatColumn = Literal[
    "messages",
    "role",
    "content",
    "system",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "tools",
    "chat_template_kwargs",
]


class ChatData(_Tokenized, _Tokens):
    """Conversations, formatted by the model's chat template; only the answers have a loss."""

    kind: Literal["chat"] = "chat"
    path: str | SomeNames = PYTHON_DOCS
    """.jsonl or .parquet file, folder or glob, or a list of these; python_docs: built in, from Python's docstrings."""
    validation_path: str | None = None
    """File, folder or glob with the conversations for evaluation; null: validation_fraction of path."""
    columns: dict[_ChatColumn, str] | None = None
    """Names of columns, or of keys of messages, such as {messages: dialog, content: text}; null: the usual ones."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] | None = None
    """Names of roles, such as {customer: user, agent: assistant}; null: the usual ones."""
    validation_fraction: Share = 0.05
    """Fraction of the conversations that is kept for evaluation; equal prompts stay together."""
    template: str | None = None
    """Chat template: a file, or chatml or plain (built in); null: the template beside the tokenizer."""
    train_on: Literal["answers", "last", "all"] = "answers"
    """Tokens with a loss: those of every answer, those of the last answer, or all tokens."""
    packing: bool = True
    """Pack several conversations into a row, where they do not attend to each other; pairs are never packed."""
    too_long: Literal["cut", "drop", "error"] = "cut"
    """What happens to a conversation of more than sequence_length tokens."""
    pairs: bool | None = None
    """Whether rows are pairs of a chosen and a rejected answer; null: for the tasks dpo and reward."""
    stop: str | None = None
    """Token that ends an answer; null: the model's stop tokens (generation_config.json, end of text)."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] = "2024-07-26"
    """Date that a template uses as today's, so that rows are the same every day."""


def gives_pairs(data: ChatData, task: object) -> bool:
    """Returns whether rows of chats are pairs of answers, for a task of this name."""
    return data.pairs if data.pairs is not None else task in ("dpo", "reward")


class DigitsData(Group):
    """1,797 images of handwritten digits, 8x8 pixels each (scikit-learn's copy)."""

    kind: Literal["digits"] = "digits"
    validation_fraction: Share = 0.2
    """Fraction of the images that is kept for evaluation."""


class _ImageData(Group):
    """The settings that all sources of image files share."""

    image_size: PositiveInt = 224
    """Height and width that images are cropped to, in pixels."""
    validation_fraction: Share = 0.1
    """Fraction of the images held out for evaluation, if the data has no validation images."""
    augment: bool = True
    """Crop and flip training images at random."""


class ImageFolderData(_ImageData):
    """Image files in one folder per class."""

    kind: Literal["image_folder"] = "image_folder"
    path: str
    """Folder that holds the class folders, or train/ and val/ with the class folders of each split."""


class ImageRecordsData(Stored, _ImageData):
    """Images with a class each, in tar shards or in columns of Parquet or Arrow files."""

    kind: Literal["images"] = "images"
    path: str
    """A file, a folder (all its files, of one format, or one of datasets' save_to_disk) or a glob."""
    validation_path: str | None = None
    """File, folder or glob with the images for evaluation; null: validation_fraction of path."""
    image: str | None = None
    """Column of the encoded image, or file ending in tar files; null: the first column with an image's usual name."""
    label: str | None = None
    """Column of the class; null: label, labels, cls or class, whichever exists."""


class TableData(Stored):
    """Rows of numbers from a .csv (with header), .npz (arrays inputs and targets), .parquet, .arrow or .jsonl file."""

    kind: Literal["table"] = "table"
    path: str
    """Path of the file, or a table of scikit-learn: builtin:breast_cancer, builtin:wine or builtin:diabetes."""
    target: str | None = None
    """Column to predict, for files with named columns; null: the last column."""
    columns: SomeNames | None = None
    """Input columns, in this order, for files with named columns; null: all but the target."""
    validation_fraction: Share = 0.2
    """Fraction of the rows that is kept for evaluation."""
    task: Literal["classification", "regression"] | None = None
    """What the target is; null: inferred from the run's task and the values, with an error if both are possible."""
    standardize: bool = True
    """Scale inputs to mean 0 and variance 1 over the training rows, and an MLP's outputs by the targets' scale."""


class SyntheticData(_Hidden):
    """Random rows of the right shape; tokens follow a fixed random Markov chain, so that a model can learn it."""

    kind: Literal["synthetic"] = "synthetic"
    task: Literal["tokens", "images", "table"] = "tokens"
    """Kind of the rows."""
    num_rows: PositiveInt = 4096
    """Number of distinct rows, which repeat after that."""
    vocab_size: PositiveInt = 256
    """Number of token ids, for task tokens, not counting the special ones of corruption."""
    image_size: PositiveInt = 32
    """Side of an image in pixels, for task images."""
    num_channels: PositiveInt = 3
    """Channels of an image, for task images."""
    num_columns: PositiveInt = 16
    """Number of input columns, for task table."""
    num_classes: PositiveInt = 10
    """Number of classes, for tasks images and table."""


class Component(Group):
    """One source of a mixture."""

    source: Annotated[TextData | JsonlData | DocumentsData | TokenData, Field(discriminator="kind")]
    """The source; all sources of a mixture use the same tokenizer."""
    weight: Positive = 1.0
    """Share of the training rows, relative to the weights of the other components."""

    @model_validator(mode="after")
    def _is_a_stream(self) -> Self:
        if self.source.corruption is not None:
            raise ValueError("a component takes no corruption; set data.corruption")
        return self


class MixtureData(_Tokenized, _Hidden):
    """Several sources of tokens, mixed by weight."""

    kind: Literal["mixture"] = "mixture"
    components: Annotated[tuple[Component, ...], Field(strict=False, min_length=1)]
    """The sources and their weights."""


class CalledData(Call):
    """Data of your own: a function that returns a jaxtrain.Data or a dict of arrays."""

    kind: Literal["called"] = "called"


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
    kind_or("text"),
]


def added_tokens(config: Group) -> tuple[str, ...]:
    """Returns the special tokens that a data group adds to a tokenizer that is made here, in the order of their ids."""
    is_masked = getattr(config, "corruption", None) is not None
    if isinstance(config, LabelledTextData | TaggedTextData) or is_masked:
        return ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    if isinstance(config, TextPairData):
        return ("<pad>", "</s>", *(f"<extra_id_{k}>" for k in reversed(range(NUM_SENTINELS))))
    return ("<pad>", TURN_BEGINS, TURN_ENDS) if isinstance(config, ChatData) else ()
