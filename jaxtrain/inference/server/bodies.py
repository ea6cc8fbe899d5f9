"""Bodies: what a request may hold and what it asks of the engine; answers as OpenAI's clients read them."""

import datetime
import functools
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.conversation import Conversation, read_messages, read_object, read_objects
from jaxtrain.data.chat.templates import ChatEncoder, ChatFormat, compile_template, render
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.inference.engine.request import Emitted, Request
from jaxtrain.inference.generate import TextStream
from jaxtrain.inference.prompts import NOTHING_SPECIAL, SpecialTokens, text_ends, tokens_before
from jaxtrain.inference.sampling import Sampling

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "overloaded_error"}
# What OpenAI reports for a probability of 0: JSON has no infinity.
_LEAST = -9999.0


class RefusedError(Exception):
    """What the client asked for is not done.

    Args:
        status: of HTTP.
        message: one line for people: what was given, and what is wanted.
        param: the field of the body that is the cause; None: no single one.
        code: a short name for programs; None: the status says it.
        headers: that belong to the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    def to_json(self) -> dict[str, Any]:
        """The error object of OpenAI's interface."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _listed(value: Any) -> Any:
    """One text or one list of ids as a list of them."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if is_one else value


class _Fields(BaseModel):
    """Fields of OpenAI's interface; null and an empty list ask for nothing, and unknown fields are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None and value != []}


_Prompts = Annotated[list[str | list[int]], BeforeValidator(_listed)]
_Text = Annotated[str, Field(min_length=1)]


class _StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Message(_Fields):
    """Of a conversation; what else it holds is for the template, as in a row of training."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]


class _Writing(_Fields):
    """What completions and chats have in common; the last rows change nothing here."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    n: int = Field(1, ge=1, le=128)
    stop: Annotated[list[_Text], BeforeValidator(_listed)] = Field([], max_length=4)
    skip_special_tokens: bool = True
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    store: Literal[False] = False


class CompletionBody(_Writing):
    """Of /v1/completions."""

    prompt: _Prompts
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""


class ChatBody(_Writing):
    """Of /v1/chat/completions."""

    messages: list[_Message]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    tools: Any = None
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: Any = None
    parallel_tool_calls: Any = None


_Body = TypeVar("_Body", bound=_Writing)


