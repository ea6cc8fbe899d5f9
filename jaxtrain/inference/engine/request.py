"""What the engine is asked, and what it answers. No jax here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.arguments import check_kind, check_whole, refusal
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.inference.sampling import Sampling

MOST_ALTERNATIVES = 20
"""Alternatives per token that a request may ask for."""

_WRITE = "Request((72, 105), new_tokens=16, sampling=Sampling())"


class EngineFull(UserError):
    """All slots are taken, and as many requests wait as the engine's queue takes; a later attempt may succeed.

    Example:
        >>> try:
        ...     raise jt.EngineFull("264 requests run or wait, as many as the engine takes")
        ... except jt.EngineFull as error:
        ...     print("try again later")
        try again later
    """


class EngineDead(UserError):
    """The engine serves no more requests: it was closed, or its device failed.

    Example:
        >>> try:
        ...     raise jt.EngineDead("the engine is closed; start another one")
        ... except jt.EngineDead as error:
        ...     print(error)
        the engine is closed; start another one
    """


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is to be continued.

    Attributes:
        tokens: ids of the prompt, at least one.
        new_tokens: how many tokens may follow, at least 1.
        sampling: how they are chosen.
        seed: of the random choices; the same request with the same seed gets the same tokens.
        stop_tokens: ids that end the answer; the one that does is emitted too.
        top: alternatives that are reported with each token, the likeliest first, 0 to 20.
        prompt_log_probabilities: whether the tokens of the prompt get log-probabilities too.

    Raises:
        ConfigError: a field of another type, or out of its range.

    Example:
        >>> request = jt.Request((72, 105), new_tokens=4, sampling=jt.Sampling(temperature=0))
        >>> request.tokens
        (72, 105)
    """

    tokens: tuple[int, ...]
    new_tokens: int
    sampling: Sampling
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    top: int = 0
    prompt_log_probabilities: bool = False

    def __post_init__(self) -> None:
        check_kind(self.sampling, Sampling, what="Request: sampling", takes="a record", write="sampling=Sampling()")
        for name, least in (("new_tokens", 1), ("seed", 0), ("top", 0)):
            value = check_whole(getattr(self, name), what=f"Request: {name}", least=least, write=_WRITE)
            object.__setattr__(self, name, value)
        if self.top > MOST_ALTERNATIVES:
            raise ConfigError(f"Request: top is {self.top}; at most {MOST_ALTERNATIVES} alternatives are reported")
        object.__setattr__(self, "tokens", tuple(_ids(self.tokens, "tokens", _WRITE)))
        object.__setattr__(self, "stop_tokens", frozenset(_ids(self.stop_tokens, "stop_tokens", "stop_tokens={0}")))
        if not self.tokens:
            raise ConfigError(
                "Request: tokens is empty; a prompt has at least one token, such as the one that begins texts"
            )


def _ids(given: Any, name: str, write: str) -> list[int]:
    """Token ids as whole numbers of Python."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | set | frozenset):
        given = getattr(given, "tolist", lambda: given)()
    if not isinstance(given, list | tuple | set | frozenset):
        raise ConfigError(refusal(f"Request: {name}", "token ids", given, write))
    return [check_whole(one, what=f"Request: {name}", least=0, write=write) for one in given]


@dataclass(frozen=True)
class Emitted:
    """A token with its log-probability.

    Attributes:
        token: its id.
        log_probability: natural logarithm of its probability by the model alone, before temperature, penalties and
            biases.
        top: the likeliest tokens at its place, with their log-probabilities, as many as the request asked for.

    Example:
        >>> from jaxtrain.inference.engine.request import Emitted
        >>> Emitted(token=72, log_probability=-0.5, top=((72, -0.5), (73, -1.5))).token
        72
    """

    token: int
    log_probability: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class EngineCounters:
    """What an engine did since it was started; every count is of the engine alone.

    Attributes:
        requests: that were accepted.
        finished: of them that have ended, for whatever reason.
        generated_tokens: that were emitted.
        prompt_tokens: of the prompts whose requests got a slot.
        cached_tokens: of them that were in the slot's cache already.
        decode_steps: runs of the program that gives each slot a token.
        prefill_chunks: runs of the program that reads a chunk of a prompt.
        slots: rows of the cache.
        slots_in_use: of them.
        queued: requests that have no slot yet; those that just came may be more than the queue takes, until a step
            gives them the free slots.
        compiled: programs that were compiled after the start; it stays 0.
        speculated_tokens: drafts that were verified.
        accepted_tokens: of them that the model would have chosen too.

    Example:
        >>> from jaxtrain.inference.engine.request import EngineCounters
        >>> EngineCounters(slots=8).compiled
        0
    """

    requests: int = 0
    finished: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0
    prefill_chunks: int = 0
    slots: int = 0
    slots_in_use: int = 0
    queued: int = 0
    compiled: int = 0
    speculated_tokens: int = 0
    accepted_tokens: int = 0
