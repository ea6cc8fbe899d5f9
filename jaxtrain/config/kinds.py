"""Whether task, model, data and loss of a config belong together. No jax here: `config` and `plan` ask too."""

from jaxtrain.config.schema import Config, LossConfig
from jaxtrain.errors import ConfigError


def check_kinds(config: Config, *, own_task: bool = False, unit: str | None = None) -> None:
    """Raise where the kinds of task, model and data do not belong together; looks at no data.

    Args:
        config: with a model of its own (a user's model in its place is nothing to check here).
        own_task: whether a task from Python takes the place of the config's.
        unit: tokens or examples, of data from Python that may take the place of the config's; None: it is the config's.

    Raises:
        ConfigError: names what would work.
    """
    kind = config.data.kind
    if config.model.kind == "transformer" and not config.model.causal and not own_task:
        raise ConfigError(
            "model.causal=false would let task=language_modeling read its targets; set model.causal=true, "
            "or bring a task of your own (Python)"
        )
    tokens = kind in ("text", "jsonl", "tokens", "mixture") or getattr(config.data, "task", None) == "tokens"
    source = f"data.kind={kind}"
    if unit is not None and tokens != (unit == "tokens"):
        tokens, source = not tokens, "the data given"
    if tokens != (config.task == "language_modeling"):
        works = "language_modeling" if tokens else "classification or regression"
        gives = "tokens" if tokens else "examples"
        raise ConfigError(f"task={config.task}, but {source} gives {gives}; set task={works}")
    if config.data.kind == "table" and config.data.task not in (None, config.task) and not own_task:
        raise ConfigError(
            f"task={config.task}, but data.task={config.data.task}; set both to {config.data.task}, or leave data.task "
            "out"
        )
    if tokens and config.model.kind != "transformer":
        raise ConfigError(
            f"model.kind={config.model.kind} does not take the tokens of {source}; use model.kind=transformer"
        )
    if not tokens and config.model.kind == "transformer":
        raise ConfigError(f"model.kind=transformer takes tokens, but {source} gives examples; use another")
    if not own_task:  # which may read them
        check_loss(config)


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
                f"loss.{name}={value} is for task=language_modeling, but task={config.task}; leave it out"
            )
