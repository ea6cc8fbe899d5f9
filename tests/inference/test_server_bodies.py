"""Bodies of requests: what they ask for, and one line where they ask for nothing that is served. No HTTP."""

import json
from typing import Any

import pytest
from scripted import CHAT, END, LENGTH, READER, TOKENIZER

from jaxtrain.inference.engine.request import Emitted
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.server.answers import Choice, TokenTexts
from jaxtrain.inference.server.bodies import (
    Call,
    Prompt,
    PromptReader,
    RefusedError,
    chat_call,
    completion_call,
    engine_requests,
    parse_body,
)

HI = [{"role": "user", "content": "Hi"}]


def completion(**fields: Any) -> Call:
    return completion_call({"model": "tiny", "prompt": "Hi", **fields}, READER, served="tiny")


def chat(**fields: Any) -> Call:
    return chat_call({"model": "tiny", "messages": HI, **fields}, READER, served="tiny")


NOT_JSON = {
    "half": (b'{"model": ', "line 1 column"),
    "a number of 5,000 digits": (b'{"seed": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    "100,000 lists in each other": (b'{"a": ' + b"[" * 100_000, "recursion depth"),
}


@pytest.mark.parametrize(("raw", "said"), NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_no_json_object_is_one_line(raw, said):
    with pytest.raises(RefusedError) as caught:
        parse_body(raw)
    assert (caught.value.status, "\n" in caught.value.message) == (400, False)
    assert said in caught.value.message


# Fields of a body, the field that is named, and a part of the line.
WRONG_COMPLETIONS = {
    "no prompt": ({"prompt": None}, "prompt", "'prompt' is missing"),
    "an unknown field": ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    "a prompt without a token": ({"prompt": [[]]}, "prompt", "at least one"),
    "an id outside of the vocabulary": ({"prompt": [258]}, "prompt", "use 0 to 257"),
    "half of a surrogate pair": ({"prompt": "a\ud800"}, "prompt", "surrogate"),
    "temperature below 0": ({"temperature": -1}, "temperature", "from 0 to 2"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature", "from 0 to 2"),
    "a bias outside of the vocabulary": ({"logit_bias": {"258": 1}}, "logit_bias", "0 to 257"),
    "n of a thousand": ({"n": 1000}, "n", "from 1 to 128"),
    "nothing at all": ({"max_tokens": 0}, "max_tokens", "set echo"),
    "too many log-probabilities": ({"logprobs": 21}, "logprobs", "from 0 to 20"),
    "stream as a text": ({"stream": "yes"}, "stream", "true or false"),
    "the best of several": ({"best_of": 3}, "best_of", "not supported"),
}
WRONG_CHATS = {
    "no messages": ({"messages": None}, "messages", "missing"),
    "an unknown role": ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "one of system"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "text",
    ),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "calls no tools"),
    "alternatives without log-probabilities": ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
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
    assert [prompt.tokens for prompt in completion(prompt=[[72], [72, END]]).prompts] == [(72,), (72, END)]
    assert [prompt.tokens for prompt in completion(prompt=["Hi", "<|im_end|>"]).prompts] == [(72, 105), (END,)]
    assert completion(prompt="").prompts[0].tokens == (0,)  # an empty text begins with the first id


def test_a_conversation_is_written_by_the_template():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": parts, "name": "Ann"}]
    prompt = chat(messages=messages).prompts[0]
    turns = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == Prompt(turns, tuple(READER.encode(turns, add_special_tokens=False)))
    with pytest.raises(RefusedError, match="no chat template"):
        PromptReader(TOKENIZER, None, vocab_size=258).of_messages(HI)


def test_fields_become_requests_of_the_engine():
    sampled = completion(
        prompt=["Hi", "Ho"], n=2, seed=7, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=-1, frequency_penalty=2, logit_bias={"5": -100}, max_tokens=4, logprobs=3, echo=True,
    )  # fmt: skip
    requests = engine_requests(sampled, length=LENGTH, most=16)
    assert [(one.tokens, one.seed) for one in requests] == [
        ((72, 105), 7), ((72, 105), 8), ((72, 111), 7), ((72, 111), 8),
    ]  # fmt: skip
    expected = Sampling(
        0.5, 3, 0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=-1.0, frequency_penalty=2.0,
        logit_bias=((5, -100.0),),
    )  # fmt: skip
    one = requests[0]
    assert (one.sampling, one.new_tokens, one.top, one.prompt_log_probabilities) == (expected, 4, 3, True)
    assert one.stop_tokens == frozenset(CHAT.stop) == {END}


def test_defaults_are_those_of_openai():
    given = completion()
    assert (given.sampling, given.new_tokens, given.num_choices) == (Sampling(1.0), 16, 1)
    assert completion().seed != completion().seed  # 32 random bits
    assert completion(seed=-1).seed == 2**32 - 1
    assert chat().new_tokens is None
    requests = engine_requests(chat(), length=LENGTH, most=16)
    assert requests[0].new_tokens == LENGTH - len(requests[0].tokens)  # all the room there is


def test_what_does_not_fit_is_refused():
    at_most = "a" * (LENGTH - 16)
    assert engine_requests(completion(prompt=at_most), length=LENGTH, most=16)
    for call in (completion(prompt=at_most + "a"), chat(messages=[{"role": "user", "content": "a" * LENGTH}])):
        with pytest.raises(RefusedError, match="prompt and answer together have 64") as caught:
            engine_requests(call, length=LENGTH, most=16)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    with pytest.raises(RefusedError, match="34 answers at a time; this server takes 16"):
        engine_requests(completion(prompt=["a", "b"], n=17), length=LENGTH, most=16)


def grown(call: Call, tokens: list[int], reason: str = "length") -> tuple[list[str], str | None, list[Any]]:
    """Texts of the pieces of an answer, why it ended, and its scored tokens."""
    choice = Choice(call, call.prompts[0], TOKENIZER, TokenTexts(TOKENIZER))
    pieces = []
    for token in tokens:
        pieces.append(choice.feed(Emitted(token, -0.5, ((token, -0.5),)[: call.top or 0])))
        if choice.finish_reason is not None:
            break
    else:
        pieces.append(choice.finish(reason))
    scored = [(one.text, one.offset) for piece in pieces for one in piece.scored]
    return [piece.text for piece in pieces if piece.text], choice.finish_reason, scored


GROWN = {
    "characters are whole": ({}, "aé", (["a", "é"], "length", [])),
    "a stop ends it": ({"stop": ["END"]}, "abENDcd", (["a", "b"], "stop", [])),
    "what may be a stop is held back": ({"stop": "END"}, "aENx", (["a", "ENx"], "length", [])),
    "tokens of a stop are not scored": ({"stop": "END", "logprobs": 0}, "aEND", (["a"], "stop", [("a", 0)])),
    "a token after bytes that are no character": (
        {"logprobs": 0}, b"a\xe2bc",
        (["a", "\ufffdb", "c"], "length", [("a", 0), ("\ufffd", 1), ("b", 2), ("c", 3)]),
    ),
    "bytes that begin nothing": (
        {"logprobs": 0}, b"\xff" * 5,
        (["\ufffd", "\ufffd", "\ufffd" * 3], "length", [("\ufffd", place) for place in range(5)]),
    ),
    "a stop token after bytes that are no character": (
        {"logprobs": 0}, [97, 0xE2, END], (["a", "\ufffd"], "stop", [("a", 0), ("\ufffd", 1), ("<|im_end|>", 2)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "written", "expected"), GROWN.values(), ids=GROWN)
def test_tokens_become_pieces_of_text(fields, written, expected):
    assert grown(completion(**fields), list(written.encode() if isinstance(written, str) else written)) == expected


def test_a_prompt_that_is_given_back_has_the_places_of_its_tokens():
    tokens = [97, 0xE2, 98, *"é".encode(), 0xE2]
    call = completion(prompt=tokens, echo=True, logprobs=0)
    piece = Choice(call, call.prompts[0], TOKENIZER, TokenTexts(TOKENIZER)).begin(
        [None, *(Emitted(token, -0.5, ()) for token in tokens[1:])]
    )
    assert piece.text == "a\ufffdbé\ufffd"
    assert [one.offset for one in piece.scored] == [0, 1, 2, 3, 3, 4]


def test_the_token_that_ends_is_scored_in_completions_alone():
    """Harnesses drop the last token of a completion, whatever it is."""
    assert grown(completion(logprobs=0), [97, END, 98]) == (["a"], "stop", [("a", 0), ("<|im_end|>", 1)])
    assert grown(chat(logprobs=True), [97, END, 98]) == (["a"], "stop", [("a", 0)])


def test_no_probability_is_infinite_or_none():
    choice = Choice(completion(logprobs=1), Prompt("a", (97,)), TOKENIZER, TokenTexts(TOKENIZER))
    found = choice.feed(Emitted(98, float("-inf"), ((99, 0.0), (98, float("-inf")))))
    assert [(one.log_probability, one.top) for one in found.scored] == [(-9999.0, (("c", 0.0), ("b", -9999.0)))]
