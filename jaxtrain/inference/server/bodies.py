"""Bodies of requests: what each may hold, what it asks for, and one line where it asks for nothing that is served."""

import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jaxtrain.data.chat.templates import ChatFormat, Template, chat_encoder, compile_template, prompt_text
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.inference.engine.request import Request
from jaxtrain.inference.prompts import NOTHING_SPECIAL, SpecialTokens, tokens_around
from jaxtrain.inference.sampling import Sampling

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "overloaded_error"}
_SEEDS = 2**32


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


def _joined(value: Any) -> Any:
    """The text of a message that is given in parts."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        return "".join(str(part.get("text")) for part in value)
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


_Prompts = Annotated[list[str | list[int]], BeforeValidator(_listed)]
_Text = Annotated[str, Field(min_length=1)]


class _Asking(_Fields):
    """A body, which names the model."""

    model: str


class _StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)]
    name: str | None = None


class _Writing(_Asking):
    """What completions and chats have in common; the last rows change nothing here."""

    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=1024)
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
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Any = None


class EmbeddingBody(_Asking):
    """Of /v1/embeddings."""

    input: _Prompts = Field(max_length=2048)
    encoding_format: Literal["float", "base64"] = "float"
    user: Any = None


_Body = TypeVar("_Body", bound=_Asking)


def read_body(kind: type[_Body], raw: bytes, *, served: str) -> _Body:
    """Reads a body as JSON.

    Raises:
        RefusedError: it is no JSON object in UTF-8, a field is unknown, missing or wrong, or the model is another one.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
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
        end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
        self.stop_tokens = frozenset([*end, *special.stop, *(() if chat is None else chat.stop)])
        self.special_tokens = {tokenizer.decode([one]): one for one in tokenizer.special_ids()}
        self._encoder = chat_encoder(tokenizer)
        self._begins, self._ends = tokens_around(tokenizer)
        self._template: tuple[datetime.date, Template] | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text, which may spell special tokens, with or without what the tokenizer's file puts around."""
        ids = next(iter(self._encoder.encode([text]))).ids.tolist()
        return [*self._begins, *ids, *self._ends] if add_special_tokens else ids

    def of_text(self, text: str, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """A text that is to be continued: special tokens are added before it (None: if the model was trained so)."""
        ids = self.encode(text, add_special_tokens=False)
        adds = self.special.added if add_special_tokens is None else add_special_tokens
        added = [*self._begins] if adds else []
        if not added and not ids:
            # Something must stand before the first token; documents end with this one in training.
            added = [self.tokenizer.end_of_text or 0]
        return self.checked([*added, *ids], "prompt")

    def of_messages(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """A conversation that is to be answered.

        Raises:
            RefusedError: there is no template.
            DataError: it refuses the conversation.
        """
        if self.chat is None:
            raise RefusedError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
        today = datetime.date.today()  # which some templates write
        if self._template is None or self._template[0] != today:
            self._template = (today, compile_template(self.chat, today=today))
        text = prompt_text(self._template[1], messages)
        # A template writes the special tokens itself.
        return self.checked(self.encode(text, add_special_tokens=False), "messages")

    def checked(self, ids: Sequence[int], name: str) -> tuple[int, ...]:
        """The ids of a field, at least one, all of which the model has; raises a RefusedError if not."""
        outside = next((one for one in ids if not 0 <= one < self.vocab_size), None)
        if outside is not None or not ids:
            held = "an empty text or list" if outside is None else f"{outside}, which is no token id"
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
    requests = _requests(body, reader, prompts, body.max_tokens, body.logprobs, length)
    return _call(body, reader, requests, body.logprobs, most)


def chat_call(body: ChatBody, reader: PromptReader, *, length: int, most: int) -> Call:
    """What a body of /v1/chat/completions asks for; see `completion_call`."""
    # "developer" is OpenAI's newer name of a role that templates know as "system".
    messages = [
        {"role": "system" if one.role == "developer" else one.role, "content": one.content} for one in body.messages
    ]
    new_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top = body.top_logprobs if body.logprobs else None
    requests = _requests(body, reader, [reader.of_messages(messages)], new_tokens, top, length)
    return _call(body, reader, requests, top, most)


def _requests(
    body: CompletionBody | ChatBody,
    reader: PromptReader,
    prompts: list[tuple[int, ...]],
    new_tokens: int | None,
    top: int | None,
    length: int,
) -> tuple[Request, ...]:
    longest, wanted = max(map(len, prompts)), new_tokens or 1
    if longest + wanted > length:
        raise RefusedError(
            400,
            f"a prompt has {longest} tokens, and {wanted} or more are to follow; prompt and answer together have "
            f"{length} tokens here",
            param="messages" if isinstance(body, ChatBody) else "prompt",
            code="context_length_exceeded",
        )
    if not all(token.isdigit() and int(token) < reader.vocab_size for token in body.logit_bias):
        raise RefusedError(400, f"logit_bias takes token ids from 0 to {reader.vocab_size - 1}", param="logit_bias")
    sampling = Sampling(
        body.temperature,
        body.top_k,
        body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple((int(token), number) for token, number in body.logit_bias.items()),
    )
    seed, special = secrets.randbits(32) if body.seed is None else body.seed, reader.special_tokens
    # A stop that spells a special token, which the text does not show, is met by the token itself.
    stop_tokens = reader.stop_tokens | {special[one] for one in body.stop if one in special}
    return tuple(
        Request(
            prompt,
            new_tokens=length - len(prompt) if new_tokens is None else new_tokens,
            sampling=sampling,
            seed=(seed + choice) % _SEEDS,
            stop_tokens=stop_tokens,
            top=top or 0,
        )
        for prompt in prompts
        for choice in range(body.n)
    )


def _call(
    body: CompletionBody | ChatBody, reader: PromptReader, requests: tuple[Request, ...], top: int | None, most: int
) -> Call:
    if len(requests) > most:
        raise RefusedError(400, f"{len(requests)} answers at a time; this server takes {most}", param="n")
    return Call(
        isinstance(body, ChatBody),
        requests,
        num_choices=body.n,
        stop=tuple(body.stop),
        hidden=frozenset(reader.special_tokens.values() if body.skip_special_tokens else ()),
        top=top,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def embedding_texts(body: EmbeddingBody, reader: PromptReader, *, length: int) -> list[list[int]]:
    """The ids of each text of a body of /v1/embeddings, special tokens included; none may be empty or too long."""
    texts = []
    for one in body.input:
        ids = reader.checked(reader.encode(one, add_special_tokens=True) if isinstance(one, str) else one, "input")
        if len(ids) > length:
            raise RefusedError(
                400,
                f"a text of input has {len(ids)} tokens, and the model takes {length}; shorten it",
                param="input",
                code="context_length_exceeded",
            )
        texts.append(list(ids))
    return texts
