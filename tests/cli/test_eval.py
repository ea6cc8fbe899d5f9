"""`jaxtrain eval`: the numbers of the run again, on any layout, with other held-out rows where asked."""

import json

import pytest

from jaxtrain.train.open_run import open_run, saved_config


@pytest.fixture(params=["text_run", "image_run"])
def any_run(request):
    return request.getfixturevalue(request.param)


def evaluate(cli, *words):
    answer = cli("eval", *map(str, words), "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


# The summation order of another layout moves a mean of float32 losses by a few units in the seventh digit.
TOLERANCE = 1e-5
LAYOUTS = ["parallel.data=8", "parallel.fsdp=8 parallel.max_replicated_fraction=1", "parallel.tensor=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeats_the_evaluation_of_the_run(cli, any_run, layout):
    final = json.loads((any_run / "run.json").read_text())["final"]
    answer = evaluate(cli, any_run, *layout.split())
    metrics = {name: value for name, value in final.items() if name.startswith("eval_")}
    assert metrics
    assert {name: answer[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE)


@pytest.mark.parametrize("format", ["int8", "int8_dynamic"])
def test_quantized_layers_lose_little(cli, text_run, format):
    plain, quantized = evaluate(cli, text_run), evaluate(cli, text_run, "--quantize", format)
    assert plain["eval_loss"] != quantized["eval_loss"]
    assert quantized["eval_loss"] == pytest.approx(plain["eval_loss"], rel=0.01)  # as docs/precision.md promises
    shown = cli("eval", str(text_run), "--quantize", format).err
    assert f"{format}: linear layers of " in shown


def test_quantized_layers_that_are_not_there(cli, image_run):
    answer = cli("eval", str(image_run), "--quantize", "int8")
    assert answer.code == 2
    assert "int8 is for linear layers" in answer.err
    assert len(answer.err.splitlines()) <= 3, answer.err


def test_reads_the_moving_average_and_the_statistics(image_run):
    opened = open_run(image_run)
    assert opened.step.abstract_state.ema is not None
    assert opened.model_state
    assert opened.state.evaluation_params is opened.params
    assert opened.checkpoint_step == 2


def test_another_step_is_another_loss(cli, text_run):
    first, last = (evaluate(cli, text_run, "--step", step) for step in (2, 4))
    assert (first["step"], last["step"]) == (2, 4)
    assert first["eval_loss"] > last["eval_loss"]


def test_all_rows_are_counted_once(cli, text_run):
    answer = evaluate(cli, text_run, "evaluation.max_batches=null")
    assert answer["rows"] == len(open_run(text_run).data.validation)


def test_other_text_is_read_with_the_tokenizer_of_the_run(cli, text_run, tmp_path):
    (tmp_path / "other.txt").write_text("Another text. " * 200)
    overrides = [f"data.path={tmp_path / 'other.txt'}", "data.validation_fraction=0.5"]
    data = saved_config(text_run, overrides=overrides).config.data
    assert (data.tokenizer.kind, data.tokenizer.path) == ("file", str(text_run / "tokenizer.json"))
    assert evaluate(cli, text_run, *overrides)["eval_loss"] > 0


def test_changed_data_is_remarked(cli, text_run, tmp_path):
    info = json.loads((text_run / "run.json").read_text())
    info["data"]["fingerprint"]["tokens_sha256"] = "other"
    (tmp_path / "run.json").write_text(json.dumps(info))
    for name in ("checkpoints", "tokenizer.json"):
        (tmp_path / name).symlink_to(text_run / name)
    answer = cli("eval", str(tmp_path))
    assert answer.code == 0
    assert "the data has changed since the run (tokens_sha256)" in answer.err


def test_prints_a_table(cli, text_run):
    header, row = cli("eval", str(text_run)).out.splitlines()
    assert header.split() == ["step", "rows", "eval_loss", "eval_perplexity"]
    assert row.split()[:2] == ["4", "16"]
