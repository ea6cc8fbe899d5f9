"""Exported folders frame texts as the rows of the run were, so that other programs give the classes of the run."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.config.data import TokenizerConfig
from jaxtrain.data.special import special_ids
from jaxtrain.data.text.frame import fill_frame, make_frame
from jaxtrain.data.text.frame_file import framed_file
from jaxtrain.data.tokenizer import BpeTokenizer, build_tokenizer, load_tokenizer_text
from jaxtrain.interop.save import Origin, Texts, companions
from jaxtrain.run.export import export_run
from jaxtrain.run.predict import predict_published
from jaxtrain.run.run import run_config
from jaxtrain.run.texts import exported_texts

MODEL = jt.build_model({"kind": "mlp"}, input_shape=(8,), num_outputs=2)  # writes no text


def words(*special, processor=None):
    """A tokenizer of words, with these tokens before them."""
    names = [*special, "one", "two"]
    model = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="one"))
    model.add_special_tokens(list(special))
    model.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue] a setter
    if processor is not None:
        model.post_processor = processor
    return BpeTokenizer(model)


def own(special=("[PAD]", "[CLS]", "[SEP]", "[MASK]")):
    found = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=257 + len(special)), ["one two"], special=special)
    assert isinstance(found, BpeTokenizer)
    return found


MOVES = processors.ByteLevel(trim_offsets=True)
FRAMED = {
    "an encoder's tokens": own(),
    "an end and padding": words("<pad>", "</s>"),
    "a processor that adds nothing": words("<s>", "</s>", processor=MOVES),
}


@pytest.mark.parametrize("pair", [False, True], ids=["one text", "two texts"])
@pytest.mark.parametrize("name", FRAMED)
def test_the_file_frames_texts_as_rows_are(name, pair):
    tokenizer = FRAMED[name]
    special = special_ids(tokenizer, None)
    text = framed_file(tokenizer.to_json(), tokenizer, special, pair=pair)
    assert text is not None
    texts = ["one two", "two"][: 1 + pair]
    encoded = Tokenizer.from_str(text).encode(texts[0], texts[1] if pair else None)
    ids, kinds, _ = fill_frame(
        make_frame(tokenizer, special, pair=pair), [tokenizer.encode(one).tolist() for one in texts], 99
    )
    assert (encoded.ids, encoded.type_ids) == (ids, kinds)
    # What reads the folder finds the frame in the file, and adds it once.
    again = load_tokenizer_text(text, "the file")
    assert isinstance(again, BpeTokenizer)
    assert make_frame(again, special, pair=pair) == make_frame(tokenizer, special, pair=pair)
    assert framed_file(text, again, special, pair=pair) is None


def config(*, kind="labelled_text", causal=False):
    model = {"kind": "transformer", "causal": causal, "head": {"kind": "sequence", "pooling": "last"}}
    return load_config({"task": "classification", "model": model, "data": {"kind": kind}}).config


NAMED = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}


@pytest.mark.parametrize(
    ("causal", "tokens", "ids"),
    [
        pytest.param(False, NAMED | {"mask_token": "[MASK]"}, {}, id="an encoder"),
        # By its padding readers find the last token of each of several rows.
        pytest.param(True, NAMED, {"pad_token_id": 257}, id="a decoder"),
    ],
)
def test_a_tokenizer_of_the_run_is_named_and_framed(causal, tokens, ids):
    found = exported_texts({}, own(), None, model=MODEL, config=config(causal=causal))
    assert (found.tokens, found.ids) == (tokens, ids)
    files = companions(ids, {}, own().to_json(), found)
    assert Tokenizer.from_str(str(files["tokenizer.json"])).encode("o").tokens == ["[CLS]", "o", "[SEP]"]
    settings = json.loads(files["tokenizer_config.json"])
    assert {name: settings[name] for name in tokens} == tokens


ENDS = {"tokenizer_config.json": json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"}), "spiece.model": b"\xff"}


@pytest.mark.parametrize(
    ("theirs", "data", "is_framed"),
    [
        pytest.param(words("<pad>", "<eos>"), "labelled_text", True, id="its tokenizer"),
        pytest.param(words("<pad>", "<eos>", "<more>"), "labelled_text", False, id="another tokenizer"),
        pytest.param(words("<pad>", "<eos>"), "text", False, id="running text"),
    ],
)
def test_a_published_tokenizer_without_the_frame_of_the_run_gets_it(theirs, data, is_framed):
    tokenizer = words("<pad>", "<eos>")
    start = Origin({}, {"tokenizer.json": theirs.to_json().encode(), **ENDS}, {})
    made = config(kind=data) if data == "labelled_text" else load_config({"data": {"kind": data}}).config
    found = exported_texts({}, tokenizer, start, model=MODEL, config=made)
    if not is_framed:
        assert found == Texts()
        return
    files = companions({}, start.files, None, found)
    assert Tokenizer.from_str(str(files["tokenizer.json"])).encode("one two").tokens == ["one", "two", "<eos>"]


@pytest.mark.long
def test_a_folder_reads_the_rows_of_its_run(tmp_path):
    lines = [{"text": f"{name} of one", "label": name} for name in ("ham", "mail", "spam") for _ in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    published = Path(__file__).parent / "published" / "bert_sequence"
    shutil.copytree(published, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text(words("[PAD]", "[CLS]", "[SEP]").to_json())
    made = {
        "task": "classification",
        "model": {"from": str(tmp_path / "base")},
        "data": {"kind": "labelled_text", "path": str(tmp_path / "rows.jsonl"), "sequence_length": 16},
        "train": {"steps": 1, "global_batch_size": 8},
        "logging": {"report": False},
    }
    run_config(load_config(made), run_dir=tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    run = jt.open_run(tmp_path / "run")
    inputs = [run.data.train[i]["inputs"] for i in range(len(run.data.train))]
    trained = {tuple(one["tokens"][one["segments"] > 0].tolist()) for one in inputs}
    read = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert trained == {tuple(read.encode(one["text"]).ids) for one in lines}
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tuple(said["id2label"].values()) == run.classes == ("ham", "mail", "spam")
    found = predict_published(tmp_path / "out", tmp_path / "rows.jsonl", probabilities=True)
    expected = run.predict_file(tmp_path / "rows.jsonl", probabilities=True)
    # One float32 program reads rows of another length than the other.
    for one, other in zip(found, expected, strict=True):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)
