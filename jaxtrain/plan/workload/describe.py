"""What a step works on, as far as a config says it: shapes of a batch, sizes that the data decides. No jax here."""

import functools
from dataclasses import dataclass, replace

from jaxtrain.config.data import (
    DOCSTRING_PACKAGES,
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
    SpanCorruption,
    SyntheticData,
    TableData,
    TaggedTextData,
    TextData,
    TextPairData,
    TokenData,
    TokenizerConfig,
    added_tokens,
    gives_pairs,
    span_sizes,
)
from jaxtrain.config.kinds import PREFERENCES, check_kinds, check_sizes, gives_tokens
from jaxtrain.config.model import (
    CalledModel,
    EncoderDecoderConfig,
    MLPConfig,
    ModelConfig,
    ResNetConfig,
    TransformerConfig,
    ViTConfig,
    image_sizes,
)
from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.flops import model_flops_per_row
from jaxtrain.plan.workload.finetuned import finetuned
from jaxtrain.plan.workload.parameters import model_tensors
from jaxtrain.plan.workload.record import Workload

_IMAGENET_CLASSES = 1000
_PAIRS = (
    "a pair is two rows, one per answer; the pass before step 0, which computes what dpo compares with (forward, once "
    "per pair), is not counted"
)
# Ids of a BPE tokenizer that learned nothing: one of each byte.
_LEAST_BPE = 256
# Of scikit-learn's tables, which `builtin:` names: (columns, outputs).
_BUILTIN_TABLES = {"builtin:breast_cancer": (30, 2), "builtin:wine": (13, 3), "builtin:diabetes": (10, 1)}


def _vocabulary(tokenizer: TokenizerConfig, num_added: int) -> tuple[int | None, str]:
    """The ids of a tokenizer and a note; None: only its file knows them.

    Args:
        tokenizer: which one.
        num_added: special tokens that the rows take.
    """
    if tokenizer.kind == "byte":
        return 256 + num_added, ""
    if tokenizer.kind == "bpe":
        return tokenizer.vocab_size, f"a full vocabulary of {tokenizer.vocab_size:,} token ids"
    return None, ""


@dataclass(frozen=True)
class RowSizes:
    """What the data says of its rows; None where it does not apply.

    Attributes:
        input_shape: of one row, without the batch.
        vocab_size: of its tokens.
        num_outputs: its classes or targets.
        notes: what was assumed.
        unit: tokens or examples; None: those of the config's data.
        decoder_length: tokens of a row of a decoder beside an encoder; None: rows have none.
        numbers: 32-bit numbers of a row, targets included; None: tokens and targets, or inputs and a target.
    """

    input_shape: tuple[int, ...]
    vocab_size: int | None
    num_outputs: int | None
    notes: tuple[str, ...] = ()
    unit: str | None = None
    decoder_length: int | None = None
    numbers: int | None = None


