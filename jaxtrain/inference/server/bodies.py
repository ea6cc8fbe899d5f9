"""Bodies: what a request may hold and what it asks of the engine; answers as OpenAI's clients read them."""

import datetime
import functools
import secrets
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jaxtrain.data import Tokenizer
from jaxtrain.data.chat.conversation import Conversation, read_messages, read_object, read_objects
from jaxtrain.data.chat.templates import ChatEncoder, ChatFormat, Template, compile_template, render
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.inference.engine.request import Emitted, Request
from jaxtrain.inference.generate import TextStream
from jaxtrain.inference.prompts import NOTHING_SPECIAL, SpecialTokens, text_ends, tokens_before
from jaxtrain.inference.sampling import Sampling

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "overloaded_error"}
# What OpenAI reports for a probability of 0: JSON has no infinity.
_LOWEST = -9999.0


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
    headers: dict[str, str] | None = None

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
        return {name: value for name, value in fields.items() if value is not None and value != []}


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
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
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
        # A misspelt field before the one that is missing for it.
        first = min(error.errors(include_url=False), key=lambda mistake: mistake["type"] != "extra_forbidden")
        path = list(map(str, first["loc"]))
        label = ascii(".".join(path) or "the body")
        raise RefusedError(400, f"{label:.80}: {first['msg']:.150}", param=path[0] if path else None) from None
    if body.model != served:
        raise RefusedError(
            404, f"no model {body.model!a:.80}; this server has {served!r}", param="model", code="model_not_found"
        )
    return body


class PromptReader:
    """Makes prompts; safe to use from several threads.

    Special tokens that a text spells are read as such, as other servers do it: clients write templates by hand.

    Attributes:
        tokenizer, chat, special: of the model.
        stop_tokens: ids at which the model stops.
        special_tokens: text of each special token -> its id.
    """

    def __init__(
        self,
        tokenizer: BpeTokenizer | ByteTokenizer,
        chat: ChatFormat | None,
        special: SpecialTokens = NOTHING_SPECIAL,
    ):
        self.tokenizer = tokenizer
        self.chat = chat
        self.special = special
        self.stop_tokens = frozenset(text_ends(tokenizer, special, chat))
        self.special_tokens = {tokenizer.decode([token]): token for token in tokenizer.special_ids()}
        self._encoder = ChatEncoder(tokenizer)

        def compiled(today: datetime.date) -> Template:
            assert chat is not None, "the model has no chat template"
            return compile_template(chat, today=today)

        # Some templates write the date.
        self._template = functools.cache(compiled)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which may spell special tokens; none is added."""
        (encoded,) = self._encoder.encode([text])
        return encoded.ids.tolist()

    def of_text(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Encode a text that is to be continued, after special tokens (None: if the model was trained so)."""
        if add_special_tokens is None:
            add_special_tokens = self.special.added
        leading = tokens_before(self.tokenizer) if add_special_tokens else ()
        # Something must stand before the first token; documents end with this one in training.
        return (*leading, *self.encode(text)) or (self.tokenizer.end_of_text or 0,)

    def of_chat(self, conversation: Conversation) -> tuple[int, ...]:
        """Encode a conversation that is to be answered by the model's template; a DataError if that refuses it."""
        template = self._template(datetime.date.today())
        # A template writes the special tokens itself.
        return tuple(self.encode(render(template, conversation, prompt=True).text))


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


def make_call(body: CompletionBody | ChatBody, reader: PromptReader, *, length: int, max_answers: int) -> Call:
    """Turn a body into requests.

    Args:
        body: as it was sent.
        reader: makes the prompts.
        length: tokens of a prompt and its answer together, at most.
        max_answers: answers that the server takes at a time.

    Raises:
        RefusedError: a prompt leaves no room, or there are too many requests.
        ConfigError: a number is out of its range.
        DataError: the template refuses the conversation.
    """
    if isinstance(body, ChatBody):
        param = "messages"
        prompts = [reader.of_chat(_conversation(body))]
        new_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        top = body.top_logprobs if body.logprobs else None
    else:
        param = "prompt"
        prompts = [_prompt(prompt, body, reader) for prompt in body.prompt]
        new_tokens = body.max_tokens
        top = body.logprobs
    longest = max(map(len, prompts))
    if new_tokens is None:
        new_tokens = max(1, length - longest)
    if longest + new_tokens > length:
        raise RefusedError(
            400,
            f"a prompt has {longest} tokens, and {new_tokens} or more are to be generated; this server's limit for "
            f"both is {length} tokens",
            param=param,
            code="context_length_exceeded",
        )
    num_answers = len(prompts) * body.n
    if num_answers > max_answers:
        raise RefusedError(400, f"{num_answers} answers at a time; this server takes {max_answers}", param="n")
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


