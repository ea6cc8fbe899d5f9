"""`jaxtrain eval`: the numbers of the run again, on any layout, with other held-out rows where asked."""

import json

import pytest

from jaxtrain.inference.open import open_run, saved_config


@pytest.fixture(params=["text_run", "image_run"])
def any_run(request):
    return request.getfixturevalue(request.param)


def evaluate(cli, *words):
    answer = cli("eval", *map(str, words), "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


# The summation order of another layout moves a mean of float32 losses by a few units in the seventh digit.
TOLERANCE = 1e-5
LAYOUTS = [
    "parallel.data=8",
    pytest.param("parallel.fsdp=8 parallel.max_replicated_fraction=1", marks=pytest.mark.long),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeats_the_evaluation_of_the_run(cli, any_run, layout):
    final = json.loads((any_run / "run.json").read_text())["final"]
    answer = evaluate(cli, any_run, *layout.split())
    metrics = {name: value for name, value in final.items() if name.startswith("eval_")}
    assert metrics
    assert {name: answer[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE)


@pytest.mark.long
def test_quantized_layers_lose_little(cli, text_run):
    plain = evaluate(cli, text_run)["eval_loss"]
    answer = cli("eval", str(text_run), "--quantize", "int8")
    header, row = answer.out.splitlines()
    assert header.split() == ["step", "rows", "eval_loss", "eval_perplexity"]
    step, rows, loss, _ = row.split()
    assert (step, rows) == ("4", "16")
    assert plain != float(loss)
    assert float(loss) == pytest.approx(plain, rel=0.01)  # as docs/precision.md promises


def test_another_step_has_another_loss_and_all_rows_are_counted_once(cli, text_run):
    answer = evaluate(cli, text_run, "--step", "2", "evaluation.max_batches=null")
    assert (answer["step"], answer["rows"]) == (2, len(open_run(text_run).data.validation))
    final = json.loads((text_run / "run.json").read_text())["final"]
    assert answer["eval_loss"] > final["eval_loss"]


def copied(text_run, folder, change):
    """The run with another run.json."""
    info = json.loads((text_run / "run.json").read_text())
    change(info)
    (folder / "run.json").write_text(json.dumps(info))
    for name in ("checkpoints", "tokenizer.json"):
        (folder / name).symlink_to(text_run / name)
    return folder


def test_data_from_python_is_not_replaced_by_that_of_the_config(cli, text_run, tmp_path):
    run = copied(text_run, tmp_path, lambda info: info["from_python"].update(data="my rows"))
    answer = cli("eval", str(run))
    assert answer.code == 2
    assert "data (my rows) from Python" in answer.err
    assert "or give other data with data.kind=" in answer.err
    (tmp_path / "other.txt").write_text("Another text. " * 200)
    overrides = [f"data.path={tmp_path / 'other.txt'}", "data.validation_fraction=0.5"]
    assert evaluate(cli, run, *overrides)["rows"] > 0
    data = saved_config(run, overrides=overrides).config.data
    assert (data.tokenizer.kind, data.tokenizer.path) == ("file", str(run / "tokenizer.json"))
    assert saved_config(run, overrides=["data.tokenizer.kind=byte"]).config.data.tokenizer.kind == "byte"
