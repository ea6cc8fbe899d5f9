"""Rows of chats: forms of files, packing, too long conversations, pairs, the split, the built-in data."""

import json
import shutil

import numpy as np
import pytest
from chat_files import FOLDER, TOKENIZER, messages, write_rows

from jaxtrain.data import open_data
from jaxtrain.data.chat.rows import documented, packed
from jaxtrain.data.rows import shown_rows
from jaxtrain.errors import ConfigError, DataError

PAIR = {"prompt": "Who?", "chosen": "A model.", "rejected": "A man."}


def chat_folder(folder, *, template="chatml", stop=("<|im_end|>",), form="file"):
    """The tokenizer's folder of a published model, with its chat template in one of the usual places."""
    folder.mkdir(exist_ok=True)
    shutil.copy(FOLDER / "tokenizer.json", folder)
    source = (FOLDER / f"{template}.jinja").read_text()
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    if form == "file":
        (folder / "chat_template.jinja").write_text(source)
        settings["chat_template"] = "{{ raise_exception('the file comes first') }}"
    elif form == "names":
        settings["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": source}]
    elif form == "text":
        settings["chat_template"] = source
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = [TOKENIZER.token_id(one) for one in stop]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids if len(ids) > 1 else ids[0]}))
    return {"kind": "file", "path": str(folder / "tokenizer.json")}


def opened(folder, rows, *, length=64, task=None, name="rows.jsonl", published=None, **more):
    config = {
        "kind": "chat",
        "path": write_rows(folder, rows, name=name),
        "validation_fraction": 0.0,
        "tokenizer": chat_folder(folder / "model", **(published or {})),
        "packing": False,
        **more,
    }
    return open_data(config, sequence_length=length, task=task)


def said(data, index=0):
    """The text of a row, with trained tokens between marks."""
    parts = list(shown_rows(data.train, index + 1, data.tokenizer))[index]["parts"]
    return ["".join(f"[[{one['text']}]]" if one["trained"] else one["text"] for one in part["spans"]) for part in parts]


TEXT = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n[[A model.<|im_end|>]]"
# id: row
FORMS = {
    "messages": {"messages": messages("Who?", "A model.")},
    "texts": {"prompt": "Who?", "completion": "A model."},
    "lists": {"prompt": messages("Who?"), "completion": [{"role": "assistant", "content": "A model."}]},
    "null beside": {"messages": [{**one, "tool_calls": None} for one in messages("Who?", "A model.")]},
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_a_file(name, suffix, tmp_path):
    data = opened(tmp_path, [FORMS[name]], name=f"rows{suffix}")
    assert said(data) == [TEXT]
    row = data.train[0]
    assert [row[key].shape for key in ("inputs", "targets", "weights")] == [(64,)] * 3
    assert (row["inputs"].dtype, row["targets"].dtype, row["weights"].dtype) == (np.int32, np.int32, np.float32)
    assert (data.unit, data.units_per_row, data.input_shape, data.num_outputs) == ("tokens", 64, (64,), None)


@pytest.mark.parametrize("form", ["names", "text"])
def test_where_the_template_may_be(form, tmp_path):
    assert said(opened(tmp_path, [FORMS["texts"]], published={"form": form})) == [TEXT]


@pytest.mark.parametrize(
    ("template", "stop", "text"),
    [
        ("plain", "</s>", "Who?[[A model.</s>]]"),
        (str(FOLDER / "mistral.jinja"), "</s>", "<s>[INST] Who? [/INST][[ A model.</s>]]"),
    ],
    ids=["plain", "a file"],
)
def test_a_template_that_the_config_names(template, stop, text, tmp_path):
    published = {"form": "none", "stop": (stop,)}
    assert said(opened(tmp_path, [FORMS["texts"]], template=template, published=published)) == [text]


def test_a_saved_template_comes_before_that_of_the_folder(tmp_path):
    data = opened(tmp_path, [FORMS["texts"]])
    config = {"kind": "chat", "path": str(tmp_path / "rows.jsonl"), "validation_fraction": 0.0, "packing": False}
    shutil.copy(FOLDER / "tokenizer.json", tmp_path / "alone.json")
    config["tokenizer"] = {"kind": "file", "path": str(tmp_path / "alone.json")}
    again = open_data(config, sequence_length=64, reading=json.loads(json.dumps(data.reading)))
    assert again.fingerprint == data.fingerprint
    with pytest.raises(ConfigError, match=r"alone.json has no chat template beside it .* set data.template=chatml"):
        open_data(config, sequence_length=64)


def rows_of(data):
    """All rows as one batch."""
    return data.train.gather(np.arange(len(data.train)))


def test_packed_rows_have_the_losses_of_separate_ones(tmp_path):
    """float32 sums in another order: 1e-6 of the sum is ten times what was seen."""
    import jax

    from jaxtrain.config.model import TransformerConfig
    from jaxtrain.models.shipped.build import build_model
    from jaxtrain.models.tasks import language_modeling

    rows = [{"messages": messages("x" * i, "y" * i)} for i in (3, 9, 1, 14)]
    whole, alone = opened(tmp_path, rows, packing=True, length=80), opened(tmp_path, rows, length=80)
    sizes = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "max_sequence_length": 80}
    model = build_model(TransformerConfig(kind="transformer", **sizes), input_shape=(80,), vocab_size=whole.vocab_size)
    params, state = jax.jit(model.init)(jax.random.key(0))
    task = language_modeling()

    @jax.jit
    def loss(params, batch):
        outputs, _ = model.apply(params, state, batch["inputs"], key=None, train=False)
        return task.loss(outputs, batch)[:2]

    sums = [tuple(map(float, loss(params, rows_of(data)))) for data in (whole, alone)]
    assert len(whole.train) < len(alone.train)
    assert sums[0][1] == sums[1][1]
    assert sums[0][0] == pytest.approx(sums[1][0], rel=1e-6)