def read_body(kind: type[_Body], raw: bytes, *, served: str) -> _Body:
    """Reads a body as JSON.

    Raises:
        RefusedError: it is no JSON object in UTF-8, a field is unknown, missing or wrong, or the model is another one.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        # A misspelt field before the one that is missing for it.
        found = error.errors(include_url=False, include_context=False)
        first = min(found, key=lambda one: one["type"] != "extra_forbidden")
        place = ".".join(map(str, first["loc"])).encode("ascii", "backslashreplace").decode()[:80] or "the body"
        code = {"missing": "missing_field", "extra_forbidden": "unknown_field"}.get(first["type"])
        said = "this field is not supported" if code == "unknown_field" else first["msg"]
        param = place.partition(".")[0] if first["loc"] else None
        raise RefusedError(400, f"{place}: {said}"[:250], param=param, code=code) from None
    if body.model != served:
        raise RefusedError(
            404, f"no model {body.model!a:.80}; this server has {served!r}", param="model", code="model_not_found"
        )
    return body


@dataclass(frozen=True)
class Call:
    """What one body asks for.

    Attributes:
        is_chat: whether it came to /v1/chat/completions.
        requests: of the engine: the choices of the first prompt, then those of the next.
        num_choices: answers per prompt.
        stop: texts at which an answer ends.
        hidden: ids that an answer does not show: special tokens, unless they were asked for.
        top: alternatives that are reported per token; None: no log-probabilities are.
        stream: whether pieces are sent as they come.
        include_usage: whether a stream ends with the numbers of tokens.
    """

    is_chat: bool
    requests: tuple[Request, ...]
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    hidden: frozenset[int] = frozenset()
    top: int | None = None
    stream: bool = False
    include_usage: bool = False


class PromptReader:
    """Makes prompts; safe to use from several threads.

    Special tokens that a text spells are read as such, as other servers do it: clients write templates by hand.

    Attributes:
        tokenizer, chat, vocab_size, special: of the model.
        stop_tokens: ids at which the model stops.
        special_tokens: text of each special token -> its id.
    """

    def __init__(
        self,
        tokenizer: BpeTokenizer | ByteTokenizer,
        chat: ChatFormat | None,
        *,
        vocab_size: int,
        special: SpecialTokens = NOTHING_SPECIAL,
    ):
        self.tokenizer, self.chat, self.vocab_size, self.special = tokenizer, chat, vocab_size, special
        self.stop_tokens = frozenset(text_ends(tokenizer, special, chat))
        self.special_tokens = {tokenizer.decode([one]): one for one in tokenizer.special_ids()}
        self._encoder = ChatEncoder(tokenizer)
        self._begins = tokens_before(tokenizer)
        compiled = functools.partial(compile_template, chat)  # pyright: ignore[reportArgumentType] only asked with one
        self._compiled = functools.cache(compiled)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, which may spell special tokens; none is added."""
        return next(iter(self._encoder.encode([text]))).ids.tolist()

    def of_text(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """A text that is to be continued: special tokens are added before it (None: if the model was trained so)."""
        ids = self.encode(text)
        adds = self.special.added if add_special_tokens is None else add_special_tokens
        added = [*self._begins] if adds else []
        if not added and not ids:
            # Something must stand before the first token; documents end with this one in training.
            added = [self.tokenizer.end_of_text or 0]
        return self.checked([*added, *ids], "prompt")

    def of_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """A conversation that is to be answered by the model's template; a DataError if that refuses it."""
        # Some templates write the date.
        template = self._compiled(today=datetime.date.today())
        text = render(template, conversation, prompt=True).text
        # A template writes the special tokens itself.
        return self.checked(self.encode(text), "messages")

    def checked(self, ids: Sequence[int], name: str) -> tuple[int, ...]:
        """The ids of a field, at least one, all of which the model has; raises a RefusedError if not."""
        outside = next((one for one in ids if not 0 <= one < self.vocab_size), None)
        if outside is not None or not ids:
            held = "an empty text or list" if outside is None else f"{outside}, which is not a token id"
            raise RefusedError(400, f"{name} holds {held}; use ids from 0 to {self.vocab_size - 1}", param=name)
        return tuple(ids)


def completion_call(body: CompletionBody, reader: PromptReader, *, length: int, most: int) -> Call:
    """What a body of /v1/completions asks for, of prompts and answers of `length` tokens and `most` answers at a time.

    Raises:
        RefusedError: an id is none of the model's, a prompt leaves no room, or there are too many requests.
    """
    prompts = [
        reader.of_text(one, add_special_tokens=body.add_special_tokens)
        if isinstance(one, str)
        else reader.checked(one, "prompt")
        for one in body.prompt
    ]
    _check_length(prompts, body.max_tokens, length, "prompt")
    return _call(body, reader, [(one, body.max_tokens) for one in prompts], body.logprobs, most)


def chat_call(body: ChatBody, reader: PromptReader, *, length: int, most: int) -> Call:
    """What a body of /v1/chat/completions asks for; see `completion_call`."""
    conversation = Conversation(
        "the request",
        read_messages(body.model_dump()["messages"], where="messages"),
        tools=read_objects(body.tools, "tools", "the request") or None,
        arguments=read_object(body.chat_template_kwargs, "chat_template_kwargs", "the request"),
    )
    prompt = reader.of_chat(conversation)
    new_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    _check_length([prompt], new_tokens or 1, length, "messages")
    top = body.top_logprobs if body.logprobs else None
    return _call(body, reader, [(prompt, new_tokens or length - len(prompt))], top, most)


def _check_length(prompts: Sequence[Sequence[int]], wanted: int, length: int, name: str) -> None:
    longest = max(map(len, prompts))
    if longest + wanted > length:
        more = f"{wanted} or more are to be generated; this server's limit for both is {length} tokens"
        said = f"a prompt has {longest} tokens, and {more}"
        raise RefusedError(400, said, param=name, code="context_length_exceeded")


def _call(
    body: CompletionBody | ChatBody,
    reader: PromptReader,
    prompts: list[tuple[tuple[int, ...], int]],
    top: int | None,
    most: int,
) -> Call:
    """The answers to prompts with the most tokens of each, which are `body.n` for every prompt."""
    if len(prompts) * body.n > most:
        raise RefusedError(400, f"{len(prompts) * body.n} answers at a time; this server takes {most}", param="n")
    sampling = Sampling(
        body.temperature,
        body.top_k,
        body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
    )
    seed, special = secrets.randbits(32) if body.seed is None else body.seed, reader.special_tokens
    # A stop that spells a special token, which the text does not show, is met by the token itself.
    stop_tokens = reader.stop_tokens | {special[one] for one in body.stop if one in special}
    requests = [
        Request(prompt, new_tokens, sampling, seed % 2**32, stop_tokens, top or 0, row=index * body.n + choice)
        for index, (prompt, new_tokens) in enumerate(prompts)
        for choice in range(body.n)
    ]
    return Call(
        isinstance(body, ChatBody),
        tuple(requests),
        num_choices=body.n,
        stop=tuple(body.stop),
        hidden=frozenset(special.values() if body.skip_special_tokens else ()),
        top=top,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


# --- Answers: tokens of the engine become pieces of text, and these objects and chunks. ---


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability.

    Attributes:
        text: of the token alone; U+FFFD for a part of a character.
        log_probability: natural logarithm, before temperature and penalties.
        top: the likeliest tokens at its place and itself, the likeliest first.
        offset: characters of the answer that were certain before it.
    """

    text: str
    log_probability: float
    top: tuple[tuple[str, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """What an answer has more than before: whole characters, and tokens where log-probabilities were asked for."""

    text: str = ""
    scored: tuple[Scored, ...] = ()
    finish_reason: str | None = None


class Choice:
    """One answer as it grows: the tokens that the engine gave become pieces, until it has a reason to end."""

    def __init__(self, call: Call, tokenizer: Tokenizer, texts: Callable[[int], str]):
        self._call, self._texts = call, texts
        self._ends = call.requests[0].stop_tokens
        self._stream = TextStream(tokenizer, call.stop, self._ends, hidden=call.hidden)
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def feed(self, emitted: Emitted) -> Piece:
        """What a token adds; the piece has a finish_reason if a stop was met."""
        self.num_tokens += 1
        offset = self._stream.length
        text = self._stream.feed(emitted.token)
        if self._stream.stopped:
            self.finish_reason = "stop"
        # A chat says why it ended; harnesses count the tokens of a completion.
        is_end = self._call.is_chat and emitted.token in self._ends
        is_scored = self._call.top is not None and not is_end
        scored = (self._scored(emitted, offset),) if is_scored else ()
        return Piece(text, scored, self.finish_reason)

    def finish(self, reason: str) -> Piece:
        """The rest, when no further token comes."""
        rest = self._stream.finish()
        self.finish_reason = "stop" if self._stream.stopped else reason
        return Piece(rest, (), self.finish_reason)

    def _scored(self, emitted: Emitted, offset: int) -> Scored:
        top = {one: _finite(value) for one, value in emitted.top}
        # One number per token: readers compare the chosen one with the likeliest for equality.
        own = top.setdefault(emitted.token, _finite(emitted.log_probability))
        ranked = sorted(top.items(), key=lambda item: -item[1])
        return Scored(
            self._texts(emitted.token), own, tuple((self._texts(one), value) for one, value in ranked), offset
        )


def _finite(value: float) -> float:
    return max(value, _LEAST) if math.isfinite(value) else _LEAST


@dataclass(frozen=True)
class Answer:
    """The objects of one answer of a model, with an id and a time (seconds since 1970) of its own."""

    call: Call
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The object of an answer that is not streamed, of the pieces of each choice in order."""
        choices = []
        for index, parts in enumerate(pieces):
            text, scored = "".join(part.text for part in parts), [one for part in parts for one in part.scored]
            said: dict[str, Any] = {"text": text}
            if self.call.is_chat:
                said = {"message": {"role": "assistant", "content": text, "refusal": None}}
            scores = None if self.call.top is None else self._scores(scored)
            choices.append({"index": index, **said, "logprobs": scores, "finish_reason": parts[-1].finish_reason})
        return {**self._head(""), "choices": choices, "usage": usage}

    def first_chunk(self, index: int) -> dict[str, Any]:
        """What begins each choice of a streamed chat."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}}, Piece())

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """A piece of a choice."""
        said: dict[str, Any] = {"text": piece.text}
        if self.call.is_chat:
            said = {"delta": {"content": piece.text} if piece.text or piece.scored else {}}
        return self._chunk(index, said, piece)

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The numbers of tokens at the end of a stream."""
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _chunk(self, index: int, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        scores = self._scores(piece.scored) if piece.scored else None
        choice = {"index": index, **said, "logprobs": scores, "finish_reason": piece.finish_reason}
        found = {**self._head(".chunk"), "choices": [choice]}
        return found | ({"usage": None} if self.call.include_usage else {})

    def _head(self, form: str) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", f"chat.completion{form}") if self.call.is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        top = self.call.top or 0
        if self.call.is_chat:
            rows = [
                _chat_token(one.text, one.log_probability)
                | {"top_logprobs": [_chat_token(text, value) for text, value in one.top[:top]]}
                for one in scored
            ]
            return {"content": rows, "refusal": None}
        # Of tokens with one text (parts of characters) the likeliest counts.
        tops = [dict(reversed(one.top)) for one in scored]
        return {
            "tokens": [one.text for one in scored],
            "token_logprobs": [one.log_probability for one in scored],
            "top_logprobs": None if top == 0 else tops,
            "text_offset": [one.offset for one in scored],
        }


def _chat_token(text: str, log_probability: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known from its text.
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "bytes": raw, "logprob": log_probability}
