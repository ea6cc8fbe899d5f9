"""Whether task, model, data and loss of a config belong together. No jax here: `config` and `plan` ask too."""

from jaxtrain.config.call import Call
from jaxtrain.config.chat import ChatData, gives_pairs
from jaxtrain.config.data import (
    CalledData,
    DocumentsData,
    JsonlData,
    LabelledTextData,
    MaskCorruption,
    MixtureData,
    SpanCorruption,
    SyntheticData,
    TaggedTextData,
    TextData,
    TextPairData,
    TokenData,
)
from jaxtrain.config.finetune import check_freeze
from jaxtrain.config.models import CalledModel, TransformerConfig
from jaxtrain.config.schema import Config, LossConfig
from jaxtrain.errors import ConfigError

# What rows are -> the tasks that take them.
_TASKS = {
    "tokens": ("language_modeling",),
    "masked tokens": ("masked_language_modeling",),
    "pairs of texts": ("sequence_to_sequence",),
    "labelled text": ("classification", "regression"),
    "tagged text": ("token_classification",),
    "pairs of answers": ("dpo", "reward"),
    "examples": ("classification", "regression"),
}
# What rows are -> the kinds of model that take them.
_MODELS = {
    "tokens": ("transformer",),
    "masked tokens": ("transformer",),
    "pairs of texts": ("encoder_decoder",),
    "labelled text": ("transformer",),
    "tagged text": ("transformer",),
    "pairs of answers": ("transformer",),
    "examples": ("mlp", "resnet", "vit"),
}
# Task -> the kinds of head whose outputs it takes, the usual one first; of a transformer without one: language_model.
_HEADS = {
    "language_modeling": ("language_model",),
    "masked_language_modeling": ("masked_language_model", "language_model"),
    "classification": ("sequence",),
    "token_classification": ("token",),
    "regression": ("regression",),
    "dpo": ("language_model",),
    "reward": ("regression", "sequence"),
}
# Tasks that compare two answers.
PREFERENCES = ("dpo", "reward")
_TOKEN_LOSS = ("language_modeling", "masked_language_modeling", "sequence_to_sequence")
# Key of the group `loss` -> the tasks that read it, the usual one first.
_LOSS = {
    "z_loss": _TOKEN_LOSS,
    "logits": (*_TOKEN_LOSS, "dpo"),
    "block": (*_TOKEN_LOSS, "dpo"),
    "beta": ("dpo",),
    "label_smoothing": ("dpo", "classification"),
}


def called_parts(config: Config) -> dict[str, Call]:
    """The groups of a config that name a function of the user's: model, task, data, optimizer -> the group."""
    groups = {"model": config.model, "task": config.task, "data": config.data, "optimizer": config.optimizer}
    return {name: group for name, group in groups.items() if isinstance(group, Call)}


def task_name(config: Config) -> str:
    """The task of a config for people: its name, or the function that makes it."""
    return config.task.call if isinstance(config.task, Call) else config.task


def check_kinds(config: Config, *, own_task: bool = False, unit: str | None = None) -> None:
    """Raise where the kinds of task, model and data do not belong together; looks at no data.

    Args:
        config: with a model of its own (a user's model in its place is nothing to check here).
        own_task: whether a task from Python takes the place of the config's.
        unit: tokens or examples, of data from Python that may take the place of the config's; None: it is the config's.

    Raises:
        ConfigError: names what would work.
    """
    check_freeze(config.finetune, config.optimizer.freeze)
    if config.precision.policy == "fp8" and config.finetune.base is not None:
        raise ConfigError(
            f"precision.policy=fp8 multiplies kernels of floats, and finetune.base={config.finetune.base} stores them "
            f"in {8 if config.finetune.base == 'int8' else 4} bits; use precision.policy=bf16, or leave finetune.base "
            "out"
        )
    called_task = isinstance(config.task, Call)
    if config.model.kind == "transformer" and not (own_task or called_task):
        _check_sight(config)
    if unit is not None or not isinstance(config.data, CalledData):  # whose rows are known once it was called
        _check_rows(config, own_task=own_task or called_task, unit=unit)
    if not (own_task or called_task):
        _check_head(config)
    if not own_task:  # which may read them
        check_loss(config)


def row_form(config: Config) -> str:
    """What the rows of a config's own data are, in words: a key of the tables above."""
    data = config.data
    match data:
        case LabelledTextData():
            return "labelled text"
        case TaggedTextData():
            return "tagged text"
        case TextPairData():
            return "pairs of texts"
        case ChatData():
            return "pairs of answers" if gives_pairs(data, config.task) else "tokens"
        case TextData() | JsonlData() | DocumentsData() | TokenData() | MixtureData() | SyntheticData(task="tokens"):
            if data.corruption is None:
                return "tokens"
            return "masked tokens" if isinstance(data.corruption, MaskCorruption) else "pairs of texts"
    return "examples"