def _sizes_of_config(config: Config) -> RowSizes:
    """The sizes of the rows that a config's own data has, which is not opened, unless a function has to be called.

    Raises:
        ConfigError: a size that only the data knows; says which key to set.
    """
    data, model = config.data, config.model
    notes: list[str] = []
    vocab_size = num_outputs = None
    match data:
        case CalledData():
            return _opened_sizes(config.model_dump_json())
        case DigitsData():
            input_shape, num_outputs = (8, 8, 1), 10
        case ImageFolderData() | ImageRecordsData():
            input_shape = (data.image_size, data.image_size, 3)
            if isinstance(model, ResNetConfig | ViTConfig) and model.num_classes is None:
                num_outputs = _IMAGENET_CLASSES
                notes.append(f"{_IMAGENET_CLASSES:,} classes, as ImageNet has; model.num_classes says otherwise")
        case TableData():
            if data.path not in _BUILTIN_TABLES:
                raise ConfigError(
                    f"a plan does not open data.path={data.path}; plan with data.kind=synthetic data.task=table "
                    "data.num_columns=N data.num_classes=M"
                )
            columns, num_outputs = _BUILTIN_TABLES[data.path]
            input_shape = (columns,)
        case SyntheticData(task="images"):
            input_shape, num_outputs = (data.image_size, data.image_size, data.num_channels), data.num_classes
        case SyntheticData(task="table"):
            input_shape, num_outputs = (data.num_columns,), data.num_classes
        case _:
            length = data.sequence_length or getattr(model, "max_sequence_length", None)
            if length is None:
                raise ConfigError("data.sequence_length is null and model.call says nothing of it; set it, such as 256")
            input_shape = (length,)
            match data:
                case SyntheticData():
                    vocab_size, note = data.vocab_size + len(added_tokens(data)), ""
                case TokenData():
                    vocab_size, note = None, ""
                case _:
                    vocab_size, note = _vocabulary(data.tokenizer, len(added_tokens(data)))
            decoder_length, numbers = _numbers_of_text(config, length)
            if isinstance(data, LabelledTextData) and data.path is None:
                num_outputs = 1 if config.task == "regression" else len(DOCSTRING_PACKAGES)
            if isinstance(model, CalledModel):
                notes = [note] if note else []
                return RowSizes(input_shape, vocab_size, num_outputs, tuple(notes), "tokens", decoder_length, numbers)
            if getattr(model, "vocab_size", None) is None and vocab_size is None:
                raise ConfigError(
                    "a plan does not open the data, and model.vocab_size is not set; set model.vocab_size to the "
                    "vocabulary of the tokenizer"
                )
            if getattr(model, "vocab_size", None) is None and note:
                notes.append(note)
            return RowSizes(input_shape, vocab_size, num_outputs, tuple(notes), None, decoder_length, numbers)
    return RowSizes(input_shape, vocab_size, num_outputs, tuple(notes))


def _numbers_of_text(config: Config, length: int) -> tuple[int | None, int]:
    """The tokens of a decoder in a row of text, and the 32-bit numbers of the row; None: there is no decoder.

    Args:
        config: the run.
        length: tokens of the inputs.
    """
    match config.data:
        case TextPairData() as pairs:
            decoder_length = pairs.target_length or length
            return decoder_length, 2 * length + 3 * decoder_length
        case LabelledTextData() as labelled:
            return None, (3 if labelled.second_text else 2) * length + 1
        case TaggedTextData():
            return None, 3 * length
        case ChatData() as chats:
            # Inputs, targets and weights of both answers; or those with segments and positions of packed rows.
            return None, (6 if gives_pairs(chats, config.task) else 5 if chats.packing else 3) * length
        case DocumentsData(rows="document"):
            return None, 3 * length
        case TextData() | JsonlData() | DocumentsData() | TokenData() | MixtureData() | SyntheticData() as stream:
            if isinstance(stream.corruption, SpanCorruption):
                decoder_length = span_sizes(stream.corruption, length).targets_length
                return decoder_length, length + 2 * decoder_length
    return None, 2 * length


def has_weights(data: DataConfig) -> bool:
    """Whether each target of a row has a weight: in conversations, and where a row is filled up after one text."""
    return isinstance(data, ChatData) or (isinstance(data, DocumentsData) and data.rows == "document")


@functools.lru_cache(maxsize=4)
def _opened_sizes(config: str) -> RowSizes:
    """The sizes of the rows that a function of the user's returns; a search asks for every layout.

    Args:
        config: as JSON.
    """
    from jaxtrain.train.assemble import open_run_data

    data = open_run_data(Config.model_validate_json(config))
    length = data.decoder_length
    return RowSizes(data.input_shape, data.vocab_size, data.num_outputs, unit=data.unit, decoder_length=length)


