"""`jaxtrain sample`: equal to full forward passes, written as it comes, from runs and from published folders."""

import io
import json
import sys

import jax
import numpy as np
import pytest

from jaxtrain.inference.open import open_run

GREEDY = ("--temperature", "0")


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
    assert answer.code == 2
    assert "has no tokenizer.json" in answer.err


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
