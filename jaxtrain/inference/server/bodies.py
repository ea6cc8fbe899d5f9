"""Bodies: what a request may hold and what it asks of the engine; answers as OpenAI's clients read them."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.conversation import Conversation, read_messages, read_object, read_objects
from jaxtrain.inference.engine.request import Emitted, Request
from jaxtrain.inference.generate import TextStream
from jaxtrain.inference.prompts import PromptReader
from jaxtrain.inference.sampling import Sampling

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "overloaded_error"}


@dataclass(eq=False)
class RefusedError(Exception):
    """What the client asked for is not done.

    Attributes:
        status: of HTTP.
        message: one line for people: what was sent, and what is accepted.
        param: the field of the body that is the cause; None: no single one.
        code: a short name for programs; None: the status says it.
        headers: that belong to the answer.
    """

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the error object of OpenAI's interface."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _as_list(value: Any) -> Any:
    """Return one text or one list of ids as a list of them."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return [value]
    return value


class _Fields(BaseModel):
    """Fields of OpenAI's interface; null and an empty list ask for nothing, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value not in (None, [])}


class _StreamOptions(_Fields):
    include_usage: bool = False


class _Message(_Fields):
    """Of a conversation; what else it holds is for the template, as in a row of training."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]


class _Writing(_Fields):
    """What completions and chats have in common; the last rows change nothing here.

    `Sampling` and the engine check the ranges of their numbers.
    """

    model: str
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = Field(1, ge=1)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = []
    skip_special_tokens: bool = True
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    user: Any = None
    metadata: Any = None
    store: Literal[False] = False


class CompletionBody(_Writing):
    """Of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_list)]
    max_tokens: int = 16
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(_Writing):
    """Of /v1/chat/completions."""

    messages: list[_Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    tools: Any = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: Any = None
    parallel_tool_calls: Any = None


_Body = TypeVar("_Body", bound=_Writing)


def read_body(kind: type[_Body], raw: bytes, *, served: str) -> _Body:
    """Read a body as JSON.

    Raises:
        RefusedError: it is not a JSON object in UTF-8, a field is unknown, missing or wrong, or the model is another.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        path = list(map(str, mistake["loc"]))
        label = ascii(".".join(path) or "the body")
        raise RefusedError(400, f"{label:.80}: {mistake['msg']:.150}", param=path[0] if path else None) from None
    if body.model != served:
        raise RefusedError(
            404, f"no model {body.model!a:.80}; this server has {served!r}", param="model", code="model_not_found"
        )
    return body


@dataclass(frozen=True)
class Call:
    """What one body asks of the engine.

    Attributes:
        body: as it was sent.
        requests: the answers (`body.n`) to the first prompt, then those to the next.
        hidden: ids that an answer does not show: special tokens, unless they were asked for.
        top: alternatives that are reported per token; None: no log-probabilities are.
    """

    body: CompletionBody | ChatBody
    requests: tuple[Request, ...]
    hidden: frozenset[int]
    top: int | None


def make_call(body: CompletionBody | ChatBody, reader: PromptReader, *, length: int) -> Call:
    """Turn a body into requests.

    Args:
        body: as it was sent.
        reader: makes the prompts.
        length: tokens of a prompt and its answer together, at most.

    Raises:
        ConfigError: a number is out of its range.
        DataError: the template refuses the conversation.
    """
    if isinstance(body, ChatBody):
        conversation = Conversation(
            "the request",
            read_messages(body.model_dump()["messages"], where="messages"),
            tools=read_objects(body.tools, "tools", "the request") or None,
            arguments=read_object(body.chat_template_kwargs, "chat_template_kwargs", "the request"),
        )
        prompts = [reader.of_chat(conversation)]
        new_tokens = body.max_completion_tokens or body.max_tokens or max(1, length - len(prompts[0]))
        top = body.top_logprobs if body.logprobs else None
    else:
        prompts = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                prompts.append(reader.of_text(prompt, add_special_tokens=body.add_special_tokens))
            else:
                prompts.append(tuple(prompt))
        new_tokens = body.max_tokens
        top = body.logprobs
    sampling = Sampling(
        body.temperature,
        body.top_k,
        body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
    )
    seed = secrets.randbits(32) if body.seed is None else body.seed
    special = reader.special_tokens
    # A stop that spells a special token, which the text does not show, is met by the token itself.
    stop_tokens = reader.stop_tokens | {special[stop] for stop in body.stop if stop in special}
    requests = []
    for prompt in prompts:
        for _ in range(body.n):
            row = len(requests)
            requests.append(Request(prompt, new_tokens, sampling, seed, stop_tokens, top=top or 0, row=row))
    hidden = frozenset(special.values() if body.skip_special_tokens else ())
    return Call(body, tuple(requests), hidden, top)


