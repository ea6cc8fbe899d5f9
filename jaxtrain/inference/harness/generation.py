"""What a task asks of generated texts, from the settings that it names. No jax here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import ConfigError

DEFAULT_TOKENS = 256
"""Tokens of an answer where a task names no number, as in the harness's own models."""

# Names that tasks use for the number of tokens, in the order in which they count.
_COUNTS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = ("until", *_COUNTS, "do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class Asked:
    """How texts of a task are generated.

    Attributes:
        until: texts at which an answer ends; they are not part of it.
        new_tokens: of an answer, at most.
        temperature: 0 is greedy.
        top_k, top_p: as `Sampling`.
    """

    until: tuple[str, ...]
    new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None


def read_generation(settings: Mapping[str, Any], *, task: str) -> Asked:
    """Reads the settings of a task (`generation_kwargs`).

    Sampling begins where `do_sample` is true or a temperature above 0 is given; `do_sample: false` is greedy.

    Args:
        settings: As the task names them.
        task: For messages.

    Raises:
        ConfigError: A setting that is not known, or a value of another type.
    """
    where = f"generation_kwargs of the task {task}"
    for name in settings:
        if name not in _KNOWN:
            raise ConfigError(f"{where}: {name} is not known; jaxtrain takes {', '.join(_KNOWN)}")
    until = settings.get("until") or ()
    until = (until,) if isinstance(until, str) else until
    if not isinstance(until, Sequence) or not all(isinstance(one, str) for one in until):
        raise ConfigError(f"{where}: until is {until!r}; write a list of texts: until: ['\\n\\n']")
    counts = [settings[name] for name in _COUNTS if settings.get(name) is not None]
    new_tokens = counts[0] if counts else DEFAULT_TOKENS
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 1:
        raise ConfigError(f"{where}: the number of tokens is {new_tokens!r}; write max_gen_toks: 256")
    temperature, samples = settings.get("temperature"), settings.get("do_sample")
    if temperature is None:
        temperature = 1.0 if samples else 0.0
    if samples is False:
        temperature = 0.0
    top_k, top_p = settings.get("top_k"), settings.get("top_p")
    # Empty stops say nothing; `top_k: 0` and `top_p: 1` leave every token.
    return Asked(tuple(one for one in until if one), new_tokens, temperature, top_k or None, top_p)


def fitted(context: Sequence[int], *, new_tokens: int, max_length: int) -> tuple[list[int], int]:
    """Cuts a context from the left so that it and its answer fit the model.

    Args:
        context: Ids.
        new_tokens: Of the answer.
        max_length: Positions of the model.

    Returns:
        The ids that are read, at least one where there is one, and the tokens of the answer, which are fewer only
        where the model has no room for them beside one token of context.
    """
    new_tokens = min(new_tokens, max_length - 1)
    return list(context[-(max_length - new_tokens) :]), new_tokens
