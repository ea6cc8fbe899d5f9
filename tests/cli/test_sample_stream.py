"""`jaxtrain sample`: text as it is written, log-probabilities, special tokens, and readers that leave."""

import json
import os
import sys

import pytest

from jaxtrain.cli import main
from jaxtrain.commands.sample import _is_watched
from jaxtrain.commands.sample_print import print_stream
from jaxtrain.inference.text_stream import TokenTexts
from jaxtrain.inference.written import TokenScore, Written
from jaxtrain.run.open_run import open_run

WORDS = ("-p", "ab", "-p", "The class", "-n", "6", "--temperature", "0")


def sample(cli, run, *words):
    answer = cli("sample", str(run), *words)
    assert (answer.code, answer.err) == (0, "")
    return answer.out


@pytest.mark.long
def test_a_stream_and_a_whole_text_are_the_same(cli, text_run):
    """One program writes both, so that not even rounding differs; `run.sample` is a third way to the same text."""
    whole = sample(cli, text_run, *WORDS)
    assert sample(cli, text_run, *WORDS, "--stream") == whole
    texts = open_run(text_run).sample(["ab", "The class"], new_tokens=6, temperature=0)
    assert "\n\n".join(texts) + "\n" == whole
    lines = sample(cli, text_run, *WORDS, "--json", "--logprobs", "2").splitlines()
    byte = TokenTexts(open_run(text_run).tokenizer)  # of a byte that is no character: U+FFFD
    for text, line in zip(texts, map(json.loads, lines), strict=True):
        assert line["text"] == text
        assert len(line["logprobs"]) == 6
        for one in line["logprobs"]:
            # Greedy: the chosen token is the likeliest.
            first, second = one["top_logprobs"]
            assert {"token": one["token"], "logprob": one["logprob"]} == first
            assert 0 >= first["logprob"] >= second["logprob"]
            assert one["token"] in {byte(i) for i in range(256)}


STREAMS = {
    "one text": ((("0", "a"), ("0", "b")), "ab\n"),
    "the second waits for the first": ((("0", "a"), ("1", "x"), ("0", "b"), ("1", "y")), "ab\n\nxy\n"),
    "the second ended long ago": ((("1", "x"), ("1", ""), ("0", "a"), ("0", "")), "a\n\nx\n"),
    "nothing was written": ((("0", ""), ("1", "")), "\n\n\n"),
}


@pytest.mark.parametrize(("pieces", "printed"), STREAMS.values(), ids=STREAMS)
def test_texts_of_a_batch_are_printed_one_after_another(capsys, pieces, printed):
    rows = sorted({row for row, _ in pieces})
    last = {row: max(i for i, piece in enumerate(pieces) if piece[0] == row) for row in rows}
    made = [Written(int(row), text, ended=last[row] == i) for i, (row, text) in enumerate(pieces)]
    print_stream(made, len(rows), scored=False)
    assert capsys.readouterr().out == printed


def test_scores_follow_their_text(capsys):
    score = TokenScore(" b", -0.5, ((" b", -0.5), ("c", -1.25)))
    print_stream([Written(0, "a"), Written(0, " b", (score,), True)], 1, scored=True)
    assert capsys.readouterr().out.splitlines() == [
        "a b", "logprob  token  likeliest", '-0.5000  " b"   " b" -0.5000  "c" -1.2500',
    ]  # fmt: skip


def interrupted(*_):
    yield Written(0, "half a li")
    raise KeyboardInterrupt


def endless(*_):
    while True:
        yield Written(0, "more and more")


def test_ctrl_c_ends_the_line(cli, text_run, monkeypatch):
    monkeypatch.setattr("jaxtrain.commands.sample.write_continuations", interrupted)
    answer = cli("sample", str(text_run), "-p", "a", "--stream")
    assert (answer.code, answer.out, answer.err) == (130, "half a li\n", "")


def test_a_reader_that_leaves_ends_the_stream_quietly(text_run, monkeypatch, capfd):
    monkeypatch.setattr("jaxtrain.commands.sample.write_continuations", endless)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as left:
        monkeypatch.setattr(sys, "stdout", left)
        assert main(["sample", str(text_run), "-p", "a", "--stream"]) == 141
    assert capfd.readouterr().err == ""


def test_a_terminal_gets_text_as_it_is_written(cli, text_run, monkeypatch):
    pieces = []
    monkeypatch.setattr("jaxtrain.commands.sample.print_stream", lambda written, count, scored: pieces.extend(written))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli("sample", str(text_run), "-p", "ab", "-n", "6", "--temperature", "0").code == 0
    # The prompt, and a piece per token at most: one program step may end no character.
    assert pieces[0].text == "ab"
    assert len(pieces) >= 6


def test_several_processes_take_pieces_of_one_length_whoever_has_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert _is_watched()
    monkeypatch.setattr("jax.process_count", lambda: 2)
    assert not _is_watched()
    monkeypatch.setattr("sys.stdout", None)  # closed
    assert not _is_watched()


WRONG = {
    "objects in pieces": (("--json", "--stream"), "leave one out"),
    "beams in pieces": (("--beams", "2", "--stream"), "--beams finds whole texts"),
    "beams with scores": (("--beams", "2", "--logprobs"), "--beams finds whole texts"),
    "a hundred alternatives": (("--logprobs", "100"), "at most 20"),
    "half an alternative": (("--logprobs", "0.5"), "--logprobs"),
}


@pytest.mark.parametrize(("words", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_go_together_is_one_line(cli, text_run, words, said):
    answer = cli("sample", str(text_run), "-p", "a", *words)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert answer.err.count("\n") == 1
