"""What a body asks for, as the engine takes it. No jax here."""

from dataclasses import dataclass

from jaxtrain.inference.engine.request import Request
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.server.refused import RefusedError

_SEEDS = 2**32


@dataclass(frozen=True)
class Prompt:
    """What is continued.

    Attributes:
        text: as it was given, or decoded from the ids that were.
        tokens: its ids.
        num_added: tokens at the beginning that are in no part of the text, such as that of a beginning of text.
    """

    text: str
    tokens: tuple[int, ...]
    num_added: int = 0


@dataclass(frozen=True)
class Call:
    """What one body asks for.

    Attributes:
        is_chat: whether it came to /v1/chat/completions.
        prompts: at least one.
        num_choices: answers per prompt.
        sampling: how tokens are chosen.
        seed: of the first choice of every prompt; those after it take the numbers that follow.
        new_tokens: at most; None: as many as there is room for; 0: none, the prompt alone is asked for.
        stop: texts at which an answer ends.
        stop_tokens: ids at which it ends.
        hidden: ids that an answer does not show: special tokens, unless they were asked for.
        echo: whether the prompt stands before its answer.
        top: alternatives that are reported per token; None: no log-probabilities are.
        stream: whether pieces are sent as they come.
        include_usage: whether a stream ends with the numbers of tokens.
    """

    is_chat: bool
    prompts: tuple[Prompt, ...]
    num_choices: int
    sampling: Sampling
    seed: int
    new_tokens: int | None
    stop: tuple[str, ...]
    stop_tokens: frozenset[int]
    hidden: frozenset[int]
    echo: bool
    top: int | None
    stream: bool
    include_usage: bool


def engine_requests(call: Call, *, length: int, most: int) -> list[Request]:
    """The requests of a call: the choices of the first prompt, then those of the next.

    Args:
        call: what is asked for.
        length: tokens that prompt and answer may have together.
        most: requests that the engine takes at a time.

    Raises:
        RefusedError: too many of them, or a prompt that leaves no room.
    """
    count = len(call.prompts) * call.num_choices
    if count > most:
        raise RefusedError(400, f"{count} answers at a time; this server takes {most}", param="n")
    requests = []
    for prompt in call.prompts:
        room = _room(call, prompt, length)
        for choice in range(call.num_choices):
            requests.append(
                Request(
                    prompt.tokens,
                    # The engine gives at least one; where none is wanted it is not reported.
                    new_tokens=max(1, room if call.new_tokens is None else call.new_tokens),
                    sampling=call.sampling,
                    seed=(call.seed + choice) % _SEEDS,
                    stop_tokens=call.stop_tokens,
                    top=call.top or 0,
                    prompt_log_probabilities=call.echo and call.top is not None,
                )
            )
    return requests


def _room(call: Call, prompt: Prompt, length: int) -> int:
    """How many tokens can follow a prompt."""
    name, count = "messages" if call.is_chat else "prompt", len(prompt.tokens)
    room, wanted = length - count, max(1, call.new_tokens or 1)
    if room < wanted:
        asked = f"max_tokens is {call.new_tokens}" if call.new_tokens else "no room is left for a token after it"
        raise RefusedError(
            400,
            f"{name} has {count} tokens and {asked}, but prompt and answer together have {length} tokens here",
            param=name,
            code="context_length_exceeded",
        )
    return room
