"""Forms of rows: what people write becomes the same text with the same mask, or one line that says what is wrong."""

import csv
import json

import pytest
from chat_files import messages, write_rows
from test_chat_rows import chat_folder, said

from jaxtrain.data import open_data
from jaxtrain.errors import UserError
from jaxtrain.formats.safetensors import FolderSource

WEIGH = {"type": "function", "function": {"name": "weigh", "parameters": {"properties": {"unit": {"type": "string"}}}}}
CALL = {"type": "function", "function": {"name": "weigh", "arguments": {"unit": "kg"}}}
# As Hermes, Qwen and Llama 3.1 write them: tools, calls and results as JSON.
TOOLS = (
    "{% for t in tools or [] %}<tool>{{ t | tojson }}</tool>\n{% endfor %}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content if m.content is not none }}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "<call>{{ c.function | tojson }}</call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined %}<think></think>"
    "{% endif %}{% endif %}"
)


def opened(folder, rows, *, name="rows.jsonl", template=None, task=None, **more):
    path = folder / name
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(rows[0]), *(list(row.values()) for row in rows)])
    else:
        write_rows(folder, rows, name=name)
    config = {"kind": "chat", "path": str(path), "validation_fraction": 0.0, "packing": False, **more}
    config["tokenizer"] = chat_folder(folder / "model")
    if template is not None:
        (folder / "t.jinja").write_text(template)
        config["template"] = str(folder / "t.jinja")
    return open_data(config, sequence_length=512, task=task)


def turns(*texts, **more):
    """Messages of ShareGPT."""
    return [{"from": ("human", "gpt")[i % 2], "value": text, **more} for i, text in enumerate(texts)]


def written(*texts, system=None):
    """A conversation in chatml, with marks around what is trained."""
    parts = [f"<|im_start|>system\n{system}<|im_end|>\n"] if system else []
    for i, text in enumerate(texts):
        answer = f"[[{text}<|im_end|>]]\n"
        parts.append("<|im_start|>assistant\n" + answer if i % 2 else f"<|im_start|>user\n{text}<|im_end|>\n")
    return "".join(parts).removesuffix("\n")


FOUR = ("Who?", "A model.", "Why?", "It was\ntrained.")
PARTS = [{"type": "text", "text": "A ", "image": None}, {"type": "text", "text": "b"}]
# id: (row, text with marks)
FORMS = {
    "ShareGPT": ({"conversations": turns(*FOUR), "id": "x"}, written(*FOUR)),
    "ShareGPT with its system turn": (
        {"conversations": [{"from": "system", "value": "Be."}, *turns(*FOUR)]},
        written(*FOUR, system="Be."),
    ),
    "a column of the system": ({"messages": messages(*FOUR), "system": "Be."}, written(*FOUR, system="Be.")),
    "the same system twice": (
        {"messages": [{"role": "system", "content": "Be."}, *messages(*FOUR)], "system_prompt": "Be."},
        written(*FOUR, system="Be."),
    ),
    "no system": ({"conversations": turns(*FOUR), "system": ""}, written(*FOUR)),
    "Alpaca": ({"instruction": "Add.", "input": "2 3", "output": "5"}, written("Add.\n\n2 3", "5")),
    "Alpaca without input": ({"instruction": "Greet.", "input": "", "output": "Hi"}, written("Greet.", "Hi")),
    "Alpaca and its text": (
        {"instruction": "Add.", "input": "", "output": "5", "prompt": "Instruction: Add. Response: 5"},
        written("Add.", "5"),
    ),
    "Dolly": ({"instruction": "Sum up.", "context": "A b.", "response": "b"}, written("Sum up.\n\nA b.", "b")),
    "a question": ({"question": "Who?", "answer": "Me."}, written("Who?", "Me.")),
    "a question with a prompt": (
        {"system_prompt": "Be.", "question": "Who?", "response": "Me."},
        written("Who?", "Me.", system="Be."),
    ),
    "columns that were kept": (
        {"question": "x", "answer": "y", "prompt": "Who?", "completion": "Me."},
        written("Who?", "Me."),
    ),
    "parts": (
        {"messages": [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages(*FOUR)]},
        written(*FOUR),
    ),
    "parts and nulls": (
        {"messages": [*messages("Who?"), {"role": "assistant", "content": PARTS, "tool_calls": []}]},
        written("Who?", "A b"),
    ),
    "JSON text": ({"messages": json.dumps(messages(*FOUR))}, written(*FOUR)),
    "lists as JSON text": (
        {"prompt": json.dumps(messages(*FOUR)[:3]), "completion": json.dumps(messages(*FOUR)[3:])},
        written(*FOUR).replace("[[A model.<|im_end|>]]", "A model.<|im_end|>"),
    ),
    "lists as pandas writes them": (
        {"prompt": str(messages("Who?")), "completion": str([{"role": "assistant", "content": "It's me."}])},
        written("Who?", "It's me."),
    ),
    "one message as JSON text": (
        {"prompt": "Who?", "completion": json.dumps(messages("Who?", "Me.")[1])},
        written("Who?", "Me."),
    ),
    "text of columns without a value": (
        {"messages": [{**one, "tool_calls": "null", "weight": "1"} for one in messages(*FOUR)], "tools": "null"},
        written(*FOUR),
    ),
    "an answer in JSON": (
        {"prompt": "Flights?", "completion": '[{"from": "A", "to": "B"}]'},
        written("Flights?", '[{"from": "A", "to": "B"}]'),
    ),
    "text that looks like a list": ({"prompt": "[1, 2]", "completion": '[{"a": 1}]'}, written("[1, 2]", '[{"a": 1}]')),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("name", FORMS)
def test_every_form_becomes_the_same_text_and_mask(name, suffix, tmp_path):
    row, expected = FORMS[name]
    if suffix == "csv":
        row = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
    if suffix == "parquet" and name == "parts and nulls":
        row = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}, row["messages"][1]]}
    assert said(opened(tmp_path, [row], name=f"rows.{suffix}")) == [expected]