def test_each_segment_of_a_packed_row_is_the_conversation_alone(tmp_path):
    """Segments, positions and weights as arrays; what is trained is each answer with the token that ends it."""
    texts = [("x" * i, "é" * (7 * i % 5 + 1), "why", "z" * i) for i in range(1, 12)]
    rows = [{"messages": messages(*one)} for one in texts]
    packed_rows, alone = (
        rows_of(opened(tmp_path, rows, packing=True, length=150)),
        rows_of(opened(tmp_path, rows, length=150)),
    )
    segments = packed_rows["inputs"]["segments"]
    assert len(segments) < len(rows)
    found = []
    for row, ids in enumerate(segments):
        assert np.unique(ids[ids > 0]).tolist() == list(range(1, ids.max() + 1))
        assert not packed_rows["weights"][row][ids == 0].any()
        for segment in range(1, ids.max() + 1):
            (places,) = np.nonzero(ids == segment)
            assert packed_rows["inputs"]["positions"][row, places].tolist() == list(range(len(places)))
            assert (np.diff(places) == 1).all()
            tokens, targets = packed_rows["inputs"]["tokens"][row, places], packed_rows["targets"][row, places]
            assert tokens[1:].tolist() == targets[:-1].tolist()
            trained = targets[packed_rows["weights"][row, places] == 1]
            found.append((TOKENIZER.decode(tokens), TOKENIZER.decode(trained)))
    expected = []
    for row, (_, first, _, second) in enumerate(texts):
        size = int(np.flatnonzero(alone["weights"][row])[-1]) + 1
        answers = f"{first}<|im_end|>{second}<|im_end|>"
        expected.append((TOKENIZER.decode(alone["inputs"][row, :size]), answers))
    assert sorted(found) == sorted(expected)


def test_what_fits_exactly_opens_no_row():
    assert sorted(map(sorted, packed(np.array([5, 5, 5, 5]), 10))) == [[0, 1], [2, 3]]
    assert sorted(map(sorted, packed(np.array([3, 7, 10, 6, 2]), 10))) == [[0, 1], [2], [3, 4]]


LONG = [{"messages": messages("x", "y" * 100)}, FORMS["texts"], {"messages": messages("x" * 100, "y")}]


@pytest.mark.parametrize(
    ("too_long", "counts", "said_of_it"),
    [
        ("cut", (2, 1, 1), "of 3 conversations, 1 are cut to 64 tokens and 1 dropped (too long)"),
        ("drop", (1, 0, 2), "of 3 conversations, 0 are cut to 64 tokens and 2 dropped (too long)"),
    ],
)
def test_too_long_conversations_are_counted(too_long, counts, said_of_it, tmp_path):
    data = opened(tmp_path, LONG, too_long=too_long)
    assert tuple(data.counts[key] for key in ("conversations", "cut", "dropped")) == counts
    assert said_of_it in data.description


