"""Bodies of /v1/completions and /v1/chat/completions: their fields, and what they ask for."""

import secrets
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.server.call import Call, Prompt
from jaxtrain.inference.server.fields import (
    Field,
    flag,
    is_whole,
    no_effect,
    number,
    read_fields,
    shown,
    text,
    texts,
    unsupported,
    whole,
    wrong,
)
from jaxtrain.inference.server.prompts import PromptReader
from jaxtrain.inference.server.refused import RefusedError

_MOST_CHOICES = 128
_MOST_STOPS = 4
_MOST_ALTERNATIVES = 20
_MOST_BIASES = 1024
_ROLES = ("system", "developer", "user", "assistant")
# What OpenAI takes where nothing is said.
_TEMPERATURE = 1.0
_COMPLETION_TOKENS = 16


def _logit_bias(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    wanted = 'an object of token ids and numbers from -100 to 100, as in {"50256": -100}'
    if not isinstance(value, dict):
        raise wrong(value, name, wanted)
    if len(value) > _MOST_BIASES:
        raise RefusedError(400, f"{name} has {len(value)} tokens; use at most {_MOST_BIASES}", param=name)
    read = number(-100, 100)
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise wrong(key, f"a key of {name}", "a token id", param=name)
        pairs.append((int(key), read(bias, f"{name}[{key}]")))
    return tuple(pairs)


def _stream_options(value: Any, name: str) -> bool:
    if not isinstance(value, dict):
        raise wrong(value, name, '{"include_usage": true}')
    options = read_fields(value, {"include_usage": Field(flag, False), "include_obfuscation": Field(flag, False)})
    return options["include_usage"]


def read_prompts(value: Any, name: str) -> Any:
    """A text, a list of texts, a list of ids or a list of lists of ids, whose ids are checked later."""
    wanted = "a text, a list of texts, a list of token ids or a list of lists of token ids"
    if isinstance(value, str):
        return [text(value, name)]
    if not isinstance(value, list) or not value:
        raise wrong(value, name, wanted)
    if all(isinstance(one, str) for one in value):
        return [text(one, name) for one in value]
    if all(isinstance(one, list) for one in value):
        return value
    if all(is_whole(one) for one in value):
        return [value]
    raise wrong(value, name, wanted)


def _messages(value: Any, name: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise wrong(value, name, 'a list of messages, as in [{"role": "user", "content": "Hello"}]')
    return [_message(one, f"{name}[{index}]") for index, one in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(value, name, 'an object, as in {"role": "user", "content": "Hello"}')
    role = value.get("role")
    if role not in _ROLES:
        raise wrong(role, f"{name}.role", f"one of {', '.join(_ROLES)}")
    for key, one in value.items():
        if key not in ("role", "content", "name") and one not in (None, [], ""):
            raise RefusedError(
                400, f"{name}.{shown(key)[1:-1]} is not supported; a message has role and content", param="messages"
            )
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(_part(one, f"{name}.content[{index}]") for index, one in enumerate(content))
    # OpenAI's older name of the same role, which templates know.
    return {"role": "system" if role == "developer" else role, "content": text(content, f"{name}.content")}


def _part(value: Any, name: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        raise wrong(value, name, 'texts alone, as in {"type": "text", "text": "Hello"}')
    return text(value.get("text"), f"{name}.text")


def _response_format(value: Any, name: str) -> None:
    if value != {"type": "text"}:
        raise RefusedError(
            400,
            f"{name} is {shown(value)}; this server writes free text: leave it out, or ask for the form in a message",
            param=name,
            code="unsupported_field",
        )


_SHARED = {
    "model": Field(text, required=True),
    "temperature": Field(number(0, 2), _TEMPERATURE),
    "top_p": Field(number(0, 1, above=True)),
    "top_k": Field(whole(1)),
    "min_p": Field(number(0, 1)),
    "repetition_penalty": Field(number(0, 10, above=True), 1.0),
    "presence_penalty": Field(number(-2, 2), 0.0),
    "frequency_penalty": Field(number(-2, 2), 0.0),
    "logit_bias": Field(_logit_bias, ()),
    "n": Field(whole(1, _MOST_CHOICES), 1),
    "stop": Field(texts(0, _MOST_STOPS), ()),
    "skip_special_tokens": Field(flag, True),
    "seed": Field(whole(-(2**63), 2**64 - 1)),
    "stream": Field(flag, False),
    "stream_options": Field(_stream_options),
    "user": Field(no_effect),
}
_COMPLETION = {
    **_SHARED,
    "prompt": Field(read_prompts, required=True),
    "max_tokens": Field(whole(0), _COMPLETION_TOKENS),
    "logprobs": Field(whole(0, _MOST_ALTERNATIVES)),
    "echo": Field(flag, False),
    "add_special_tokens": Field(flag),
    "best_of": Field(unsupported(1, instead="ask for n answers and choose yourself")),
    "suffix": Field(unsupported("", instead="give the text before the gap alone")),
}
_NO_TOOLS = "this server calls no tools; leave it out"
_TEXT_ONLY = "this server reads and writes texts only; leave it out"
_CHAT = {
    **_SHARED,
    "messages": Field(_messages, required=True),
    "max_tokens": Field(whole(1)),
    "max_completion_tokens": Field(whole(1)),
    "logprobs": Field(flag, False),
    "top_logprobs": Field(whole(0, _MOST_ALTERNATIVES)),
    "response_format": Field(_response_format),
    "tools": Field(unsupported([], instead=_NO_TOOLS)),
    "tool_choice": Field(unsupported("none", "auto", instead=_NO_TOOLS)),
    "functions": Field(unsupported([], instead=_NO_TOOLS)),
    "function_call": Field(unsupported("none", "auto", instead=_NO_TOOLS)),
    "parallel_tool_calls": Field(no_effect),
    "modalities": Field(unsupported(["text"], instead=_TEXT_ONLY)),
    "audio": Field(unsupported(instead=_TEXT_ONLY)),
    "prediction": Field(unsupported(instead="leave it out")),
    "reasoning_effort": Field(unsupported("none", instead="leave it out")),
    "web_search_options": Field(unsupported(instead=_NO_TOOLS)),
    "store": Field(unsupported(False, instead="nothing is stored here; leave it out")),
    "metadata": Field(no_effect),
    "service_tier": Field(no_effect),
    "safety_identifier": Field(no_effect),
    "prompt_cache_key": Field(no_effect),
}


def completion_call(body: Mapping[str, Any], reader: PromptReader, *, served: str) -> Call:
    """What a body of /v1/completions asks for.

    Args:
        body: from `parse_body`.
        reader: makes prompts.
        served: name of the model.

    Raises:
        RefusedError: a field is unknown, missing or wrong; names it.
    """
    fields = read_fields(body, _COMPLETION)
    check_model(fields["model"], served)
    prompts = []
    for one in fields["prompt"]:
        is_text = isinstance(one, str)
        found = (
            reader.of_text(one, add_special_tokens=fields["add_special_tokens"]) if is_text else reader.of_tokens(one)
        )
        prompts.append(found)
    if fields["max_tokens"] == 0 and not fields["echo"]:
        raise RefusedError(
            400, "max_tokens is 0, which asks for nothing; set echo to get the prompt", param="max_tokens"
        )
    return _call(fields, reader, prompts, new_tokens=fields["max_tokens"], top=fields["logprobs"], is_chat=False)


def chat_call(body: Mapping[str, Any], reader: PromptReader, *, served: str) -> Call:
    """What a body of /v1/chat/completions asks for; see `completion_call`."""
    fields = read_fields(body, _CHAT)
    check_model(fields["model"], served)
    if fields["top_logprobs"] is not None and not fields["logprobs"]:
        raise RefusedError(400, "top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
    older, newer = fields["max_tokens"], fields["max_completion_tokens"]
    if None not in (older, newer) and older != newer:
        raise RefusedError(
            400, f"max_tokens is {older} and max_completion_tokens {newer}; give one of them", param="max_tokens"
        )
    prompt = reader.of_messages(fields["messages"])
    top = (fields["top_logprobs"] or 0) if fields["logprobs"] else None
    return _call(fields, reader, [prompt], new_tokens=older if newer is None else newer, top=top, is_chat=True)


def check_model(given: str, served: str) -> None:
    """Raises where another model is asked for than the one that is served."""
    if given != served:
        raise RefusedError(
            404,
            f"there is no model {shown(given)}; this server has {shown(served)}",
            param="model",
            code="model_not_found",
        )


def _call(
    fields: Mapping[str, Any],
    reader: PromptReader,
    prompts: list[Prompt],
    *,
    new_tokens: int | None,
    top: int | None,
    is_chat: bool,
) -> Call:
    if fields["stream_options"] is not None and not fields["stream"]:
        raise RefusedError(400, "stream_options is given without stream; set stream to true", param="stream_options")
    outside = next((token for token, _ in fields["logit_bias"] if token >= reader.vocab_size), None)
    if outside is not None:
        raise wrong(outside, "a key of logit_bias", f"token ids from 0 to {reader.vocab_size - 1}", param="logit_bias")
    try:
        sampling = Sampling(
            fields["temperature"],
            fields["top_k"],
            fields["top_p"],
            min_p=fields["min_p"],
            repetition_penalty=fields["repetition_penalty"],
            presence_penalty=fields["presence_penalty"],
            frequency_penalty=fields["frequency_penalty"],
            logit_bias=fields["logit_bias"],
        )
    except ConfigError as error:
        raise RefusedError(400, str(error)) from None
    seed, special = fields["seed"], reader.special_tokens
    # A stop that spells a special token, which the text does not show, is met by the token itself.
    stops = {special[one] for one in fields["stop"] if one in special}
    return Call(
        is_chat=is_chat,
        prompts=tuple(prompts),
        num_choices=fields["n"],
        sampling=sampling,
        seed=secrets.randbits(32) if seed is None else seed % 2**32,
        new_tokens=new_tokens,
        stop=fields["stop"],
        stop_tokens=reader.stop_tokens | stops,
        hidden=frozenset(special.values() if fields["skip_special_tokens"] else ()),
        echo=fields.get("echo", False),
        top=top,
        stream=fields["stream"],
        include_usage=bool(fields["stream_options"]),
    )
