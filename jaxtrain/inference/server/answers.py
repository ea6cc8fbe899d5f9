"""Answers as OpenAI's clients read them: whole objects, and the chunks of streams. No jax here."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.inference.server.call import Call
from jaxtrain.inference.server.choices import Piece, Scored


@dataclass(frozen=True)
class Envelope:
    """What every object of one answer says.

    Attributes:
        id: of the answer.
        created: seconds since 1970.
        model: name of the model.
        is_chat: which of the two forms it has.
    """

    id: str
    created: int
    model: str
    is_chat: bool


def new_envelope(call: Call, *, model: str, created: int) -> Envelope:
    """An envelope with an id of its own."""
    return Envelope(f"{'chatcmpl' if call.is_chat else 'cmpl'}-{secrets.token_hex(12)}", created, model, call.is_chat)


def whole_answer(
    envelope: Envelope, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any], call: Call
) -> dict[str, Any]:
    """The object of an answer that is not streamed.

    Args:
        envelope: what it says besides.
        pieces: of each choice, in order.
        usage: from `usage`.
        call: what was asked for.
    """
    choices = []
    for index, parts in enumerate(pieces):
        text, scored = "".join(part.text for part in parts), [one for part in parts for one in part.scored]
        said: dict[str, Any] = {"index": index}
        if envelope.is_chat:
            said["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            said["text"] = text
        said["logprobs"] = _scores(scored, call)
        said["finish_reason"] = parts[-1].finish_reason
        choices.append(said)
    kind = "chat.completion" if envelope.is_chat else "text_completion"
    return {**_head(envelope, kind), "choices": choices, "usage": usage}


def first_chunk(envelope: Envelope, index: int, call: Call) -> dict[str, Any]:
    """What begins each choice of a streamed chat."""
    delta = {"role": "assistant", "content": "", "refusal": None}
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return _chunk(envelope, [choice], call)


def chunk(envelope: Envelope, index: int, piece: Piece, call: Call) -> dict[str, Any]:
    """A piece of a choice."""
    said: dict[str, Any] = {"index": index}
    if envelope.is_chat:
        said["delta"] = {"content": piece.text} if piece.text or piece.scored else {}
    else:
        said["text"] = piece.text
    said["logprobs"] = _scores(piece.scored, call) if piece.scored else None
    said["finish_reason"] = piece.finish_reason
    return _chunk(envelope, [said], call)


def last_chunk(envelope: Envelope, usage: dict[str, Any]) -> dict[str, Any]:
    """The numbers of tokens at the end of a stream."""
    return {**_head(envelope, _chunk_kind(envelope)), "choices": [], "usage": usage}


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """How many tokens were read and written.

    Args:
        prompt_tokens: of every prompt once, however many answers it gets.
        completion_tokens: of all answers; the token that ends one counts.
        cached_tokens: of the prompts, that had been read before.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _head(envelope: Envelope, kind: str) -> dict[str, Any]:
    return {"id": envelope.id, "object": kind, "created": envelope.created, "model": envelope.model}


def _chunk_kind(envelope: Envelope) -> str:
    return "chat.completion.chunk" if envelope.is_chat else "text_completion"


def _chunk(envelope: Envelope, choices: list[dict[str, Any]], call: Call) -> dict[str, Any]:
    found = {**_head(envelope, _chunk_kind(envelope)), "choices": choices}
    return found | ({"usage": None} if call.include_usage else {})


def _scores(scored: Sequence[Scored], call: Call) -> dict[str, Any] | None:
    if call.top is None:
        return None
    if call.is_chat:
        return {"content": [_chat_score(one, call.top) for one in scored], "refusal": None}
    tops = None if call.top == 0 else [None if one.log_probability is None else _by_text(one) for one in scored]
    return {
        "tokens": [one.text for one in scored],
        "token_logprobs": [one.log_probability for one in scored],
        "top_logprobs": tops,
        "text_offset": [one.offset for one in scored],
    }


def _by_text(scored: Scored) -> dict[str, float]:
    """Text -> log-probability; of tokens with one text (parts of characters) the likeliest counts."""
    found: dict[str, float] = {}
    for text, value in scored.top:
        found.setdefault(text, value)
    return found


def _chat_score(scored: Scored, top: int) -> dict[str, Any]:
    alternatives = [_one(text, value) for text, value in scored.top[:top]]
    return {**_one(scored.text, scored.log_probability), "top_logprobs": alternatives}


def _one(text: str, log_probability: float | None) -> dict[str, Any]:
    # The bytes of a part of a character are not known from its text.
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "bytes": raw, "logprob": log_probability}