def test_the_columns_that_were_read_are_reported(tmp_path):
    rows = [
        {"id": 1, "instruction": "a", "input": "", "output": "b"},
        {"conversations": turns("c", "d"), "system": "e"},
    ]
    lines = opened(tmp_path, rows).description
    (line,) = (line for line in lines if line.startswith("columns read: "))
    read, _, others = line.removeprefix("columns read: ").removesuffix(")").partition(" (the rows have: ")
    names = {"instruction", "input", "output", "conversations", "system"}
    assert (set(read.split(", ")), set(others.split(", "))) == (names, {"id", *names})


def test_columns_and_roles_of_a_config(tmp_path):
    row = {"dialog": [{"speaker": "Customer", "says": "Who?"}, {"speaker": "agent", "says": "Me."}], "intro": "Be."}
    columns = {"messages": "dialog", "role": "speaker", "content": "says", "system": "intro"}
    data = opened(tmp_path, [row], columns=columns, roles={"customer": "user", "agent": "assistant"})
    assert said(data) == [written("Who?", "Me.", system="Be.")]
    data = opened(tmp_path, [{"q": "Who?", "a": "Me."}], columns={"prompt": "q", "completion": "a"})
    assert said(data) == [written("Who?", "Me.")]


ASKED = [{"role": "user", "content": "How heavy?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*ASKED, {"role": "tool", "content": "2"}, {"role": "assistant", "content": "2 kg."}]
AS_TEXT = {"type": "function", "function": {"name": "weigh", "arguments": '{"unit": "kg"}'}}
CALLED = (
    f"<tool>{json.dumps(WEIGH)}</tool>\n<|im_start|>user\nHow heavy?<|im_end|>\n<|im_start|>assistant\n"
    '[[<call>{"name": "weigh", "arguments": {"unit": "kg"}}</call><|im_end|>]]\n<|im_start|>tool\n2<|im_end|>\n'
    "<|im_start|>assistant\n[[2 kg.<|im_end|>]]"
)
# Rows that are all CALLED.
CALLS = {
    "objects": {"messages": ANSWERED, "tools": [WEIGH]},
    "OpenAI": {
        "messages": [ANSWERED[0], {"role": "assistant", "tool_calls": [{**AS_TEXT, "id": None}]}, *ANSWERED[2:]],
        "tools": json.dumps([WEIGH]),
    },
    "nulls of columns": {
        "messages": [{"name": None, "tool_calls": None, **one} for one in ANSWERED],
        "tools": [{**WEIGH, "strict": None}],
    },
    "one tool, each as text": {"messages": json.dumps(ANSWERED), "tools": [json.dumps(WEIGH)]},
    "an older form of OpenAI": {
        "messages": [
            ANSWERED[0],
            {"role": "assistant", "content": None, "function_call": AS_TEXT["function"]},
            {"role": "function", "content": "2"},
            ANSWERED[3],
        ],
        "tools": WEIGH,
    },
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": "How heavy?"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2 kg."},
        ],
        "tools": json.dumps([WEIGH]),
    },
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_tools_are_objects_for_the_template(name, suffix, tmp_path):
    row = CALLS[name]
    if suffix == "csv":
        row = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
    if name == "nulls of columns" and suffix != "parquet":
        row = {**row, "tools": [WEIGH]}
    assert said(opened(tmp_path, [row], name=f"rows.{suffix}", template=TOOLS)) == [CALLED]


