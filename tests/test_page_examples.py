"""What the pages in docs/ print as Python runs as printed, and does what the page says.

The README's examples, which do more, have a file of their own.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import tokenizers
import tokenizers.models

import jaxtrain as jt

Names = dict[str, Any]

FOLDER = Path(__file__).resolve().parent.parent / "docs"
# Page, words of the example: whole runs and compiled transformers, several seconds each. Plain pytest proves what they
# show by the tests of those parts.
LONG = (
    ("adapters.md", "save_pretrained("),
    ("finetuning.md", "("),
    ("coming_from.md", "make_train_step("),
    ("engine.md", "jt.Engine("),
    ("internals.md", "step.compile("),
    ("parallelism.md", "from_stages("),
    ("pretrained.md", ""),
    ("precision.md", "quantize("),
    ("preferences.md", "jt.dpo("),
    ("runs.md", "rate"),
    ("runs.md", "run.plot("),
    ("runs.md", "run.predict("),
    ("start.md", "from_nnx("),
    ("training.md", "from_nnx("),
    ("training.md", "EarlyStopping("),
)


def is_long(page: str, text: str) -> bool:
    return any(page == name and words in text for name, words in LONG)


EXAMPLES = [
    pytest.param(page.name, text, id=f"{page.stem}-{index}", marks=pytest.mark.long if is_long(page.name, text) else ())
    for page in sorted(FOLDER.glob("*.md"))
    for index, text in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


def checkpoints_before(folder: Path) -> Names:
    params = {"kernel": jax.numpy.arange(8.0)}
    state = {"params": params, "step": jax.numpy.int32(3)}
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    names = {"run_dir": folder, "step": 3, "fingerprint": {}, "state": state}
    return {**names, "abstract_state": abstract, "abstract_params": abstract["params"]}


def checkpoints_after(names: Names) -> None:
    for params in (names["state"]["params"], names["params"]):
        np.testing.assert_array_equal(params["kernel"], np.arange(8.0))


def own_loop_after(names: Names) -> None:
    """What the loop saved last is the state that it ends with."""
    assert names["checkpoints"].steps() == [10, 20]
    assert int(names["state"].step) == 20
    assert names["means"]["eval_accuracy"] > 0.7  # of four classes
    with jt.Checkpointer("runs/mine/checkpoints") as checkpoints:
        again = checkpoints.restore(names["step"].abstract_state)
    jax.tree.map(np.testing.assert_array_equal, again.params, names["state"].params)


def alternating_after(names: Names) -> None:
    """Both have taken their steps, and the generator has moved towards the real points."""
    assert (int(names["critic"].step), int(names["generator"].step)) == (400, 200)
    bias = names["generator"].params["generator"]["bias"]
    assert np.all((np.asarray(bias) > 0.5) & (np.asarray(bias) < 3.5))


def own_call_after(names: Names) -> None:
    assert int(names["state"].step) == 1
    assert np.isfinite(float(names["metrics"]["loss"]))


def axes_after(names: Names) -> None:
    P = jax.sharding.PartitionSpec
    up, down = P("fsdp", "tensor"), P("tensor", "fsdp")
    assert names["kernels"] == {"up/0": up, "up/1": up, "down/0": P(None, "fsdp"), "down/1": down}


def going_back_before(folder: Path) -> Names:
    checkpointer = jt.Checkpointer(folder)
    state = {"kernel": jax.numpy.arange(8.0)}
    for step in (10, 20):
        checkpointer.save(step, state, metadata={})
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    return {"checkpointer": checkpointer, "abstract_state": abstract}


def going_back_after(names: Names) -> None:
    names["checkpointer"].close()
    assert names["checkpointer"].steps() == [10, 15]


def given_parameters_before(folder: Path) -> Names:
    def apply(params: Any, model_state: Any, inputs: Any, *, key: Any, train: bool) -> Any:
        return inputs @ params["w"] + model_state["shift"], model_state

    model = jt.Model("shifted", lambda key: ({"w": jax.numpy.zeros((3, 2))}, {"shift": jax.numpy.zeros(2)}), apply)
    step = jt.make_train_step(model, jt.regression(), optax.sgd(0.1), mesh=jt.make_mesh(devices=jax.devices()[:1]))
    return {"step": step, "params": {"w": np.ones((3, 2), np.float32)}, "statistics": {"shift": np.ones(2, np.float32)}}


def given_parameters_after(names: Names) -> None:
    np.testing.assert_array_equal(names["state"].params["w"], np.ones((3, 2)))
    np.testing.assert_array_equal(names["state"].model_state["shift"], np.ones(2))


def own_parts(folder: Path) -> Names:
    def init(key: jax.Array) -> Any:
        return {"body": jax.random.normal(key, (3, 4)), "head": {"kernel": jax.numpy.zeros((4, 2))}}

    model = jt.from_functions(init, lambda params, inputs: inputs @ params["body"] @ params["head"]["kernel"])
    one = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(model, jt.regression(), optax.adam(0.1), mesh=one)
    batch = {"inputs": np.ones((8, 3), np.float32), "targets": np.ones((8, 2), np.float32)}
    return {"jax": jax, "jaxtrain": jt, "jt": jt, "optax": optax, "model": model, "task": jt.regression()} | {
        "step": step,
        "state": step.init(0),
        "batch": batch,
    }


def another_run_before(folder: Path) -> Names:
    names = own_parts(folder)
    state, _ = names["step"](names["state"], names["batch"])
    with jt.Checkpointer(folder / "runs" / "pretrained" / "checkpoints") as checkpointer:
        checkpointer.save(400, state, metadata={})

    def init(key: jax.Array) -> Any:
        return {"body": jax.random.normal(key, (3, 4)), "head": {"kernel": jax.numpy.zeros((4, 5))}}

    model = jt.from_functions(init, lambda params, inputs: inputs @ params["body"] @ params["head"]["kernel"])
    new_step = jt.make_train_step(model, jt.regression(), optax.adam(0.1), mesh=names["step"].mesh)
    return {**names, "new_step": new_step, "trained": np.array(state.params["body"])}


def another_run_after(names: Names) -> None:
    np.testing.assert_array_equal(names["state"].params["body"], names["trained"])
    assert names["state"].params["head"]["kernel"].shape == (4, 5)


def optimizer_after(names: Names) -> None:
    _, metrics = names["step"](names["step"].init(0), names["batch"])
    assert np.isfinite(metrics["loss"])


def frozen_after(names: Names) -> None:
    first, last = names["step"].init(0).params["body"], jt.open_run("runs/whole", model=names["model"]).params["body"]
    head = jt.open_run("runs/head", model=names["model"]).params
    np.testing.assert_array_equal(head["body"], first)
    assert np.abs(head["head"]["kernel"]).max() > 0
    assert np.abs(np.asarray(last) - np.asarray(first)).max() > 1e-3


def schedule_after(names: Names) -> None:
    assert float(names["metrics"]["learning_rate"]) == 0.0
    assert float(names["schedule"](20)) == pytest.approx(1e-2)


def data_before(folder: Path) -> Names:
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("It was the best of times, it was the worst of times.\n" * 2000)
    return {}


def data_after(names: Names) -> None:
    assert names["batch"]["inputs"].shape == (64, 256)
    assert isinstance(names["batch"]["inputs"], jax.Array)


def loss_after(names: Names) -> None:
    """The loss of the page is the shipped one, with the rows' weights and without."""
    random = np.random.default_rng(0)
    logits = jax.numpy.asarray(random.normal(size=(4, 8, 16)), jax.numpy.float32)
    batch: dict[str, Any] = {"targets": jax.numpy.asarray(random.integers(0, 16, (4, 8)), jax.numpy.int32)}
    weights = jax.numpy.asarray(random.random((4, 8)), jax.numpy.float32)
    found = []
    for shown in (batch, {**batch, "weights": weights}):
        own, shipped = (task.loss.train(logits, shown) for task in (names["task"], jt.language_modeling(z_loss=1e-4)))
        np.testing.assert_allclose(own[:2], shipped[:2], rtol=1e-6)
        found.append(float(own[1]))
    assert found == [32.0, pytest.approx(float(weights.sum()))]


