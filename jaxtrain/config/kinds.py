"""Whether task, model, data and loss of a config belong together. No jax here: `config` and `plan` ask too."""

from jaxtrain.config.call import Call
from jaxtrain.config.data import CalledData
from jaxtrain.config.models import CalledModel
from jaxtrain.config.schema import Config, LossConfig
from jaxtrain.errors import ConfigError


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
    called_task = isinstance(config.task, Call)
    if config.model.kind == "transformer" and not config.model.causal and not (own_task or called_task):
        raise ConfigError(
            "model.causal=false would let task=language_modeling read its targets; set model.causal=true, "
            "or bring a task of your own (task.call, or Python)"
        )
    if unit is not None or not isinstance(config.data, CalledData):  # whose rows are known once it was called
        _check_rows(config, own_task=own_task or called_task, unit=unit)
    if not own_task:  # which may read them
        check_loss(config)


def gives_tokens(config: Config) -> bool:
    """Whether the rows of a config's own data are tokens; of a function's data that is not known from the config."""
    data = config.data
    return data.kind in ("text", "jsonl", "tokens", "mixture") or getattr(data, "task", None) == "tokens"


def _check_rows(config: Config, *, own_task: bool, unit: str | None) -> None:
    """Raise where task or model take other rows than the data gives."""
    tokens, source = gives_tokens(config), f"data.kind={config.data.kind}"
    if isinstance(config.data, CalledData):
        if isinstance(config.model, CalledModel):
            return  # they know of each other
        tokens, source = unit == "tokens", f"data.call={config.data.call}"
    elif unit is not None and tokens != (unit == "tokens"):
        tokens, source = not tokens, "the data given"
    if not isinstance(config.task, Call) and tokens != (config.task == "language_modeling"):
        works = "language_modeling" if tokens else "classification or regression"
        gives = "tokens" if tokens else "examples"
        raise ConfigError(f"task={config.task}, but {source} gives {gives}; set task={works}")
    if config.data.kind == "table" and config.data.task not in (None, config.task) and not own_task:
        raise ConfigError(
            f"task={config.task}, but data.task={config.data.task}; set both to {config.data.task}, or leave data.task "
            "out"
        )
    if isinstance(config.model, CalledModel):
        return
    if tokens and config.model.kind != "transformer":
        raise ConfigError(
            f"model.kind={config.model.kind} does not take the tokens of {source}; use model.kind=transformer"
        )
    if not tokens and config.model.kind == "transformer":
        raise ConfigError(f"model.kind=transformer takes tokens, but {source} gives examples; use another")


def check_loss(config: Config) -> None:
    """Raise where options of the loss would do nothing.

    Raises:
        ConfigError: names the first of them.
    """
    if config.task == "language_modeling":
        return
    for name, value in config.loss:
        if value != getattr(LossConfig(), name):
            raise ConfigError(
                f"loss.{name}={value} is for task=language_modeling, but task={task_name(config)}; leave it out"
            )