def test_arguments_of_other_calls_leave_no_nulls(tmp_path):
    """Parquet gives the arguments of both calls to each."""
    other = {"function": {"name": "price", "arguments": {"coin": "EUR", "of": {"a": 1}}}}
    rows = [
        {"messages": [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [call]}]} for call in (CALL, other)
    ]
    lines = [said(opened(tmp_path, rows, name=f"rows.{suffix}", template=TOOLS), 1) for suffix in ("jsonl", "parquet")]
    assert lines[0] == lines[1]
    assert '"arguments": {"coin": "EUR", "of": {"a": 1}}' in lines[0][0]
    # A null that the row itself says is kept where it is text.
    call = {"function": {"name": "weigh", "arguments": '{"unit": null}'}}
    row = {"messages": [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert '{"unit": null}' in said(opened(tmp_path, [row], name="rows.parquet", template=TOOLS))[0]


@pytest.mark.parametrize("text", [False, True])
def test_arguments_of_the_template(text, tmp_path):
    arguments = {"enable_thinking": False}
    rows = [
        {"messages": messages("x", "y"), "chat_template_kwargs": json.dumps(arguments) if text else arguments},
        {"messages": messages("x", "y"), "chat_template_kwargs": None},
    ]
    template = TOOLS.replace("{{ m.content if", "{{ '<think></think>' if m.role == 'assistant' and enable_thinking is "
                             "defined }}{{ m.content if")  # fmt: skip
    data = opened(tmp_path, rows, template=template)
    expected = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{}[[y<|im_end|>]]"
    assert [said(data, i) for i in range(2)] == [[expected.format("<think></think>")], [expected.format("")]]


@pytest.mark.parametrize("form", ["names", "folder"])
def test_rows_with_tools_take_the_template_for_them(form, tmp_path):
    tokenizer = chat_folder(tmp_path / "model")
    folder = tmp_path / "model"
    # A line end at the start of a template is text.
    plain = "\n{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}\n\n"
    if form == "names":
        (folder / "chat_template.jinja").unlink()
        named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": TOOLS}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    else:
        (folder / "chat_template.jinja").write_text(plain)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    rows = [CALLS["objects"], {"messages": messages("x", "y"), "tools": []}]
    path = write_rows(tmp_path, rows)
    config = {"kind": "chat", "path": path, "validation_fraction": 0.0, "packing": False, "tokenizer": tokenizer}
    data = open_data(config, sequence_length=512)
    assert [said(data, 0), said(data, 1)] == [[CALLED], ["\nx<|im_end|>[[y<|im_end|>]]"]]
    if form == "folder":  # and an exported folder has one file for both
        assert FolderSource(folder, {}, {}).files["chat_template.jinja"].decode() == data.reading["template"]
    # A run keeps both.
    again = open_data(config, sequence_length=512, reading=json.loads(json.dumps(data.reading)))
    assert again.fingerprint == data.fingerprint


PAIR = [written("Who?", "A model."), written("Who?", "A man.")]
# Rows that are all PAIR.
PAIRS = {
    "lists": {
        "prompt": messages("Who?"), "chosen": messages("", "A model.")[1:], "rejected": messages("", "A man.")[1:],
    },
    "JSON text": {
        "chosen": json.dumps(messages("Who?", "A model.")),
        "rejected": json.dumps(messages("Who?", "A man.")),
    },
    "ShareGPT": {"chosen": turns("Who?", "A model."), "rejected": turns("Who?", "A man.")},
    "LLaMA-Factory": {
        "conversations": turns("Who?"),
        "chosen": {"from": "gpt", "value": "A model."},
        "rejected": {"from": "gpt", "value": "A man."},
    },
    "a question": {"system": "", "question": "Who?", "chosen": "A model.", "rejected": "A man."},
    "the whole conversation beside": {
        "prompt": "Who?", "messages": messages("Who?", "A model."), "chosen": "A model.", "rejected": "A man.",
    },
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PAIRS)
def test_every_form_of_a_preference(name, suffix, tmp_path):
    assert said(opened(tmp_path, [PAIRS[name]], name=f"rows.{suffix}", task="dpo")) == PAIR


def test_a_preference_with_a_column_of_the_system(tmp_path):
    for row in (PAIRS["a question"], PAIRS["ShareGPT"]):
        pair = said(opened(tmp_path, [{**row, "system": "Be."}], task="dpo"))
        assert pair == [written("Who?", text, system="Be.") for text in ("A model.", "A man.")]


def test_a_file_that_is_named_twice_counts_once(tmp_path):
    (tmp_path / "more").mkdir()
    write_rows(tmp_path, [{"question": "a", "answer": "b"}], name="a.jsonl")
    write_rows(tmp_path / "more", [{"question": "c", "answer": "d"}], name="b.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    for path in ([f"{tmp_path}/a.jsonl", f"{tmp_path}/*.jsonl", f"{tmp_path}/more/b.jsonl"], f"{tmp_path}/**/*.jsonl"):
        data = open_data({"kind": "chat", "path": path, "validation_fraction": 0.0}, sequence_length=64)
        assert data.counts["conversations"] == 2


IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}
UNDESIRABLE = [False, 0, 0.0, "false", "False", "0", " FALSE "]
# id: (row, what is said)
WRONG = {
    **{
        f"label {label!r}": ({"question": "a", "answer": "b", "label": label}, "is an undesirable answer .label")
        for label in UNDESIRABLE
    },
    "no form": ({"text": "a", "id": 3}, r"not a conversation \(it has text, id\); write messages, .*data.columns"),
    "no answer": ({"instruction": "a", "input": "b"}, r"not a conversation \(it has instruction, input\)"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}, messages("", "b")[1]]},
        "has content that is not text: {'type': 'image_url'",
    ),
    "no role": ({"messages": [{"role": None, "content": "a"}, *messages("b", "c")]}, "for a message; write role"),
    "no messages": ({"messages": "[]"}, "has no messages"),
    "a role of ShareGPT": (
        {"conversations": [*turns("a", "b"), {"from": "narrator", "value": "c"}]},
        "narrator.*data.roles",
    ),
    "two systems": (
        {"messages": [{"role": "system", "content": "a"}, *messages("b", "c")], "system": "d"},
        "system message beside another",
    ),
    "arguments": (
        {"messages": [ASKED[0], {**ASKED[1], "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}]},
        "has '{a' for arguments of a call",
    ),
    "tools": ({"messages": messages("a", "b"), "tools": "weigh"}, "has 'weigh' for tools"),
    "lists that end early": ({"prompt": '[{"role": "user", "content": "a"', "completion": "b"}, "for messages"),
    "a variable of the chat": (
        {"messages": messages("a", "b"), "chat_template_kwargs": {"tools": []}},
        "multiple values for keyword argument 'tools'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_wrong_is_one_line(name, tmp_path):
    row, expected = WRONG[name]
    with pytest.raises(UserError, match=rf"rows.jsonl:2.*{expected}") as caught:
        opened(tmp_path, [{"question": "a", "answer": "b"}, row])
    assert "\n" not in str(caught.value)
