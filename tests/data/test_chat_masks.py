"""Chats as tokens: ids are those of transformers, the trained tokens those marked by hand, and where answers end."""

import re

import pytest
from chat_files import CONVERSATIONS, ENCODER, EXPECTED, STOPS, TOKENIZER, masked, messages, template_of, write_rows

from jaxtrain.data import open_data
from jaxtrain.data.chat.conversation import Conversation
from jaxtrain.data.chat.templates import render
from jaxtrain.errors import ConfigError, DataError

CASES = [(name, chat) for name, chats in EXPECTED.items() for chat in chats]


@pytest.mark.parametrize(("name", "chat"), CASES, ids=lambda value: value)
def test_text_and_ids_are_those_of_transformers(name, chat):
    template, expected = template_of(name), EXPECTED[name][chat]
    if "refused" in expected:
        with pytest.raises(DataError, match=expected["refused"]):
            masked(template, CONVERSATIONS[chat])
        return
    found = masked(template, CONVERSATIONS[chat])
    assert found.ids.tolist() == expected["ids"]
    assert render(template, Conversation("x", CONVERSATIONS[chat][:-1]), prompt=True).text == expected["prompt"]
    if "mask" in expected:
        assert found.trained.astype(int).tolist() == expected["mask"]


# What each family writes, with the tokens that are trained between [[ and ]], by hand.
_CHATML = """<|im_start|>user
What is 2 + 2?<|im_end|>
<|im_start|>assistant
[[It is 4.<|im_end|>]]
<|im_start|>user
And 3 + 3?
Quickly!<|im_end|>
<|im_start|>assistant
[[6, naïvely 🙂<|im_end|>]]
"""
_LLAMA3_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
BY_HAND = {
    "chatml": _CHATML,
    "chatml_marked": _CHATML,
    "qwen": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + _CHATML,
    "smollm2": "<|im_start|>system\nYou are a small model<|im_end|>\n" + _CHATML,
    "gemma": "<s><start_of_turn>user\nWhat is 2 + 2?<end_of_turn>\n<start_of_turn>model\n[[It is 4.<end_of_turn>]]\n"
    "<start_of_turn>user\nAnd 3 + 3?\nQuickly!<end_of_turn>\n<start_of_turn>model\n[[6, naïvely 🙂<end_of_turn>]]\n",
    "mistral": "<s>[INST] What is 2 + 2? [/INST][[ It is 4.</s>]][INST] And 3 + 3?\nQuickly! [/INST]"
    "[[ 6, naïvely 🙂</s>]]",
    "llama3": "<s>" + _LLAMA3_HEAD.format("user") + "What is 2 + 2?<|eot_id|>" + _LLAMA3_HEAD.format("assistant")
    + "[[It is 4.<|eot_id|>]]" + _LLAMA3_HEAD.format("user") + "And 3 + 3?\nQuickly!<|eot_id|>"
    + _LLAMA3_HEAD.format("assistant") + "[[6, naïvely 🙂<|eot_id|>]]",
}  # fmt: skip


def by_hand(text):
    """Ids and mask of a text with marks: each stretch is encoded alone."""
    ids, mask = [], []
    for part in re.split(r"(\[\[.*?\]\])", text, flags=re.DOTALL):
        trained = part.startswith("[[")
        found = next(ENCODER.encode([part[2:-2] if trained else part])).ids.tolist()
        ids += found
        mask += [trained] * len(found)
    return ids, mask


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("train_on", ["answers", "last", "all"])
def test_what_is_trained_is_what_was_marked_by_hand(name, train_on):
    found = masked(template_of(name), CONVERSATIONS["two turns"], train_on=train_on)
    ids, mask = by_hand(BY_HAND[name])
    if train_on == "last":
        last = max(i for i in range(1, len(mask)) if mask[i] and not mask[i - 1])
        mask = [marked and i >= last for i, marked in enumerate(mask)]
    assert found.ids.tolist() == ids
    assert found.trained.tolist() == ([True] * len(ids) if train_on == "all" else mask)
    assert TOKENIZER.token_id(STOPS[name]) in found.ids[found.trained]


# id: (source, messages, error, what is said)
REFUSED = {
    "out of the sandbox": (
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
        messages("a", "b"),
        ConfigError,
        "SecurityError|UndefinedError",
    ),
    "refuses": (
        "\n\n{{ raise_exception('roles\nmust alternate') }}",
        messages("a", "b"),
        DataError,
        r"rows.jsonl:1: the chat template x.jinja refuses the conversation: roles",
    ),
    "never stops": (
        "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
        messages("a", "b"),
        ConfigError,
        r"writes no stop token \(id \d+\) at the end of an answer \(rows.jsonl:1\).*data.stop",
    ),
    "leaves out calls": (
        "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}",
        [*messages("a"), {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
        ConfigError,
        r"at the end of an answer \(rows.jsonl:1\), or nothing before it, .* data.template to one that writes calls",
    ),
    "an earlier answer changes": (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{{ eos_token }}"
        "{% endfor %}",
        messages("a", "b", "c", "d"),
        ConfigError,
        r"writes message 2 of rows.jsonl:1 differently if more messages follow.*data.train_on=last",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_does_not_work_is_one_line(name):
    source, said, error, expected = REFUSED[name]
    with pytest.raises(error, match=expected) as caught:
        masked(template_of("x", source=source), said)
    assert "\n" not in str(caught.value)


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
CALLS = (
    "{{ tools | length if tools else 'no tools' }};{% for m in messages %}{% if m.role == 'assistant' %}A:"
    "{{ 'call' if m['content'] is none else m.content }}<|im_end|>{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_templates_get_the_tools_of_a_row_and_content_that_is_none(suffix, tmp_path):
    template = tmp_path / "calls.jinja"
    template.write_text(CALLS)
    rows = [
        {"messages": [{"role": "user", "content": "x"}, CALL], "tools": [{"name": "f"}, {"name": "g"}]},
        {"messages": messages("x", "y"), "tools": None},
    ]
    path = write_rows(tmp_path, rows, name=f"rows.{suffix}")
    settings = {"tokenizer": {"kind": "byte"}, "validation_fraction": 0.0, "packing": False, "path": path}
    data = open_data({"kind": "chat", "template": str(template), **settings}, sequence_length=64)
    texts = [data.tokenizer.decode(data.train[i]["inputs"].tolist()).partition("<|im_end|>")[0] for i in range(2)]
    assert [text.replace("<pad>", "") for text in texts] == ["2;x;A:call", "no tools;x;A:y"]
