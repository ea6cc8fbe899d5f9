"""What a step works on, as far as a config says it: shapes of a batch, sizes that the data decides. No jax here."""

import functools
import math
from dataclasses import dataclass, replace

from jaxtrain.config.data import (
    DOCSTRING_PACKAGES,
    CalledData,
    ChatData,
    DigitsData,
    ImageFolderData,
    ImageRecordsData,
    LabelledTextData,
    SyntheticData,
    TableData,
    TaggedTextData,
    TextPairData,
    TokenData,
    added_tokens,
    gives_pairs,
)
from jaxtrain.config.kinds import PREFERENCES, READS_REFERENCE, check_kinds, check_sizes, gives_tokens
from jaxtrain.config.model import (
    CalledModel,
    CLIPConfig,
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
from jaxtrain.models.shipped import shapes
from jaxtrain.models.shipped.shapes import Structure, Tensors, structure_of
from jaxtrain.plan.state import finetuned

_IMAGENET_CLASSES = 1000
_PAIRS = "a pair is two rows, one per answer"
# Ids of a BPE tokenizer that learned nothing: one of each byte.
_LEAST_BPE = 256
# Of scikit-learn's tables, which `builtin:` names: (columns, outputs).
_BUILTIN_TABLES = {"builtin:breast_cancer": (30, 2), "builtin:wine": (13, 3), "builtin:diabetes": (10, 1)}


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
        length = self.sequence_length
        return None if length is None else self.rows * (length + (self.decoder_length or 0))

    @property
    def row_bytes(self) -> int:
        """Of one row on the device: int32 tokens and targets, or float32 inputs and a target."""
        if self.numbers is not None:
            return 4 * self.numbers
        return 4 * (2 * math.prod(self.input_shape) if self.unit == "tokens" else math.prod(self.input_shape) + 1)


@dataclass(frozen=True)
class RowSizes:
    """What the data says of its rows; the fields are those of `Workload`, None where one does not apply."""

    input_shape: tuple[int, ...]
    vocab_size: int | None = None
    num_outputs: int | None = None
    notes: tuple[str, ...] = ()
    unit: str | None = None
    decoder_length: int | None = None
    numbers: int | None = None


def model_tensors(config: ModelConfig, workload: Workload) -> Tensors:
    """The tensors of the model that a config describes, for the rows of a workload."""
    sizes = {name: getattr(workload, name) for name in ("input_shape", "vocab_size", "num_outputs")}
    return shapes.model_tensors(config, **sizes)


def model_structure(config: ModelConfig, workload: Workload) -> Structure | None:
    """The stacks of transformer blocks of a model and the layers around them, for the rows of a workload."""
    names = ("input_shape", "vocab_size", "num_outputs", "decoder_length")
    return structure_of(config, **{name: getattr(workload, name) for name in names})


def describe_workload(config: Config, sizes: RowSizes | None = None) -> Workload:
    """The sizes of a config's rows.

    Args:
        config: the run.
        sizes: of data that takes the place of the config's; None: the config's data, which is not opened unless a
            function has to be called.

    Raises:
        ConfigError: task, model and data that do not go together, or a size that only the data knows; says which key
            to set.
    """
    model, data, given = config.model, config.data, sizes is not None
    if sizes is None and isinstance(data, CalledData):
        sizes = _opened_sizes(config.model_dump_json())
    # A plan knows no task from Python, but a config may be meant for one.
    check_kinds(config, own_task=True, own_data=sizes is not None)
    sizes = sizes or _sizes_of_config(config)
    if isinstance(model, CalledModel):
        return _workload(config, sizes, sizes.unit or ("tokens" if gives_tokens(config) else "examples"))
    takes_tokens = isinstance(model, TransformerConfig | EncoderDecoderConfig)
    # The data is not opened, and of a small one fewer ids are learned than asked for.
    may_be_fewer = not given and getattr(getattr(data, "tokenizer", None), "kind", None) == "bpe"
    check_sizes(
        config,
        vocab_size=_LEAST_BPE if may_be_fewer else sizes.vocab_size,
        num_outputs=sizes.num_outputs,
        sequence_length=sizes.input_shape[-1] if takes_tokens else None,
        decoder_length=sizes.decoder_length,
    )
    sizes = _of_model(config, sizes, "the data given" if given else f"data.kind={data.kind}")
    workload = _workload(config, sizes, "tokens" if takes_tokens else "examples")
    if takes_tokens and config.task in PREFERENCES:
        (length,) = sizes.input_shape[-1:]  # of data from Python, [2, L]
        notes, numbers = (*sizes.notes, _PAIRS), 3 * length
        workload = replace(
            workload, input_shape=(length,), rows=2 * workload.rows, notes=notes, numbers=numbers, pairs=True
        )
    else:
        workload = replace(workload, weighted=not given and isinstance(data, ChatData))
    stored = finetuned(config, model_tensors(model, workload))
    names = ("sequence_length", "input_shape", "num_outputs", "vocab_size", "decoder_length")
    of_rows = {name: getattr(workload, name) for name in names}
    flops = model_flops_per_row(
        model,
        **of_rows,
        trained=stored.trained,
        adapters=stored.adapters,
        reference=config.task in READS_REFERENCE,
    )
    return replace(workload, flops_per_row=flops)


def _workload(config: Config, sizes: RowSizes, unit: str) -> Workload:
    rows = config.train.global_batch_size
    own = {name: getattr(sizes, name) for name in ("notes", "decoder_length", "numbers")}
    return Workload(unit, sizes.input_shape, sizes.vocab_size, sizes.num_outputs, rows, None, **own)


@functools.lru_cache(maxsize=4)
def _opened_sizes(config: str) -> RowSizes:
    """The sizes of the rows that a function of the user's returns, from a config as JSON."""
    from jaxtrain.data.configured import open_run_data

    data = open_run_data(Config.model_validate_json(config))
    length = data.decoder_length
    return RowSizes(data.input_shape, data.vocab_size, data.num_outputs, unit=data.unit, decoder_length=length)


def _sizes_of_config(config: Config) -> RowSizes:
    """The sizes of the rows that a config's own data has, which is not opened."""
    data, model = config.data, config.model
    match data:
        case DigitsData():
            return RowSizes((8, 8, 1), num_outputs=10)
        case ImageFolderData() | ImageRecordsData():
            shape = (data.image_size, data.image_size, 3)
            if not isinstance(model, ResNetConfig | ViTConfig) or model.num_classes is not None:
                return RowSizes(shape)
            note = f"{_IMAGENET_CLASSES:,} classes, as ImageNet has; model.num_classes says otherwise"
            return RowSizes(shape, None, _IMAGENET_CLASSES, (note,))
        case TableData():
            if data.path not in _BUILTIN_TABLES:
                raise ConfigError(
                    f"a plan does not open data.path={data.path}; plan with data.kind=synthetic data.task=table "
                    "data.num_columns=N data.num_classes=M"
                )
            columns, num_outputs = _BUILTIN_TABLES[data.path]
            return RowSizes((columns,), num_outputs=num_outputs)
        case SyntheticData(task="images"):
            return RowSizes((data.image_size, data.image_size, data.num_channels), num_outputs=data.num_classes)
        case SyntheticData(task="table"):
            return RowSizes((data.num_columns,), num_outputs=data.num_classes)
        case _:
            return _sizes_of_text(config)


def _sizes_of_text(config: Config) -> RowSizes:
    data, model = config.data, config.model
    assert not isinstance(data, CalledData | DigitsData | ImageFolderData | ImageRecordsData | TableData)
    length = data.sequence_length or getattr(model, "max_sequence_length", None)
    if length is None:
        raise ConfigError("data.sequence_length is null and model.call does not set it; set it, such as 256")
    vocab_size, notes = None, ()
    match data:
        case SyntheticData():
            vocab_size = data.vocab_size + len(added_tokens(data))
        case TokenData():
            pass
        case _ if data.tokenizer.kind == "byte":
            vocab_size = 256 + len(added_tokens(data))
        case _ if data.tokenizer.kind == "bpe":
            vocab_size = data.tokenizer.vocab_size
            notes = (f"a full vocabulary of {vocab_size:,} token ids",)
    num_outputs = None
    if isinstance(data, LabelledTextData) and data.path is None:
        num_outputs = 1 if config.task == "regression" else len(DOCSTRING_PACKAGES)
    if not isinstance(model, CalledModel) and getattr(model, "vocab_size", None) is not None:
        notes = ()
    unit = "tokens" if isinstance(model, CalledModel) else None
    return RowSizes((length,), vocab_size, num_outputs, notes, unit, *_numbers_of_text(config, length))


def _numbers_of_text(config: Config, length: int) -> tuple[int | None, int]:
    """The tokens of a decoder in a row of text (None: there is none), and the 32-bit numbers of the row."""
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
    return None, 2 * length


def _of_model(config: Config, sizes: RowSizes, source: str) -> RowSizes:
    """The sizes with what the model says in place of what the data says."""
    model, vocab_size, num_outputs = config.model, sizes.vocab_size, sizes.num_outputs
    match model:
        case TransformerConfig() | EncoderDecoderConfig():
            vocab_size = model.vocab_size or vocab_size
            if vocab_size is None:
                raise ConfigError(f"{source} has no vocabulary size; set model.vocab_size to the tokenizer's")
            head = model.head if isinstance(model, TransformerConfig) else None
            if head is None or not head.has_labels:
                return replace(sizes, vocab_size=vocab_size)
            key, own = "head.num_labels", head.num_labels
        case ResNetConfig() | ViTConfig():
            key, own = "num_classes", model.num_classes
        case MLPConfig():
            key, own = "num_outputs", model.num_outputs
        case CLIPConfig():
            return replace(sizes, numbers=math.prod(shapes.clip_image(model)) + model.text.max_sequence_length)
        case _:
            return sizes
    num_outputs = own or num_outputs
    if num_outputs is None:
        raise ConfigError(f"{source} has no number of classes or targets; set model.{key}")
    if isinstance(model, ResNetConfig) and len(sizes.input_shape) != 3:
        raise ConfigError(f"model.kind=resnet takes images, but a row of {source} is {sizes.input_shape}")
    if isinstance(model, ViTConfig):
        image_sizes(model, sizes.input_shape)  # raises
    return replace(sizes, vocab_size=vocab_size, num_outputs=num_outputs)