@pytest.mark.parametrize("form", ["texts", "whole lists"])
def test_pairs(form, tmp_path):
    row = dict(PAIR)
    if form != "texts":
        for key in ("chosen", "rejected"):
            row[key] = [*messages("Who?"), {"role": "assistant", "content": PAIR[key]}]
    data = opened(tmp_path, [row, PAIR], pairs=True)
    found = rows_of(data)
    assert [found[key].shape for key in ("inputs", "targets", "weights")] == [(2, 2, 64)] * 3
    assert said(data) == [TEXT, TEXT.replace("model", "man")]
    assert (data.input_shape, data.units_per_row, data.counts["pairs"]) == ((2, 64), 128, 2)


def test_a_scored_answer_ends_in_an_input(tmp_path):
    """A text of L + 1 tokens fits where its last token is a target alone, and is one too long where it is scored."""
    row = rows_of(opened(tmp_path, [PAIR], pairs=True))
    count = int(np.flatnonzero(row["weights"][0].any(0))[-1]) + 2  # tokens of the longer answer
    for task, length, counts in (("dpo", count - 1, (1, 0)), ("reward", count - 1, (0, 1)), ("reward", count, (1, 0))):
        more = {"pairs": True, "too_long": "drop", "length": length, "task": task}
        if counts[0]:
            data = opened(tmp_path, [PAIR], **more)
            assert (data.counts["pairs"], data.counts["dropped"]) == counts
        else:
            with pytest.raises(DataError, match="no conversation with an answer within"):
                opened(tmp_path, [PAIR], **more)
    scored = rows_of(opened(tmp_path, [PAIR], pairs=True, length=count, task="reward"))
    longer = int(scored["weights"][0].sum(-1).argmax())
    assert scored["inputs"][0][longer][-1] == scored["targets"][0][longer][-2] == row["targets"][0][longer][count - 2]


def test_equal_prompts_are_on_one_side(tmp_path):
    rows = [{"prompt": f"question {i % 10}", "completion": f"answer {i}"} for i in range(40)]
    data = opened(tmp_path, rows, validation_fraction=0.3)
    sides = [
        {"".join(span["text"] for span in one["parts"][0]["spans"]) for one in shown_rows(rows, 99, data.tokenizer)}
        for rows in (data.train, data.validation)
    ]
    questions = [{text.partition("answer")[0] for text in side} for side in sides]
    assert [len(one) for one in questions] == [7, 3]
    assert not questions[0] & questions[1]


def answers_of(rows, data):
    parts = [part for row in shown_rows(rows, len(rows), data.tokenizer) for part in row["parts"]]
    return {"".join(span["text"] for span in part["spans"] if span["trained"]) for part in parts}


def test_built_in_answers_are_on_one_side():
    data = open_data({"kind": "chat", "validation_fraction": 0.1}, sequence_length=1024)
    train, validation = answers_of(data.train, data), answers_of(data.validation, data)
    assert len(train) + len(validation) == len(documented())
    assert not train & validation
    assert len(validation) > 50


# id: (row, more keys of the config, error, what is said)
WRONG = {
    "not wanted": ({**FORMS["texts"], "label": False}, {}, DataError, r"undesirable answer \(label: false, as in KTO"),
    "no form": ({"text": "x"}, {}, DataError, r"rows.jsonl:2 is not a conversation \(it has text\); write messages"),
    "an empty answer": (
        {"messages": messages("x", " ")},
        {},
        DataError,
        r"rows.jsonl:2 has no answer to train, or an empty",
    ),
    "too long": (
        {"messages": messages("x", "y" * 99)},
        {"too_long": "error"},
        DataError,
        r"rows.jsonl:2 has 1\d\d tok",
    ),
    "a pair": (PAIR, {}, DataError, r"set task=dpo or task=reward"),
    "equal answers": (
        {**PAIR, "chosen": "A man."},
        {"pairs": True},
        DataError,
        r"rows.jsonl:2 has answers that are equal",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line(name, tmp_path):
    row, more, error, expected = WRONG[name]
    first = PAIR if more.get("pairs") and row is not FORMS["texts"] else FORMS["texts"]
    rows = [first] if row is None else [first, row] if error is DataError or row is PAIR else [row]
    with pytest.raises(error, match=expected) as caught:
        opened(tmp_path, rows, **more)
    assert "\n" not in str(caught.value)