# --- Answers: tokens of the engine become pieces of text, and these objects and chunks. ---


@dataclass(frozen=True)
class Piece:
    """What an answer has more than before.

    Attributes:
        text: whole characters.
        scores: tokens with their log-probabilities where these were asked for, as the chunks of a chat hold them.
        finish_reason: of an answer that has ended.
    """

    text: str = ""
    scores: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.text + other.text, self.scores + other.scores, other.finish_reason)


class Choice:
    """One answer as it grows: the tokens that the engine gave become pieces, until a stop is met."""

    def __init__(self, call: Call, tokenizer: Tokenizer):
        self._call = call
        stop_tokens = call.requests[0].stop_tokens
        self._stream = TextStream(tokenizer, call.body.stop, stop_tokens, hidden=call.hidden)
        self.num_tokens = 0

    def feed(self, emitted: Emitted) -> Piece:
        """Return what a token adds; the piece has a finish_reason if a stop was met."""
        self.num_tokens += 1
        text = self._stream.feed(emitted.token)
        scores = ()
        if self._call.top is not None:
            top = dict(emitted.top)
            # The chosen token is one of the likeliest, or less likely than all of them.
            top.setdefault(emitted.token, emitted.log_probability)
            scored = [self._score(token, value) for token, value in top.items()]
            scores = ({**self._score(emitted.token, emitted.log_probability), "top_logprobs": scored},)
        return Piece(text, scores, "stop" if self._stream.stopped else None)

    def finish(self, reason: str | None) -> Piece:
        """Return the rest, when no further token comes."""
        rest = self._stream.finish()
        return Piece(rest, (), "stop" if self._stream.stopped else reason)

    def _score(self, token: int, log_probability: float) -> dict[str, Any]:
        text = self._stream.text_of(token)
        # The bytes of a part of a character are not known from its text.
        raw = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "bytes": raw, "logprob": log_probability}


@dataclass(frozen=True)
class Answer:
    """The objects of one answer of a model, with an id and a time (seconds since 1970) of its own."""

    call: Call
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, answers: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """Make the object of an answer that is not streamed, from the whole text of each choice."""
        choices = []
        for index, piece in enumerate(answers):
            message = {"role": "assistant", "content": piece.text}
            choices.append(self._choice(index, piece, message=message))
        return self._object("chat.completion", choices=choices, usage=usage)

    def chunk(self, index: int, piece: Piece, **role: str) -> dict[str, Any]:
        """Make the chunk of a piece of a choice; the first one of a chat gives the `role`."""
        choice = self._choice(index, piece, delta={**role, "content": piece.text})
        return self._object("chat.completion.chunk", choices=[choice])

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Make the chunk with the numbers of tokens at the end of a stream."""
        return self._object("chat.completion.chunk", choices=[], usage=usage)

    def _object(self, chat_kind: str, **content: Any) -> dict[str, Any]:
        kind = chat_kind if isinstance(self.call.body, ChatBody) else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **content}

    def _choice(self, index: int, piece: Piece, **chat_content: Any) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, "finish_reason": piece.finish_reason}
        if isinstance(self.call.body, ChatBody):
            choice |= chat_content
            if piece.scores:
                choice["logprobs"] = {"content": piece.scores}
        else:
            choice["text"] = piece.text
            if piece.scores:
                choice["logprobs"] = _columns(piece.scores)
        return choice


def _columns(scores: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Turn scores into what completions have in place of them."""
    return {
        "tokens": [score["token"] for score in scores],
        "token_logprobs": [score["logprob"] for score in scores],
        "top_logprobs": [{top["token"]: top["logprob"] for top in score["top_logprobs"]} for score in scores],
    }
