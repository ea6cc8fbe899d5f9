"""Where conversations end and answers begin: the token that a reward reads, spaces at borders, equal answers."""

import numpy as np
import pytest
from chat_files import messages, template_of, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from jaxtrain.data import open_data
from jaxtrain.data.chat.conversations import Conversation, read_conversations
from jaxtrain.data.chat.encoding import chat_encoder
from jaxtrain.data.chat.masks import masked_tokens
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import DataError


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


def test_answers_that_the_template_makes_equal_are_refused(tmp_path):
    template = tmp_path / "trims.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + m.content | trim + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    rows = [{"prompt": "q", "chosen": "no", "rejected": "yes"}, {"prompt": "q", "chosen": "yes ", "rejected": "yes"}]
    with pytest.raises(DataError, match=r"rows.jsonl:2 has equal answers where the chat template has") as caught:
        pairs(tmp_path, rows, template=str(template))
    assert "\n" not in str(caught.value)


def test_a_pair_that_differs_beyond_the_cut_is_dropped(tmp_path):
    same = "y" * 50
    rows = [{"prompt": "q", "chosen": "no", "rejected": "yes"}, {"prompt": "q", "chosen": same, "rejected": same + "?"}]
    data = pairs(tmp_path, rows)
    assert (data.counts["pairs"], data.counts["dropped"], data.counts["cut"]) == (1, 1, 0)


def test_a_missing_file_for_evaluation_is_named_by_its_own_key(tmp_path):
    with pytest.raises(DataError, match=r"^data.validation_path .*nope.jsonl does not exist"):
        pairs(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b"}], validation_path="nope.jsonl")


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


@pytest.mark.parametrize(("suffix", "unit"), [("jsonl", {"unit": None}), ("parquet", {})])
def test_arguments_that_only_other_rows_have_are_not_said(suffix, unit, tmp_path):
    """A column of a Parquet file has every key in every row; a null that a line of JSON says is kept."""
    said = [{"city": "Paris", **unit}, {"day": "Monday"}]
    calls = [[{"function": {"name": "f", "arguments": one}}] for one in said]
    tools = [[{"name": "f", "parameters": {name: {"type": "string"} for name in one}}] for one in said]
    question = {"role": "user", "content": "x"}
    rows = [
        {"messages": [question, {"role": "assistant", "content": None, "tool_calls": call}], "tools": tool}
        for call, tool in zip(calls, tools, strict=True)
    ]
    found = read_conversations(write_rows(tmp_path, rows, name=f"rows.{suffix}"))
    assert [one.messages[1] for one in found] == [row["messages"][1] for row in rows]
    assert [one.tools for one in found] == tools


def test_tools_that_are_no_list_are_one_line(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl:1 tools holds a value of type str; write a list of JSON schemas"):
        pairs(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "b", "tools": "[]"}])


def test_a_number_of_thousands_of_digits_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl:1 holds a number that is too long"):
        pairs(tmp_path, ['{"prompt": ' + "1" * 5000 + "}"])
