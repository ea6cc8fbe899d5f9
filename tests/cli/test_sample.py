"""`jaxtrain sample`: equal to full forward passes, written as it comes, from runs and from published folders."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.commands.sample import print_stream
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.inference.decoding import generate_ids
from jaxtrain.inference.generate import Written
from jaxtrain.run.open_run import open_run

GREEDY = ("--temperature", "0")
PUBLISHED = Path(__file__).resolve().parents[1] / "interop" / "published"


def sample(cli, run, *words):
    answer = cli("sample", str(run), *words)
    assert (answer.code, answer.err) == (0, "")
    return answer.out


@pytest.mark.long
def test_greedy_is_the_argmax_of_full_forward_passes(cli, text_run, monkeypatch):
    """The KV cache against the model as it trains, token by token; the prompt comes from standard input."""
    prompt, count = "The\nclass", 12
    run = open_run(text_run)
    ids = list(run.tokenizer.encode(prompt))

    @jax.jit
    def forward(params, tokens):
        return run.sharded_model.apply(params, run.model_state, tokens, key=None, train=False)[0]

    for _ in range(count):
        # No cache; the padding stands behind the text, where causal attention does not look.
        padded = np.zeros((1, run.config.model.max_sequence_length), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.argmax(np.asarray(forward(run.params, padded))[0, len(ids) - 1])))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{prompt}\n"))
    assert sample(cli, text_run, "-n", str(count), *GREEDY) == run.tokenizer.decode(ids) + "\n"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    answer = cli("sample", str(text_run))
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "jaxtrain sample: no prompt; give -p TEXT, or text on standard input\n"


@pytest.mark.long
def test_the_seed_decides_and_the_data_is_not_opened(cli, text_run, tmp_path):
    words = ("-p", "a", "-n", "20", "--temperature", "1")
    info = json.loads((text_run / "run.json").read_text())
    info["config"]["data"]["path"] = "/gone/text.txt"
    (tmp_path / "run.json").write_text(json.dumps(info))
    for name in ("checkpoints", "tokenizer.json"):
        (tmp_path / name).symlink_to(text_run / name)
    first = sample(cli, text_run, *words, "--seed", "1")
    assert first == sample(cli, tmp_path, *words, "--seed", "1")
    assert first != sample(cli, text_run, *words, "--seed", "2")
    (tmp_path / "tokenizer.json").unlink()
    answer = cli("sample", str(tmp_path), "-p", "a")
    assert answer.code == 3
    assert "tokenizer.json is gone" in answer.err


@pytest.mark.long
def test_a_text_fills_the_positions_or_ends_before_a_stop(cli, text_run):
    whole = sample(cli, text_run, "-p", "ab", "--top-k", "1").removesuffix("\n")
    # Bytes that are no text are one sign each or fewer, so the count is an upper limit.
    assert len("ab") < len(whole) <= open_run(text_run).config.model.max_sequence_length
    stop = whole[4:6]
    stopped = sample(cli, text_run, "-p", "ab", *GREEDY, "--stop", "never there", "--stop", stop)
    assert stopped == whole[: whole.index(stop, 2)] + "\n"


@pytest.mark.long
def test_a_stream_and_a_whole_text_are_the_same(cli, text_run):
    """One program writes both, so that not even rounding differs; `run.sample` is a third way to the same text."""
    words = ("-p", "ab", "-p", "The class", "-n", "6", "--temperature", "0")
    whole = sample(cli, text_run, *words)
    assert sample(cli, text_run, *words, "--stream") == whole
    texts = open_run(text_run).sample(["ab", "The class"], new_tokens=6, temperature=0)
    assert "\n\n".join(texts) + "\n" == whole
    assert sample(cli, text_run, *words[:2], *words[4:]) == texts[0] + "\n"
    lines = sample(cli, text_run, *words, "--json").splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


STREAMS = {
    "the second waits for the first": ((("0", "a"), ("1", "x"), ("0", "b"), ("1", "y")), "ab\n\nxy\n"),
    "the second ended long ago": ((("1", "x"), ("1", ""), ("0", "a"), ("0", "")), "a\n\nx\n"),
}


@pytest.mark.parametrize(("pieces", "printed"), STREAMS.values(), ids=STREAMS)
def test_texts_of_a_batch_are_printed_one_after_another(capsys, pieces, printed):
    rows = sorted({row for row, _ in pieces})
    last = {row: max(i for i, piece in enumerate(pieces) if piece[0] == row) for row in rows}
    made = [Written(int(row), text, ended=last[row] == i) for i, (row, text) in enumerate(pieces)]
    print_stream(made, len(rows))
    assert capsys.readouterr().out == printed


def interrupted(*_, **__):
    yield Written(0, "half a li")
    raise KeyboardInterrupt


def endless(*_, **__):
    while True:
        yield Written(0, "more and more")


def test_ctrl_c_ends_the_line(cli, text_run, monkeypatch):
    monkeypatch.setattr("jaxtrain.commands.sample.write", interrupted)
    answer = cli("sample", str(text_run), "-p", "a", "--stream")
    assert (answer.code, answer.out, answer.err) == (130, "half a li\n", "")


def test_a_reader_that_leaves_ends_the_stream_quietly(text_run, monkeypatch, capfd):
    monkeypatch.setattr("jaxtrain.commands.sample.write", endless)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as left:
        monkeypatch.setattr(sys, "stdout", left)
        assert main(["sample", str(text_run), "-p", "a", "--stream"]) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.long
def test_a_prompt_of_a_published_folder_begins_as_its_tokenizer_says(cli, tmp_path):
    folder = shutil.copytree(PUBLISHED / "llama", tmp_path / "llama")
    vocab = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 40)}}
    made = Tokenizer(models.WordLevel(vocab, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue] a setter
    made.add_special_tokens(["<pad>", "<s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore[reportAttributeAccessIssue] a setter
    made.save(str(folder / "tokenizer.json"))
    base = jt.load_pretrained(folder)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    sharded = jt.shard_model(base.model, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    new = generate_ids(
        sharded, base.params, [np.array([1, 5, 6, 7], np.int32)], new_tokens=6, sampling=jt.Sampling(temperature=0)
    )[0]
    # Special tokens (ids 0 and 1) that the model writes are not shown.
    shown = [5, 6, 7, *(token for token in new.tolist() if token > 1)]
    words = ("-p", "w5 w6 w7", "-n", "6", *GREEDY, "--emulate", "8")
    assert cli("sample", str(folder), *words).out == tokenizer.decode(shown) + "\n"
    everything = cli("sample", str(folder), *words, "--special-tokens").out
    assert everything == tokenizer.decode([5, 6, 7, *new.tolist()]) + "\n"
    for words, said in ((("-p", "a", "--step", "1"), "--step 1 is for"), (("--chat", "Why?"), "has no chat template")):
        answer = cli("sample", str(folder), *words)
        assert (answer.code, answer.out) == (2, "")
        assert said in answer.err
