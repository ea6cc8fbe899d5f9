"""`jaxtrain eval`: the numbers of the run again, on any layout, with other held-out rows where asked."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxtrain as jt
from jaxtrain.cli import main
from jaxtrain.config.data import TextData, TokenizerConfig
from jaxtrain.data import prepare_tokens
from jaxtrain.run.open_run import open_run
from jaxtrain.run.saved_config import saved_config


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


@pytest.mark.parametrize("layout", [LAYOUTS[0], *(pytest.param(one, marks=pytest.mark.long) for one in LAYOUTS[1:])])
def test_repeats_the_evaluation_of_the_run(cli, any_run, layout):
    final = json.loads((any_run / "run.json").read_text())["final"]
    answer = evaluate(cli, any_run, *layout.split())
    metrics = {name: value for name, value in final.items() if name.startswith("eval_")}
    assert metrics
    assert {name: answer[name] for name in metrics} == pytest.approx(metrics, rel=TOLERANCE)


@pytest.mark.parametrize("format", ["int8", pytest.param("int8_dynamic", marks=pytest.mark.long)])
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
    assert opened.config.optimizer.ema_decay is not None
    assert opened.model_state
    assert opened.state.evaluation_params is opened.params
    assert opened.step == 2


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


CLASSES = """
name: classes
model: {kind: transformer, num_layers: 1, embed_dim: 16, num_heads: 2, max_sequence_length: 16}
data: {kind: text, tokenizer: {kind: byte}}
train: {steps: 1, global_batch_size: 8}
evaluation: {max_batches: 1}
logging: {report: true, tensorboard: false}
"""


def brier():
    """A task that no config describes: the squared distance of the probabilities from what came."""

    def loss(outputs, batch):
        wanted = jax.nn.one_hot(batch["targets"], outputs.shape[-1])
        error = jnp.square(jax.nn.softmax(outputs.astype(jnp.float32)) - wanted).sum(-1)
        weights = batch.get("weights", jnp.ones(error.shape))
        return jnp.sum(error * weights), jnp.sum(weights), {}

    return jt.Task("brier", loss, jt.language_modeling().batch_axes)


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    """A run whose task came from Python."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "classes.yaml").write_text(CLASSES)
    result = jt.run_config(folder / "classes.yaml", task=brier(), run_dir=folder / "run")
    return folder / "run", result


@pytest.mark.long
def test_a_task_from_python_is_not_replaced_by_that_of_the_config(cli, own_run):
    run_dir, result = own_run
    assert json.loads((run_dir / "run.json").read_text())["from_python"] == {
        "model": None,
        "task": "brier",
        "data": None,
        "optimizer": None,
    }
    answer = cli("eval", str(run_dir))
    assert (answer.code, answer.out) == (2, "")
    (line,) = [line for line in answer.err.splitlines() if line.startswith("jaxtrain: ")]
    assert "task (brier) from Python" in line
    assert f"jt.open_run({str(run_dir)!r}, task=...)" in line
    assert jt.open_run(run_dir, task=brier()).evaluate()["eval_loss"] == pytest.approx(
        result.metrics["eval_loss"], rel=TOLERANCE
    )
    again = jt.run_config(run_dir.parent / "classes.yaml", task=brier(), run_dir=run_dir)
    assert again.metrics["eval_loss"] == result.metrics["eval_loss"]
    # The text of a model does not depend on what it was compared with.
    assert cli("sample", str(run_dir), "-p", "a", "-n", "2").code == 0
    report = (run_dir / "report.html").read_text()
    assert "perplexity" not in report
    assert "nats per token" not in report


