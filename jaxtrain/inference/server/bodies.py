"""Bodies of requests: what each may hold, what it asks for, and one line where it asks for nothing that is served."""

import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jaxtrain.data.chat.encoding import chat_encoder
from jaxtrain.data.chat.formats import ChatFormat
from jaxtrain.data.chat.masks import prompt_text
from jaxtrain.data.chat.templates import Template, compile_template
from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
from jaxtrain.errors import UserError
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


class _StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)]
    name: str | None = None


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
    max_tokens: int = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
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


class EmbeddingBody(_Fields):
    """Of /v1/embeddings."""

    model: str
    input: _Prompts = Field(max_length=2048)
    encoding_format: Literal["float", "base64"] = "float"
    user: Any = None


class TokenizeBody(_Fields):
    """Of /tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None


class DetokenizeBody(_Fields):
    """Of /detokenize."""

    model: str | None = None
    tokens: list[int]


_Body = TypeVar("_Body", bound=_Fields)


def read_body(kind: type[_Body], raw: bytes, *, served: str) -> _Body:
    """Reads a body as JSON.

    Args:
        kind: of its fields.
        raw: the bytes.
        served: name of the model.

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
    given = getattr(body, "model", None)
    if given not in (None, served):
        raise RefusedError(
            404, f"no model {given!a:.80}; this server has {served!r}", param="model", code="model_not_found"
        )
    return body


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