def describe_workload(config: Config, sizes: RowSizes | None = None) -> Workload:
    """The sizes of a config's rows.

    Args:
        config: the run.
        sizes: of data that takes the place of the config's; None: the config's data, which is not opened.

    Raises:
        ConfigError: task, model and data that do not go together, or a size that only the data knows; says which key
            to set.
    """
    source = f"data.kind={config.data.kind}" if sizes is None else "the data given"
    weighted = sizes is None and has_weights(config.data)
    if isinstance(config.data, CalledData):
        source = f"data.call={config.data.call}"
        sizes = sizes or _sizes_of_config(config)
    # A plan knows no task from Python, but a config may be meant for one.
    check_kinds(config, own_task=True, own_data=sizes is not None)
    model, given = config.model, sizes is not None
    sizes = sizes or _sizes_of_config(config)
    input_shape, vocab_size, num_outputs = sizes.input_shape, sizes.vocab_size, sizes.num_outputs
    if isinstance(model, CalledModel):
        unit = sizes.unit or ("tokens" if gives_tokens(config) else "examples")
        rows = config.train.global_batch_size
        return Workload(
            unit, input_shape, vocab_size, num_outputs, rows, None, sizes.notes, sizes.decoder_length, sizes.numbers
        )
    takes_tokens = isinstance(model, TransformerConfig | EncoderDecoderConfig)
    # The data is not opened, and of a small one fewer ids are learned than asked for.
    may_be_fewer = not given and getattr(getattr(config.data, "tokenizer", None), "kind", None) == "bpe"
    check_sizes(
        config,
        vocab_size=_LEAST_BPE if may_be_fewer else vocab_size,
        num_outputs=num_outputs,
        sequence_length=input_shape[-1] if takes_tokens else None,
        decoder_length=sizes.decoder_length,
    )
    room = getattr(model, "vocab_size", None)
    if may_be_fewer and room is not None and vocab_size is not None and room < vocab_size:
        note = f"the tokenizer may learn up to {vocab_size:,} token ids, of which the model takes {room:,}"
        sizes = replace(sizes, notes=(*sizes.notes, note))
    num_outputs = _outputs(model, num_outputs, source)
    if isinstance(model, TransformerConfig | EncoderDecoderConfig):
        vocab_size = model.vocab_size or vocab_size
        if vocab_size is None:
            raise ConfigError(f"{source} names no vocabulary; set model.vocab_size to that of the tokenizer")
    elif isinstance(model, ResNetConfig) and len(input_shape) != 3:
        raise ConfigError(f"model.kind=resnet takes images, but a row of {source} is {input_shape}")
    elif isinstance(model, ViTConfig):
        image_sizes(model, input_shape)  # raises
    unit = "tokens" if takes_tokens else "examples"
    rows = config.train.global_batch_size
    pairs = takes_tokens and config.task in PREFERENCES
    if pairs:
        (length,) = input_shape[-1:]  # of data from Python, [2, L]
        sizes = replace(sizes, notes=(*sizes.notes, _PAIRS), numbers=3 * length + 1)
        input_shape, rows = (length,), 2 * rows
    workload = Workload(
        unit, input_shape, vocab_size, num_outputs, rows, 0.0, sizes.notes, sizes.decoder_length, sizes.numbers, pairs
    )
    stored = finetuned(config, model_tensors(model, workload))
    flops = model_flops_per_row(
        model,
        sequence_length=workload.sequence_length,
        input_shape=input_shape,
        num_outputs=num_outputs,
        vocab_size=vocab_size,
        decoder_length=sizes.decoder_length,
        trained=stored.trained,
        adapters=stored.adapters,
    )
    assert flops is not None, "every size is known by here"
    return replace(workload, flops_per_row=flops, weighted=weighted and not pairs)


def _outputs(model: ModelConfig, num_outputs: int | None, source: str) -> int | None:
    """The classes, labels or targets of a model; None: it has none.

    Raises:
        ConfigError: neither model nor data say how many.
    """
    match model:
        case TransformerConfig(head=head):
            if head is None or not head.has_labels:
                return num_outputs
            if (head.num_labels or num_outputs) is None:
                raise ConfigError(f"a plan does not open {source}; set model.head.num_labels to its classes")
            return head.num_labels or num_outputs
        case ResNetConfig() | ViTConfig():
            key, own = "num_classes", model.num_classes
        case MLPConfig():
            key, own = "num_outputs", model.num_outputs
        case _:
            return num_outputs
    if (own or num_outputs) is None:
        raise ConfigError(f"{source} names neither classes nor targets; set model.{key}")
    return own or num_outputs