def test_data_from_python_is_not_replaced_by_that_of_the_config(cli, text_run, tmp_path):
    info = json.loads((text_run / "run.json").read_text())
    assert info["from_python"] == {"model": None, "task": None, "data": None, "optimizer": None}
    info["from_python"]["data"] = "my rows"
    (tmp_path / "run.json").write_text(json.dumps(info))
    for name in ("checkpoints", "tokenizer.json"):
        (tmp_path / name).symlink_to(text_run / name)
    answer = cli("eval", str(tmp_path))
    assert answer.code == 2
    assert "data (my rows) from Python" in answer.err
    assert "or give other data with data.kind=" in answer.err
    (tmp_path / "other.txt").write_text("Another text. " * 200)
    assert evaluate(cli, tmp_path, f"data.path={tmp_path / 'other.txt'}", "data.validation_fraction=0.5")["rows"] > 0


def test_a_model_from_python_has_no_config(cli, text_run, tmp_path):
    info = json.loads((text_run / "run.json").read_text())
    info["from_python"]["model"] = "Mine"
    (tmp_path / "run.json").write_text(json.dumps(info))
    (tmp_path / "tokenizer.json").symlink_to(text_run / "tokenizer.json")
    for words in (("eval", str(tmp_path)), ("sample", str(tmp_path), "-p", "a")):
        answer = cli(*words)
        assert answer.code == 2
        assert "model (Mine) from Python" in answer.err


@pytest.fixture(scope="module")
def table_run(tmp_path_factory):
    """A finished run of a small network on a table of three classes that one column tells apart."""
    folder = tmp_path_factory.mktemp("table")
    write_table(folder / "a.csv", ["ant", "bee", "cat"])
    (folder / "a.yaml").write_text(
        "task: classification\n"
        "model: {kind: mlp, hidden_dims: [16]}\n"
        f"data: {{kind: table, path: {folder / 'a.csv'}}}\n"
        "optimizer: {kind: adamw, learning_rate: 0.05}\n"
        "train: {steps: 60, global_batch_size: 16}\n"
        "logging: {report: false, tensorboard: false}\n"
    )
    assert main(["train", str(folder / "a.yaml"), "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


def write_table(path, names):
    places = {"ant": 10, "bee": 20, "cat": 30}
    rows = [(names[i % len(names)], i / 100) for i in range(90)]
    path.write_text("x,z,y\n" + "".join(f"{places[name] + noise},{noise},{name}\n" for name, noise in rows))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["bee", "cat"], id="a class is missing", marks=pytest.mark.long),
        pytest.param(["ant"] * 9 + ["cat"], id="other shares"),
    ],
)
def test_another_table_is_read_as_the_run_read_its_own(cli, table_run, tmp_path, names):
    write_table(tmp_path / "b.csv", names)
    overrides = [f"data.path={tmp_path / 'b.csv'}", "data.validation_fraction=0.5"]
    assert evaluate(cli, table_run, *overrides)["eval_accuracy"] == 1
    info = json.loads((table_run / "run.json").read_text())
    del info["data"]["reading"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text(json.dumps(info))
    (tmp_path / "old" / "checkpoints").symlink_to(table_run / "checkpoints")
    assert "does not say how" not in cli("eval", str(tmp_path / "old")).err
    if len(set(names)) == 3:
        assert "run.json does not say how" in cli("eval", str(tmp_path / "old"), *overrides).err


def test_shards_of_another_tokenizer_are_refused(cli, text_run, tmp_path):
    (tmp_path / "a.txt").write_text("some words of a text " * 300)
    for kind in ("byte", "bpe"):
        settings = TokenizerConfig(kind=kind, **({"vocab_size": 257} if kind == "bpe" else {}))
        prepare_tokens(TextData(path=str(tmp_path / "a.txt"), tokenizer=settings), tmp_path / kind)
    overrides = ["data.validation_fraction=0.3", "data.kind=tokens"]
    assert evaluate(cli, text_run, *overrides, f"data.path={tmp_path / 'byte'}")["eval_loss"] > 0
    answer = cli("eval", str(text_run), *overrides, f"data.path={tmp_path / 'bpe'}")
    assert answer.code == 3
    assert "made with another tokenizer than the run's" in answer.err
