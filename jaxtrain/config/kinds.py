"""Whether the groups of a config belong together. No jax here: `config` and `plan` ask too."""

import math
from collections.abc import Iterator, Sequence

from jaxtrain.config.base import Call
from jaxtrain.config.data import CalledData, ChatData, gives_pairs
from jaxtrain.config.model import CalledModel, CLIPConfig, TransformerConfig, published_from
from jaxtrain.config.schema import Config, FinetuneConfig, LossConfig
from jaxtrain.errors import ConfigError

# Kind of data -> what its rows are; of the others: examples.
_FORMS = {
    **dict.fromkeys(("text", "jsonl", "documents", "tokens", "mixture"), "tokens"),
    "labelled_text": "labelled text",
    "tagged_text": "tagged text",
    "text_pairs": "pairs of texts",
}
# What rows are -> the tasks, and the kinds of model, that take them.
_TAKEN = {
    "tokens": (("language_modeling",), ("transformer",)),
    "masked tokens": (("masked_language_modeling",), ("transformer",)),
    "pairs of texts": (("sequence_to_sequence",), ("encoder_decoder",)),
    "labelled text": (("classification", "regression"), ("transformer",)),
    "tagged text": (("token_classification",), ("transformer",)),
    "pairs of answers": (("dpo", "reward"), ("transformer",)),
    "examples": (("classification", "regression"), ("mlp", "resnet", "vit")),
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
# Those whose loss also calls the model that training starts from.
READS_REFERENCE = ("dpo",)
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


def check_kinds(config: Config, *, own_task: bool = False, own_data: bool = False) -> None:
    """Raise a ConfigError where the kinds of task, model and data do not belong together; looks at no data.

    `own_task` and `own_data` say that a task or data from Python takes the place of the config's.
    """
    check_freeze(config.finetune, config.optimizer.freeze)
    own, reasons = own_task or isinstance(config.task, Call), []
    if config.precision.policy == "fp8" and config.finetune.base is not None:
        reasons.append("precision.policy=fp8 does not go with finetune.base; use precision.policy=bf16")
    if not (own_data or isinstance(config.data, CalledData)):
        reasons += _wrong_rows(config, own_task=own)
    if not own:
        reasons += _wrong_model(config)
    for reason in reasons:
        raise ConfigError(reason)
    if not own_task:  # which may read them
        check_loss(config)


def check_freeze(finetune: FinetuneConfig, freeze: Sequence[str]) -> None:
    """Raise a ConfigError where a config freezes parameters that adapters freeze already."""
    if finetune.lora is not None and freeze:
        raise ConfigError(
            f"optimizer.freeze={list(freeze)} does not go with finetune.lora, which trains only adapters and "
            "finetune.lora.train_also; leave optimizer.freeze out"
        )


def row_form(config: Config) -> str:
    """What the rows of a config's own data are, in words: a key of `_TAKEN`."""
    data = config.data
    if isinstance(data, ChatData):
        return "pairs of answers" if gives_pairs(data, config.task) else "tokens"
    form = _FORMS.get(data.kind, "tokens" if getattr(data, "task", None) == "tokens" else "examples")
    return "masked tokens" if form == "tokens" and getattr(data, "corruption", None) is not None else form


def gives_tokens(config: Config) -> bool:
    """Whether the rows of a config's own data are tokens; of a function's data that is not known from the config."""
    return row_form(config) != "examples"


def _wrong_model(config: Config) -> Iterator[str]:
    """Why a transformer sees its targets, or gives outputs that the task does not take."""
    model, task = config.model, config.task
    if isinstance(model, CLIPConfig) != (task == "contrastive") and not isinstance(model, CalledModel):
        yield f"task={task} with model.kind={model.kind}; task=contrastive and model.kind=clip go together"
    if not isinstance(model, TransformerConfig) or isinstance(task, Call):
        return
    if not model.causal and task in ("language_modeling", "dpo"):
        yield (
            f"model.causal=false would let task={task} read its targets; set model.causal=true, "
            "task=masked_language_modeling, or bring a task of your own (task.call, or Python)"
        )
    if model.causal and task == "masked_language_modeling":
        yield f"task={task} needs a bidirectional model; set model.causal=false"
    wanted = _HEADS.get(task, ())
    if wanted and model.head_kind not in wanted:
        yield f"task={task} takes model.head.kind={wanted[0]}, but it is {model.head_kind}"
    head = model.head
    if task == "reward" and head and (head.num_labels != 1 or (model.causal and head.pooling != "last")):
        yield (
            "task=reward needs one number from the last token, which sees the text; set model.head.num_labels=1 "
            "and model.head.pooling=last"
        )


def _wrong_rows(config: Config, *, own_task: bool) -> Iterator[str]:
    """Why task or model take other rows than the data gives."""
    data, model, task = config.data, config.model, config.task
    form, source = row_form(config), f"data.kind={data.kind}"
    tasks, models = _TAKEN[form]
    if isinstance(model, CLIPConfig):
        yield f"model.kind=clip takes images with their texts, not the {form} of {source}; set data.call to a function"
        return
    if not isinstance(task, Call) and task not in tasks:
        other = "data.corruption.kind=mask or " if form == "tokens" and task == "masked_language_modeling" else ""
        yield f"task={task}, but {source} gives {form}; set {other}task={' or '.join(tasks)}"
    if data.kind == "table" and data.task not in (None, task) and not own_task:
        yield f"task={task}, but data.task={data.task}; set both to {data.task}, or leave data.task out"
    if not isinstance(model, CalledModel) and model.kind not in models:
        yield f"model.kind={model.kind} does not take the {form} of {source}; use model.kind={' or '.join(models)}"
    start = getattr(data, "decoder_start", None)
    if start is not None and getattr(model, "start_token", start) != start:
        yield f"decoder_start of the data is {start}; set model.start_token={start}"


def check_loss(config: Config) -> None:
    """Raise a ConfigError where an option of the loss would do nothing."""
    for name, value in config.loss:
        if value != getattr(LossConfig(), name) and config.task not in _LOSS[name]:
            raise ConfigError(
                f"loss.{name}={value} is for task={_LOSS[name][0]}, but task={task_name(config)}; leave it out"
            )


def check_sizes(
    config: Config,
    *,
    vocab_size: int | None,
    num_outputs: int | None,
    sequence_length: int | None,
    decoder_length: int | None,
) -> None:
    """Raise a ConfigError where the data has more token ids, classes or tokens per row than the model has room for.

    None: not known, or none; what the model leaves to the data is not compared.
    """
    model = config.model

    def room(*keys: str, of: object = model) -> float:
        return next((size for key in keys if (size := getattr(of, key, None))), math.inf)

    vocabulary, longest = room("vocab_size"), room("max_sequence_length")
    outputs = min(room("num_classes", "num_outputs"), room("num_labels", of=getattr(model, "head", None)))
    write = f"set model.vocab_size={vocab_size} or more, or leave it out"
    if (published := published_from(model)) is not None:
        write = f"set model.vocab_size={vocab_size} to add rows, or data.tokenizer.path to the tokenizer of {published}"
    too_long = f"exceeds model.max_sequence_length={longest}; lower it, or raise the model's"
    wrong = {
        f"model.vocab_size={vocabulary} is below the {vocab_size} token ids of the data; {write}": (vocab_size or 0)
        > vocabulary,
        f"the model has {outputs} outputs but the data {num_outputs} classes or columns": (num_outputs or 0) > outputs,
        f"data.sequence_length={sequence_length} {too_long}": (sequence_length or 0) > longest,
        f"data.target_length={decoder_length} {too_long}": (decoder_length or 0) > longest,
    }
    for line in [line for line, is_so in wrong.items() if is_so]:
        raise ConfigError(line)
