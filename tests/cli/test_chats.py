"""Chats on the command line: rows shown, a run, answers to questions."""

import json

import pytest

from jaxtrain.cli import main

CHAT = ["data.kind=chat", "data.path=rows.jsonl", "data.tokenizer.kind=byte", "data.sequence_length=96"]
SIZES = [
    *("model.num_layers=1", "model.embed_dim=32", "model.num_heads=2", "model.mlp_dim=64"),
    *("model.max_sequence_length=128", "optimizer.schedule.warmup_steps=1", "optimizer.learning_rate=0.03"),
    *("train.steps=4", "train.global_batch_size=8", "evaluation.max_batches=1", "checkpoint.every=4"),
    *("evaluation.sample_prompt=What is 1?", "evaluation.sample_tokens=4", "logging.tensorboard=false"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    rows = [{"prompt": f"What is {i}?", "completion": f"It is <{i}>."} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{**row, "chosen": row["completion"], "rejected": "No."} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return folder


@pytest.fixture(scope="module")
def chat_run(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "quickstart", *CHAT, *SIZES, "--run-dir", "run"]) == 0
    return folder / "run"


def test_rows_are_shown_with_what_has_a_loss(cli, folder, monkeypatch):
    monkeypatch.chdir(folder)
    answer = cli("data", "show", "quickstart", *CHAT, "--rows", "1")
    assert answer.code == 0
    assert "rows.jsonl: 20 conversations, 820 tokens, 28% of them trained" in answer.out
    assert "tokens between [[ and ]] have a loss" in answer.out
    # The rows of the file have 40 or 42 tokens, of which the last is a target alone.
    assert "row 0 of 10: 96 positions\n-- conversation 1: 40 tokens, 11 with" in answer.out
    assert "<|im_start|>assistant\n[[It is <" in answer.out


@pytest.mark.long
def test_a_run_keeps_its_template(cli, chat_run):
    """The data and its template are gone when the run is opened: run.json has what an answer takes."""
    info = json.loads((chat_run / "run.json").read_text())
    assert info["data"]["reading"]["label"] == "chatml (built in)"
    evaluated = cli("eval", str(chat_run), "--json", f"data.path={chat_run.parent / 'rows.jsonl'}")
    assert evaluated.code == 0
    assert json.loads(evaluated.out)["eval_loss"] == pytest.approx(info["final"]["eval_loss"], rel=1e-5)
    greedy = ("--temperature", "0", "-n", "6")
    answer = cli("sample", str(chat_run), "--chat", "What is 1?", "--chat", "Why?", *greedy, "--json")
    assert (answer.code, answer.err) == (0, "")
    found = [json.loads(line) for line in answer.out.splitlines()]
    assert [one["prompt"] for one in found] == ["What is 1?", "Why?"]
    alone = cli("sample", str(chat_run), "--chat", "Why?", *greedy)
    assert alone.out == found[1]["text"] + "\n"
    assert (chat_run / "sample.txt").read_text().startswith("What is 1?\n\n")
