"""Bodies of requests: what they ask for, and one line where they ask for nothing that is served. No HTTP."""

import dataclasses
import json
from typing import Any

import pytest
from scripted import CHAT, END, LENGTH, READER, TOKENIZER

from jaxtrain.errors import DataError
from jaxtrain.inference.engine.request import Emitted
from jaxtrain.inference.prompts import PromptReader, SpecialTokens
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.server.bodies import (
    Call,
    ChatBody,
    Choice,
    CompletionBody,
    RefusedError,
    make_call,
    read_body,
)

HI = [{"role": "user", "content": "Hi"}]


def read(kind: Any, fields: dict[str, Any]) -> Any:
    return read_body(kind, json.dumps({"model": "tiny", **fields}).encode(), served="tiny")


def completion(**fields: Any) -> Call:
    return make_call(read(CompletionBody, {"prompt": "Hi", **fields}), READER, length=LENGTH)


def chat(**fields: Any) -> Call:
    return make_call(read(ChatBody, {"messages": HI, **fields}), READER, length=LENGTH)


NOT_JSON = {
    "half": b'{"model": ',
    "no UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "a list": b"[]",
}


@pytest.mark.parametrize("raw", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_no_json_object_is_one_line(raw):
    with pytest.raises(RefusedError) as caught:
        read_body(CompletionBody, raw, served="tiny")
    assert (caught.value.status, "\n" in caught.value.message) == (400, False)


# Fields of a body, the field that is named, and a part of the line.
WRONG_COMPLETIONS = {
    "no prompt": ({"prompt": None}, "prompt", "required"),
    "a misspelt field": ({"temprature": 1.0}, "temprature", "not permitted"),
    "a number as prompt": ({"prompt": 1.5}, "prompt", "array"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature", "finite"),
    "a bias of tokens": ({"logit_bias": {"5": 1}}, "logit_bias", "not permitted"),
}
WRONG_CHATS = {
    "no messages": ({"messages": None}, "messages", "required"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages", "'system'"),
    "a call that must be made": ({"tool_choice": "required"}, "tool_choice", "'none'"),
}


@pytest.mark.parametrize(
    ("call", "fields", "param", "said"),
    [(completion, *row) for row in WRONG_COMPLETIONS.values()] + [(chat, *row) for row in WRONG_CHATS.values()],
    ids=[*WRONG_COMPLETIONS, *(f"chat: {name}" for name in WRONG_CHATS)],
)
def test_a_wrong_field_is_one_line_that_names_it(call, fields, param, said):
    with pytest.raises(RefusedError) as caught:
        call(**fields)
    error = caught.value
    assert (error.status, error.param) == (400, param)
    assert said in error.message
    assert "\n" not in error.message
    assert len(error.message) < 300
    json.dumps(error.to_json())


def test_every_form_of_a_prompt():
    assert [one.tokens for one in completion(prompt=[[72], [72, END]]).requests] == [(72,), (72, END)]
    assert [one.tokens for one in completion(prompt=["Hi", "<|im_end|>"]).requests] == [(72, 105), (END,)]
    assert completion(prompt="").requests[0].tokens == (0,)  # an empty text begins with the first id


def test_a_conversation_is_written_by_the_template():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "Be"}, {"role": "user", "content": parts, "name": "Ann"}]
    turns = "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat(messages=messages).requests[0].tokens == tuple(READER.encode(turns))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages has content that is not text"),
        ({"messages": [{"role": "user"}]}, "messages has content that is not text"),
        ({"tools": "f"}, "the request has 'f' for tools"),
    ],
    ids=["a picture", "no content", "tools"],
)
def test_what_no_template_can_write_is_one_line(fields, said):
    with pytest.raises(DataError, match=said) as caught:
        chat(**fields)
    assert "\n" not in str(caught.value)


def test_tools_and_calls_reach_the_template_as_in_training():
    source = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content if m.content is not none }};{% endfor %}{% if not think %}!{% endif %}"
    )
    reader = PromptReader(TOKENIZER, dataclasses.replace(CHAT, source=source), SpecialTokens())
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": null}'}}
    body = {
        "messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
                     {"role": "tool", "content": "2", "tool_call_id": "c"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "chat_template_kwargs": {"think": False},
    }  # fmt: skip
    (request,) = make_call(read(ChatBody, body), reader, length=256).requests
    assert TOKENIZER.decode(request.tokens) == 'f;user:Hi;assistant:{"a": null};tool:2;!'


def test_fields_become_requests_of_the_engine():
    sampled = completion(
        prompt=["Hi", "Ho"], n=2, seed=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=-1, frequency_penalty=2, max_tokens=4, logprobs=3,
    )  # fmt: skip
    assert [(one.tokens, one.seed, one.row) for one in sampled.requests] == [
        ((72, 105), 7, 0), ((72, 105), 7, 1), ((72, 111), 7, 2), ((72, 111), 7, 3),
    ]  # fmt: skip
    expected = Sampling(
        0.5, 3, 0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1.0, frequency_penalty=2.0,
    )  # fmt: skip
    one = sampled.requests[0]
    assert (one.sampling, one.new_tokens, one.top) == (expected, 4, 3)
    assert one.stop_tokens == frozenset(CHAT.stop) == {END}


def test_defaults_are_those_of_openai():
    given = completion()
    assert (given.requests[0].sampling, given.requests[0].new_tokens, given.body.n) == (Sampling(1.0), 16, 1)
    assert completion().requests[0].seed != completion().requests[0].seed  # 32 random bits
    request = chat(tools=[], metadata=None, response_format={"type": "text"}).requests[0]
    assert request.new_tokens == LENGTH - len(request.tokens)  # all the room there is


def grown(call: Call, tokens: list[int], reason: str = "length") -> tuple[list[str], str | None, list[Any]]:
    """Texts of the pieces of an answer, why it ended, and its scored tokens."""
    choice = Choice(call, TOKENIZER)
    pieces = []
    for token in tokens:
        pieces.append(choice.feed(Emitted(token, -0.5, ((token, -0.5),)[: call.top or 0])))
        if pieces[-1].finish_reason is not None:
            break
    else:
        pieces.append(choice.finish(reason))
    scored = [score["token"] for piece in pieces for score in piece.scores]
    return [piece.text for piece in pieces if piece.text], pieces[-1].finish_reason, scored


GROWN = {
    "characters are whole": ({}, "aé", (["a", "é"], "length", [])),
    "a stop ends it": ({"stop": ["END"]}, "abENDcd", (["a", "b"], "stop", [])),
    "what may be a stop is held back": ({"stop": "END"}, "aENx", (["a", "ENx"], "length", [])),
    "every token is scored": (
        {"stop": "EN", "logprobs": 0}, "aEN", (["a"], "stop", ["a", "E", "N"]),
    ),
    "parts of a character": (
        {"logprobs": 0}, "éa", (["é", "a"], "length", ["\ufffd", "\ufffd", "a"]),
    ),
    "a stop that is a special token": ({"stop": "<|im_start|>"}, [97, 256, 98], (["a"], "stop", [])),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "written", "expected"), GROWN.values(), ids=GROWN)
def test_tokens_become_pieces_of_text(fields, written, expected):
    assert grown(completion(**fields), list(written.encode() if isinstance(written, str) else written)) == expected


@pytest.mark.parametrize("call", [completion(logprobs=0), chat(logprobs=True)], ids=["completion", "chat"])
def test_the_token_that_ends_is_scored(call):
    assert grown(call, [97, END, 98]) == (["a"], "stop", ["a", "<|im_end|>"])