def gives_tokens(config: Config) -> bool:
    """Whether the rows of a config's own data are tokens; of a function's data that is not known from the config."""
    return row_form(config) != "examples"


def _check_sight(config: Config) -> None:
    """Raise where a transformer sees its targets, or does not see what it needs."""
    assert isinstance(config.model, TransformerConfig)
    if not config.model.causal and config.task in ("language_modeling", "dpo"):
        raise ConfigError(
            f"model.causal=false would let task={config.task} read its targets; set model.causal=true, "
            "task=masked_language_modeling, or bring a task of your own (task.call, or Python)"
        )
    if config.model.causal and config.task == "masked_language_modeling":
        raise ConfigError(
            "task=masked_language_modeling takes a model that sees both sides of a token; set model.causal=false"
        )


def _check_head(config: Config) -> None:
    """Raise where a transformer gives outputs that the task does not take."""
    if not isinstance(config.model, TransformerConfig) or isinstance(config.task, Call):
        return
    head = config.model.head
    kind, wanted = "language_model" if head is None else head.kind, _HEADS.get(config.task, ())
    if wanted and kind not in wanted:
        raise ConfigError(
            f"task={config.task} takes model.head.kind={wanted[0]}, but it is {kind}; set model.head.kind={wanted[0]}"
        )
    if config.task == "reward" and head is not None:
        if head.num_labels != 1:
            raise ConfigError(
                f"task=reward takes one number per text, but model.head.num_labels={head.num_labels or 'null'}; "
                "set model.head.num_labels=1"
            )
        if config.model.causal and head.pooling != "last":
            raise ConfigError(
                f"task=reward scores the last token, which alone sees the text, but model.head.pooling={head.pooling}; "
                "set model.head.pooling=last"
            )


def _check_rows(config: Config, *, own_task: bool, unit: str | None) -> None:
    """Raise where task or model take other rows than the data gives."""
    form, source = row_form(config), f"data.kind={config.data.kind}"
    if isinstance(config.data, CalledData):
        if isinstance(config.model, CalledModel):
            return  # they know of each other
        form, source = _form_of_unit(config, unit), f"data.call={config.data.call}"
    elif unit is not None and (form != "examples") != (unit == "tokens"):
        form, source = _form_of_unit(config, unit), "the data given"
    if not isinstance(config.task, Call) and config.task not in _TASKS[form]:
        raise ConfigError(f"task={config.task}, but {source} gives {form}; set {_works(config.task, form)}")
    if config.data.kind == "table" and config.data.task not in (None, config.task) and not own_task:
        raise ConfigError(
            f"task={config.task}, but data.task={config.data.task}; set both to {config.data.task}, or leave data.task "
            "out"
        )
    if isinstance(config.model, CalledModel):
        return
    if config.model.kind not in _MODELS[form]:
        if form == "examples":
            raise ConfigError(f"model.kind={config.model.kind} takes tokens, but {source} gives examples; use another")
        raise ConfigError(
            f"model.kind={config.model.kind} does not take the {form} of {source}; use model.kind={_MODELS[form][0]}"
        )
    start = getattr(config.data, "corruption", None) or config.data
    if form == "pairs of texts" and isinstance(start, SpanCorruption | TextPairData):
        begins = getattr(config.model, "start_token", start.decoder_start)
        if begins != start.decoder_start:
            raise ConfigError(
                f"model.start_token={begins}, but the data begins with {start.decoder_start}; set "
                f"data.{'corruption.' if isinstance(start, SpanCorruption) else ''}decoder_start={begins}"
            )


def _form_of_unit(config: Config, unit: str | None) -> str:
    """The rows of data from Python: tokens in an array, or what the task takes where its inputs are several arrays."""
    if isinstance(config.task, Call) or config.task in ("language_modeling", "classification", "regression"):
        model = config.model
        has_head = (
            isinstance(model, TransformerConfig) and model.head is not None and config.task != "language_modeling"
        )
        return "labelled text" if has_head else "tokens" if unit == "tokens" else "examples"
    return next(form for form, tasks in _TASKS.items() if config.task in tasks)


def _works(task: str, form: str) -> str:
    """What would make the rows fit the task, or the task the rows."""
    hidden = {"masked_language_modeling": "mask", "sequence_to_sequence": "spans"}.get(task)
    other = f"data.corruption.kind={hidden} or " if form == "tokens" and hidden else ""
    return f"{other}task={' or '.join(_TASKS[form])}"


def check_loss(config: Config) -> None:
    """Raise where options of the loss would do nothing.

    Raises:
        ConfigError: names the first of them.
    """
    for name, value in config.loss:
        if value != getattr(LossConfig(), name) and config.task not in _LOSS[name]:
            raise ConfigError(
                f"loss.{name}={value} is for task={_LOSS[name][0]}, but task={task_name(config)}; leave it out"
            )