class PromptReader:
    """Makes prompts; safe to use from several threads.

    Special tokens that a text spells are read as such, as other servers do it: clients write templates by hand.

    Args:
        tokenizer: between texts and ids.
        chat: how conversations are written; None: there is no template.
        vocab_size: ids that the model has.
        special: what is known of the special tokens besides.

    Attributes:
        tokenizer, chat, vocab_size, special: as given.
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
        """The ids of a text.

        Args:
            text: may spell special tokens.
            add_special_tokens: whether what the tokenizer's file puts around a text is added.
        """
        ids = next(iter(self._encoder.encode([text]))).ids.tolist()
        return [*self._begins, *ids, *self._ends] if add_special_tokens else ids

    def of_text(self, text: str, *, add_special_tokens: bool | None = None) -> Prompt:
        """A text that is to be continued: special tokens are added before it, none after it.

        Args:
            text: may spell special tokens.
            add_special_tokens: whether what the tokenizer's file puts before a text is added; None: if the model was
                trained so.

        Raises:
            RefusedError: the text has ids that the model does not have.
        """
        ids = self.encode(text, add_special_tokens=False)
        adds = self.special.added if add_special_tokens is None else add_special_tokens
        added = [*self._begins] if adds else []
        if not added and not ids:
            # Something must stand before the first token; documents end with this one in training.
            added = [self.tokenizer.end_of_text or 0]
        return Prompt(text, self.checked([*added, *ids], "prompt"), len(added))

    def of_messages(self, messages: list[dict[str, str]]) -> Prompt:
        """A conversation that is to be answered.

        Raises:
            RefusedError: there is no template, or it refuses the conversation.
        """
        if self.chat is None:
            raise RefusedError(400, "this model has no chat template; use /v1/completions", code="no_chat_template")
        today = datetime.date.today()  # which some templates write
        if self._template is None or self._template[0] != today:
            self._template = (today, compile_template(self.chat, today=today))
        try:
            text = prompt_text(self._template[1], messages)
        except UserError as error:
            raise RefusedError(400, str(error), param="messages") from None
        # A template writes the special tokens itself.
        return Prompt(text, self.checked(self.encode(text, add_special_tokens=False), "messages"))

    def checked(self, ids: Sequence[int], name: str) -> tuple[int, ...]:
        """The ids, at least one, all of which the model has.

        Args:
            ids: of a text.
            name: of the field that they come from.

        Raises:
            RefusedError: there is none, or one is no id of the model.
        """
        outside = next((one for one in ids if not 0 <= one < self.vocab_size), None)
        if outside is not None or not ids:
            held = "an empty text or list" if outside is None else f"{outside}, which is no token id"
            raise RefusedError(400, f"{name} holds {held}; use ids from 0 to {self.vocab_size - 1}", param=name)
        return tuple(ids)


def completion_call(body: CompletionBody, reader: PromptReader) -> Call:
    """What a body of /v1/completions asks for.

    Raises:
        RefusedError: fields do not go together, or an id is none of the model's.
    """
    if body.max_tokens == 0 and not body.echo:
        raise RefusedError(400, "max_tokens is 0: set echo to get the prompt", param="max_tokens")
    prompts = []
    for one in body.prompt:
        if isinstance(one, str):
            prompts.append(reader.of_text(one, add_special_tokens=body.add_special_tokens))
        else:
            tokens = reader.checked(one, "prompt")
            prompts.append(Prompt(reader.tokenizer.decode(tokens), tokens))
    return _call(body, reader, prompts, new_tokens=body.max_tokens, top=body.logprobs, echo=body.echo)


def chat_call(body: ChatBody, reader: PromptReader) -> Call:
    """What a body of /v1/chat/completions asks for; see `completion_call`."""
    # "developer" is OpenAI's newer name of a role that templates know as "system".
    messages = [
        {"role": "system" if one.role == "developer" else one.role, "content": one.content} for one in body.messages
    ]
    new_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top = body.top_logprobs if body.logprobs else None
    return _call(body, reader, [reader.of_messages(messages)], new_tokens=new_tokens, top=top)


def _call(
    body: CompletionBody | ChatBody,
    reader: PromptReader,
    prompts: list[Prompt],
    *,
    new_tokens: int | None,
    top: int | None,
    echo: bool = False,
) -> Call:
    if not all(token.isdigit() and int(token) < reader.vocab_size for token in body.logit_bias):
        raise RefusedError(400, f"logit_bias takes token ids from 0 to {reader.vocab_size - 1}", param="logit_bias")
    special = reader.special_tokens
    return Call(
        is_chat=isinstance(body, ChatBody),
        prompts=tuple(prompts),
        num_choices=body.n,
        sampling=Sampling(
            body.temperature,
            body.top_k,
            body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=tuple((int(token), number) for token, number in body.logit_bias.items()),
        ),
        seed=secrets.randbits(32) if body.seed is None else body.seed % _SEEDS,
        new_tokens=new_tokens,
        stop=tuple(body.stop),
        # A stop that spells a special token, which the text does not show, is met by the token itself.
        stop_tokens=reader.stop_tokens | {special[one] for one in body.stop if one in special},
        hidden=frozenset(special.values() if body.skip_special_tokens else ()),
        echo=echo,
        top=top,
        stream=body.stream,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


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
        # The engine gives at least one token; where none is wanted it is not reported.
        room, wanted = length - len(prompt.tokens), max(1, call.new_tokens or 1)
        if room < wanted:
            name = "messages" if call.is_chat else "prompt"
            raise RefusedError(
                400,
                f"{name} has {len(prompt.tokens)} tokens, and {wanted} or more are to follow; prompt and answer "
                f"together have {length} tokens here",
                param=name,
                code="context_length_exceeded",
            )
        for choice in range(call.num_choices):
            requests.append(
                Request(
                    prompt.tokens,
                    new_tokens=room if call.new_tokens is None else wanted,
                    sampling=call.sampling,
                    seed=(call.seed + choice) % _SEEDS,
                    stop_tokens=call.stop_tokens,
                    top=call.top or 0,
                    prompt_log_probabilities=call.echo and call.top is not None,
                )
            )
    return requests


def embedding_texts(body: EmbeddingBody, reader: PromptReader, *, length: int) -> list[list[int]]:
    """The ids of each text of a body of /v1/embeddings, special tokens included.

    Args:
        body: what was asked.
        reader: has the tokenizer.
        length: tokens of the longest text.

    Raises:
        RefusedError: a text is empty, too long, or has an id that the model does not have.
    """
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


def tokenize(body: TokenizeBody, reader: PromptReader, *, length: int) -> dict[str, Any]:
    """What /tokenize answers: the ids of a text; special tokens that it spells are read as such."""
    added = reader.special.added if body.add_special_tokens is None else body.add_special_tokens
    ids = reader.encode(body.prompt, add_special_tokens=added)
    return {"tokens": ids, "count": len(ids), "max_model_len": length}


def tokenizer_info(reader: PromptReader) -> dict[str, Any]:
    """What /tokenizer_info answers: the special tokens and the chat template."""
    end, chat = reader.tokenizer.end_of_text, reader.chat
    named: dict[str, Any] = {"bos_token": None, "eos_token": None, "pad_token": None, "unk_token": None}
    if end is not None:
        named["eos_token"] = reader.tokenizer.decode([end])
    for known in (reader.special.named, {} if chat is None else chat.tokens):
        named |= {name: token for name, token in known.items() if name in named}
    template = None if chat is None else chat.source
    return {"tokenizer_class": "jaxtrain", **named, "vocab_size": reader.vocab_size, "chat_template": template}