def _prompt(prompt: str | list[int], body: CompletionBody, reader: PromptReader) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return reader.of_text(prompt, add_special_tokens=body.add_special_tokens)
    return tuple(prompt)


def _conversation(body: ChatBody) -> Conversation:
    return Conversation(
        "the request",
        read_messages(body.model_dump()["messages"], where="messages"),
        tools=read_objects(body.tools, "tools", "the request") or None,
        arguments=read_object(body.chat_template_kwargs, "chat_template_kwargs", "the request"),
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

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(self.text + other.text, self.scored + other.scored, other.finish_reason)


class Choice:
    """One answer as it grows: the tokens that the engine gave become pieces, until it has a reason to end."""

    def __init__(self, call: Call, tokenizer: Tokenizer):
        self._call = call
        self._ends = call.requests[0].stop_tokens
        self._stream = TextStream(tokenizer, call.body.stop, self._ends, hidden=call.hidden)
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def feed(self, emitted: Emitted) -> Piece:
        """Return what a token adds; the piece has a finish_reason if a stop was met."""
        self.num_tokens += 1
        offset = self._stream.length
        text = self._stream.feed(emitted.token)
        if self._stream.stopped:
            self.finish_reason = "stop"
        # A chat says why it ended; harnesses count the tokens of a completion.
        is_end = isinstance(self._call.body, ChatBody) and emitted.token in self._ends
        if self._call.top is None or is_end:
            return Piece(text, (), self.finish_reason)
        return Piece(text, (self._scored(emitted, offset),), self.finish_reason)

    def finish(self, reason: str) -> Piece:
        """Return the rest, when no further token comes."""
        rest = self._stream.finish()
        self.finish_reason = "stop" if self._stream.stopped else reason
        return Piece(rest, (), self.finish_reason)

    def _scored(self, emitted: Emitted, offset: int) -> Scored:
        top = dict(emitted.top)
        # The chosen token is one of the likeliest, or less likely than all of them.
        top.setdefault(emitted.token, emitted.log_probability)
        texts = tuple((self._stream.text_of(token), max(_LOWEST, value)) for token, value in top.items())
        # One number per token: readers compare the chosen one with the likeliest for equality.
        log_probability = max(_LOWEST, top[emitted.token])
        return Scored(self._stream.text_of(emitted.token), log_probability, texts, offset)


@dataclass(frozen=True)
class Answer:
    """The objects of one answer of a model, with an id and a time (seconds since 1970) of its own."""

    call: Call
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, answers: Sequence[Piece], usage: dict[str, Any]) -> dict[str, Any]:
        """Make the object of an answer that is not streamed, from the whole text of each choice."""
        choices = []
        for index, piece in enumerate(answers):
            message = {"role": "assistant", "content": piece.text}
            choices.append(self._choice(index, piece, message=message))
        return self._object("chat.completion", choices, usage=usage)

    def first_chunk(self, index: int) -> dict[str, Any]:
        """Make what begins each choice of a streamed chat."""
        delta = {"role": "assistant", "content": ""}
        return self._object("chat.completion.chunk", [self._choice(index, Piece(), delta=delta)])

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Make the chunk of a piece of a choice."""
        choice = self._choice(index, piece, delta={"content": piece.text})
        return self._object("chat.completion.chunk", [choice])

    def last_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Make the chunk with the numbers of tokens at the end of a stream."""
        return self._object("chat.completion.chunk", [], usage=usage)

    def _object(self, chat_kind: str, choices: list[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        prefix = "cmpl"
        kind = "text_completion"
        if isinstance(self.call.body, ChatBody):
            prefix = "chatcmpl"
            kind = chat_kind
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **usage,
        }

    def _choice(self, index: int, piece: Piece, **chat_content: Any) -> dict[str, Any]:
        content = {"text": piece.text}
        scores_of = self._scores
        if isinstance(self.call.body, ChatBody):
            content = chat_content
            scores_of = self._chat_scores
        return {
            "index": index,
            **content,
            "logprobs": scores_of(piece.scored) if piece.scored else None,
            "finish_reason": piece.finish_reason,
        }

    def _chat_scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        rows = []
        for token in scored:
            top = [_chat_token(text, value) for text, value in token.top[: self.call.top]]
            rows.append({**_chat_token(token.text, token.log_probability), "top_logprobs": top})
        return {"content": rows}

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any]:
        tops = None
        if self.call.top:
            # Of tokens with one text (parts of characters) the likeliest counts.
            tops = [dict(reversed(token.top)) for token in scored]
        return {
            "tokens": [token.text for token in scored],
            "token_logprobs": [token.log_probability for token in scored],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in scored],
        }


def _chat_token(text: str, log_probability: float) -> dict[str, Any]:
    # The bytes of a part of a character are not known from its text.
    raw = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "bytes": raw, "logprob": log_probability}