def precision_before(folder: Path) -> Names:
    model = jt.build_model(
        {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 8},
        input_shape=(8,),
        vocab_size=256,
    )
    one = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(model, jt.language_modeling(), optax.identity(), mesh=one)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 9), dtype=np.int32)
    batches = [{"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}]
    return {"step": step, "state": step.init(0), "batches": batches}


def precision_after(names: Names) -> None:
    # An untrained model of 256 ids knows nothing, in 8 bits too.
    assert names["metrics"]["eval_loss"] == pytest.approx(np.log(256), rel=0.02)


def planner_after(names: Names) -> None:
    assert names["estimate"].memory.total_bytes > 2**33


def stages_after(names: Names) -> None:
    params, state = names["model"].init(jax.random.key(0))
    outputs, _ = names["model"].apply(params, state, np.ones((2, 8), np.float32), key=None, train=False)
    assert outputs.shape == (2, 10)


def sharded_after(names: Names) -> None:
    params = jax.device_put(
        names["model"].init(jax.random.key(0))[0],
        jax.tree.map(lambda leaf: leaf.sharding, names["sharded"].abstract_params),
    )
    assert names["forward"](params, np.ones((2, 8), np.float32)).shape == (2, 4)


def fit_after(names: Names) -> None:
    result = names["result"]
    assert (result.step, result.run_dir.name) == (58, "Net-1"), "461 rows, four times, in batches of 32"
    assert result.metrics["eval_accuracy"] > 0.3, "0.1 would be chance"


def callbacks_after(names: Names) -> None:
    result, norms = names["result"], names["norms"]
    # The weights go to ones, whose norm is that of 8 of them.
    assert norms[-1] == pytest.approx(8**0.5, rel=0.05)
    assert result.step < 200
    assert result.step % 10 == 0, "it stops at an evaluation"


def folds_after(names: Names) -> None:
    """As printed: each row is held out once."""
    assert sorted(np.concatenate(names["folds"])) == list(range(500))
    assert np.mean(names["scores"]) == pytest.approx(0.97, abs=0.01)


def two_runs_after(names: Names) -> None:
    losses = [jt.open_run(f"runs/rate-{rate}").metrics["eval_loss"] for rate in (0.001, 0.01)]
    assert losses == pytest.approx([0.118, 0.060], abs=0.02)


def questions_after(names: Names) -> None:
    assert jt.open_data({"kind": "chat", "path": "chats.parquet", "sequence_length": 64}).counts["conversations"] == 40


def histograms_after(names: Names) -> None:
    rows = [json.loads(line) for line in Path("runs/histograms/metrics.jsonl").read_text().splitlines()]
    found = {name: value for row in rows for name, value in row.items()}
    assert sum(found["weights"]["counts"]) == 8
    assert sum(found["gradients/w"]["counts"]) == 8
    assert found["picture"]["png"]


def opened_run_after(names: Names) -> None:
    history, metrics = names["run"].history, names["run"].metrics
    assert metrics["step"] == history["step"][-1] == 40
    assert metrics["eval_loss"] == history["eval_loss"][-1]
    assert Path("curves.png").stat().st_size > 10_000


def predictions_after(names: Names) -> None:
    run, rows = names["run"], names["rows"]
    right = names["logits"].argmax(-1) == rows.gather(np.arange(len(rows)))["targets"]
    assert right.mean() == pytest.approx(run.metrics["eval_accuracy"])
    assert set(names["names"]) <= set(run.classes)
    # Another layout and another batch: other orders of summation in float32.
    np.testing.assert_allclose(names["again"], names["logits"], rtol=1e-4, atol=1e-5)


def engine_after(names: Names) -> None:
    """More requests than slots; each gets its tokens."""
    assert [len(answer) for answer in names["answers"]] == [8] * 6


def updated_engine_after(names: Names) -> None:
    """Each iteration of the loop has trained one step."""
    assert int(names["state"].step) == 3
    assert np.isfinite(float(names["metrics"]["loss"]))


def flowers_before(folder: Path) -> Names:
    lines = [f"{i % 5},{i * 0.5},{['iris', 'rose'][i % 2]}" for i in range(32)]
    (folder / "flowers.csv").write_text("\n".join(["width,height,kind", *lines]) + "\n")
    config = {
        "task": "classification",
        "model": {"kind": "mlp", "hidden_dims": [8]},
        "data": {"kind": "table", "path": str(folder / "flowers.csv")},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "train": {"steps": 1, "global_batch_size": 8},
        "logging": {"report": False, "tensorboard": False},
    }
    jt.run_config(config, run_dir=folder / "runs" / "flowers")
    return {}


def flowers_after(names: Names) -> None:
    assert names["row"]["row"] == 32
    assert set(names["row"]["probabilities"]) == {"iris", "rose"}


def preferences_after(names: Names) -> None:
    """Each loss learns to count upwards, on held-out pairs too."""
    metrics = {name: result.metrics for name, result in names["results"].items()}
    assert metrics["dpo"]["eval_accuracy"] > 0.9
    assert metrics["simpo"]["eval_preferred"] > 0.9
    assert metrics["ipo"]["eval_loss"] < 25 / 2  # 1 / (2 tau) squared at first


def finetuning_before(folder: Path) -> Names:
    """A tiny model under the name of the page's, and rows of tokens."""
    group = {"kind": "transformer", "num_layers": 1, "embed_dim": 32, "num_heads": 2, "max_sequence_length": 8}
    model = jt.build_model({**group, "vocab_size": 64}, input_shape=(8,))
    params, _ = jax.jit(model.init)(jax.random.key(0))
    jt.save_pretrained(folder / "models" / "SmolLM2-135M", params, model={**group, "vocab_size": 64})
    tokens = (np.arange(9)[None] + np.arange(32)[:, None]).astype(np.int32) % 64
    return {"rows": {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}}


def finetuning_after(names: Names) -> None:
    losses = names["run"].history["loss"]
    assert losses[-1] < losses[0]


def added_tokens_before(folder: Path) -> Names:
    """A tokenizer with as many tokens as the page's, under its name."""
    (folder / "models" / "SmolLM2-135M").mkdir(parents=True)
    words = {f"word{number}": number for number in range(49_152)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    tokenizer.save(str(folder / "models" / "SmolLM2-135M" / "tokenizer.json"))
    return {}


def added_tokens_after(names: Names) -> None:
    assert tokenizers.Tokenizer.from_file("tools.json").token_to_id("</tool>") + 1 == 49_154


def adapting_after(names: Names) -> None:
    merged, first = jax.tree.leaves(names["weights"]), jax.tree.leaves(names["pretrained"].params)
    jax.tree.map(np.testing.assert_array_equal, merged, first)  # adapters begin at 0


def given_nothing(folder: Path) -> Names:
    return {}


def runs(names: Names) -> None:
    pass


# Page, words of the example: what the page takes as given, and what must have come of it. Others are given nothing.
EXPECTED: dict[tuple[str, str], tuple[Callable[[Path], Names], Callable[[Names], None]]] = {
    ("checkpoints.md", 'prefix="params"'): (checkpoints_before, checkpoints_after),
    ("checkpoints.md", "step=10"): (going_back_before, going_back_after),
    ("checkpoints.md", "runs/pretrained"): (another_run_before, another_run_after),
    ("checkpoints.md", "params=params"): (given_parameters_before, given_parameters_after),
    ("data.md", "prefetch("): (data_before, data_after),
    ("data.md", "write_table(pa.table(faq)"): (given_nothing, questions_after),
    ("engine.md", "answers = "): (given_nothing, engine_after),
    ("engine.md", "engine.update("): (given_nothing, updated_engine_after),
    ("finetuning.md", "add_special_tokens("): (added_tokens_before, added_tokens_after),
    ("finetuning.md", "fit("): (finetuning_before, finetuning_after),
    ("finetuning.md", "merge_adapters("): (finetuning_before, adapting_after),
    ("loss.md", "LogitsLoss("): (given_nothing, loss_after),
    ("optimizers.md", "optax.partition("): (own_parts, optimizer_after),
    ("optimizers.md", "prodigy("): (own_parts, optimizer_after),
    ("optimizers.md", "tempered"): (own_parts, optimizer_after),
    ("optimizers.md", "trainable="): (own_parts, frozen_after),
    ("optimizers.md", "warmup_cosine"): (own_parts, schedule_after),
    ("parallelism.md", "from_stages("): (given_nothing, stages_after),
    ("parallelism.md", "shard_model("): (given_nothing, sharded_after),
    ("planner.md", "analyse("): (given_nothing, planner_after),
    ("python_api.md", "Checkpointer("): (given_nothing, own_loop_after),
    ("python_api.md", "critic_step"): (given_nothing, alternating_after),
    ("python_api.md", "call=call"): (given_nothing, own_call_after),
    ("python_api.md", "shard_model("): (given_nothing, axes_after),
    ("predict.md", "predict_file("): (flowers_before, flowers_after),
    ("preferences.md", "jt.dpo("): (given_nothing, preferences_after),
    ("precision.md", "quantize("): (precision_before, precision_after),
    ("training.md", "folds"): (given_nothing, folds_after),
    ("training.md", "from_nnx("): (given_nothing, fit_after),
    ("training.md", "EarlyStopping("): (given_nothing, callbacks_after),
    ("trackers.md", "moment.log("): (given_nothing, histograms_after),
    ("runs.md", "rate"): (given_nothing, two_runs_after),
    ("runs.md", "run.plot("): (given_nothing, opened_run_after),
    ("runs.md", "run.predict("): (given_nothing, predictions_after),
}


@pytest.mark.parametrize(("page", "text"), EXAMPLES)
def test_example_runs_as_printed(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [value for (name, words), value in EXPECTED.items() if name == page and words in text]
    before, after = found[0] if found else (given_nothing, runs)
    names = before(tmp_path)
    exec(compile(text, f"example of {page}", "exec"), names)
    after(names)


def test_every_expectation_has_its_example():
    printed = [example.values for example in EXAMPLES]
    assert all(any(page == name and words in str(text) for name, text in printed) for page, words in (*EXPECTED, *LONG))
