"""`jaxtrain sample`: deterministic, batched, and equal to what full forward passes give."""

import io
import json
import sys

import jax
import numpy as np
import pytest

from jaxtrain.run.open_run import open_run

GREEDY = ("--temperature", "0")


def sample(cli, run, *words):
    answer = cli("sample", str(run), *words)
    assert (answer.code, answer.err) == (0, "")
    return answer.out


def test_greedy_is_the_argmax_of_full_forward_passes(cli, text_run):
    """The KV cache against the model as it trains, token by token."""
    prompt, count = "The class", 12
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
    assert sample(cli, text_run, "-p", prompt, "-n", str(count), *GREEDY) == run.tokenizer.decode(ids) + "\n"


def test_seed_decides(cli, text_run):
    words = ("-p", "a", "-n", "20", "--temperature", "1")
    first, again, other = (sample(cli, text_run, *words, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


@pytest.mark.long
def test_a_batch_gives_each_prompt_its_own_text(cli, text_run):
    prompts = ["a", "The class statement"]
    single = [sample(cli, text_run, "-p", prompt, "-n", "8", *GREEDY) for prompt in prompts]
    words = [word for prompt in prompts for word in ("-p", prompt)]
    assert sample(cli, text_run, *words, "-n", "8", *GREEDY) == "\n".join(single)
    lines = sample(cli, text_run, *words, "-n", "8", *GREEDY, "--json").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == prompts
    assert [json.loads(line)["text"] + "\n" for line in lines] == single


LIMITS = [("--top-k", "1"), ("--top-p", "1e-6"), ("--min-p", "1"), ("--beams", "1")]


@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(limit, id=limit[0].strip("-"), marks=() if limit[0] == "--top-p" else pytest.mark.long)
        for limit in LIMITS
    ],
)
def test_limits_down_to_one_token_are_greedy(cli, text_run, limit):
    words = ("-p", "ab", "-n", "8")
    assert sample(cli, text_run, *words, "--temperature", "1", *limit) == sample(cli, text_run, *words, *GREEDY)


def test_a_text_ends_before_a_stop(cli, text_run):
    words = ("-p", "ab", "-n", "8", *GREEDY)
    whole = sample(cli, text_run, *words).removesuffix("\n")
    stop = whole[4:6]
    wanted = whole[: whole.index(stop, 2)]
    assert sample(cli, text_run, *words, "--stop", "never there", "--stop", stop) == wanted + "\n"


def test_beams_draw_nothing(cli, text_run):
    answer = cli("sample", str(text_run), "-p", "ab", "--beams", "2", "--top-k", "3")
    assert answer.code == 2
    assert "leave those or beams out" in answer.err


def test_other_checkpoint_other_text(cli, text_run):
    words = ("-p", "ab", "-n", "20", "--temperature", "1")
    assert sample(cli, text_run, *words, "--step", "2") != sample(cli, text_run, *words, "--step", "4")


def test_fills_the_positions_of_the_model_by_default(cli, text_run):
    run = open_run(text_run)
    text = sample(cli, text_run, "-p", "ab", "--top-k", "1")
    # Bytes that are no text are one sign each or fewer, so the count is an upper limit.
    assert len("ab") < len(text) - 1 <= run.config.model.max_sequence_length


def test_prompt_comes_from_standard_input(cli, text_run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert sample(cli, text_run, "-n", "3", *GREEDY).startswith("two\nlines")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    answer = cli("sample", str(text_run))
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "jaxtrain sample: no prompt; give -p TEXT, or text on standard input\n"


def test_does_not_open_the_data(cli, text_run, tmp_path):
    info = json.loads((text_run / "run.json").read_text())
    info["config"]["data"]["path"] = "/gone/text.txt"
    (tmp_path / "run.json").write_text(json.dumps(info))
    for name in ("checkpoints", "tokenizer.json"):
        (tmp_path / name).symlink_to(text_run / name)
    words = ("-p", "a", "-n", "4", *GREEDY)
    assert sample(cli, tmp_path, *words) == sample(cli, text_run, *words)
    (tmp_path / "tokenizer.json").unlink()
    answer = cli("sample", str(tmp_path), "-p", "a")
    assert answer.code == 3
    assert "tokenizer.json is gone" in answer.err


@pytest.mark.long
def test_quantized_layers_write_text(cli, text_run):
    """The likeliest bytes of a model whose weights moved by half a percent: mostly the same ones."""
    words = ("sample", str(text_run), "-p", "The ", "-n", "8", "--temperature", "0")
    plain, quantized = cli(*words), cli(*words, "--quantize", "int8")
    assert quantized.code == 0, quantized.err
    assert "int8: linear layers of " in quantized.err
    assert len(quantized.out) == len(plain.out)
    assert quantized.out.startswith("The ")
