"""A run that is opened or resumed with other data: what is said of rows that were trained on, and of another kind."""

import json
from pathlib import Path
from typing import Any

import pytest

import jaxtrain as jt
from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.run.resume import changes_since
from jaxtrain.run.saved_config import saved_config, trained_rows_line

QUIET = {"train.steps": 1, "logging.report": False, "logging.tensorboard": False}
TABLE = {"data.kind": "table", "data.path": "rows.csv", "data.validation_fraction": 0.2}
TEXTS = {"data.kind": "labelled_text", "data.path": "a.csv", "data.validation_path": "b.csv"}
PAIRS = {"data.kind": "text_pairs", "data.path": "a.csv"}
SPLIT = {"data.kind": "labelled_text", "data.path": "a.csv", "data.validation_fraction": 0.2}


def mixed(*sources: tuple[str, float]) -> dict[str, Any]:
    """A mixture of text files, each with its fraction."""
    parts = [{"source": {"kind": "text", "path": path, "validation_fraction": part}} for path, part in sources]
    return {"data.kind": "mixture", "data.components": [{**part, "weight": 1.0} for part in parts]}


# The run's keys, further ones, whether some of the rows were trained on.
OPENED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "more rows": (TABLE, {"data.validation_fraction": 0.5}, True),
    "the same path in other words": (TABLE, {"data.path": "./rows.csv", "data.validation_fraction": 0.5}, True),
    "another key of the same rows": (TABLE, {"data.task": "regression", "data.validation_fraction": 0.5}, True),
    "fewer rows": (TABLE, {"data.validation_fraction": 0.1}, False),
    "another file": (TABLE, {"data.path": "others.csv", "data.validation_fraction": 0.5}, False),
    "rows of their own": (TEXTS, {"data.validation_fraction": 0.5}, False),
    "all rows": (TABLE, {"data.validation_fraction": 1}, True),
    "a source of a mixture": (mixed(("a", 0.05), ("b", 0.2)), mixed(("b", 0.5)), True),
    "another source": (mixed(("a", 0.05), ("b", 0.2)), mixed(("c", 0.5), ("b", 0.1)), False),
    "other weights": (mixed(("a", 0.05), ("b", 0.2)), mixed(("b", 0.2), ("a", 0.05)), False),
    "rows of the file for training": (TEXTS, {"data.validation_path": None}, True),
    "the file for training": (TEXTS, {"data.validation_path": "./a.csv"}, True),
    "the whole file in place of a part": (SPLIT, {"data.validation_path": "a.csv"}, True),
    "another file for evaluation": (TEXTS, {"data.validation_path": "c.csv"}, False),
    "both files others": (TEXTS, {"data.path": "c.csv", "data.validation_path": None}, False),
}


@pytest.mark.parametrize(("saved", "further", "is_said"), OPENED.values(), ids=OPENED)
def test_rows_that_were_trained_on(saved: dict[str, Any], further: dict[str, Any], is_said: bool) -> None:
    run, opened = (load_config(keywords=keys).config for keys in (saved, {**saved, **further}))
    line = trained_rows_line(run, opened)
    assert (line is not None) == is_said
    assert line is None or "trained on" in line
    if further.keys() == {"data.validation_fraction"} and is_said:
        held_out = (
            f"data.validation_fraction={further['data.validation_fraction']} holds out more than the run did (0.2)"
        )
        assert line is not None
        assert line.startswith(held_out)


def test_an_opened_run_says_it(tmp_path: Path) -> None:
    config = {"data": {"kind": "digits"}, "model": {"kind": "mlp", "hidden_dims": [4]}, "task": "classification"}
    jt.run_config({**config, **QUIET}, run_dir=tmp_path / "run")
    lines: list[str] = []
    overrides = {"data.validation_fraction": 0.5, "data.kind": "digits"}
    jt.open_run(tmp_path / "run", overrides=overrides, report=lines.append)
    assert [line.partition(" ")[0] for line in lines] == ["data.validation_fraction=0.5"]


# The keys of a run with a file for evaluation, further ones, whether that file would be evaluated instead.
HIDDEN: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "labelled": (TEXTS, {"data.path": "t.csv"}, True),
    "tagged": ({**TEXTS, "data.kind": "tagged_text"}, {"data.path": "t.csv"}, True),
    "pairs": ({**PAIRS, "data.validation_path": "b.csv"}, {"data.path": "t.csv"}, True),
    "images": ({"data.kind": "images", "data.path": "a", "data.validation_path": "b"}, {"data.path": "t.csv"}, True),
    "chats": (
        {"data.kind": "chat", "data.path": ["a", "c"], "data.validation_path": "b"},
        {"data.path": "t.csv"},
        True,
    ),
    "the same in other words": (TEXTS, {"data.path": "./a.csv"}, False),
    "no file for evaluation": (PAIRS, {"data.path": "t.csv"}, False),
    "both": (TEXTS, {"data.path": "t.csv", "data.validation_path": "b.csv"}, False),
    "a part of it": (TEXTS, {"data.path": "t.csv", "data.validation_path": None}, False),
    "the one for evaluation": (TEXTS, {"data.validation_path": "t.csv"}, False),
}


@pytest.mark.parametrize(("run", "further", "is_refused"), HIDDEN.values(), ids=HIDDEN)
def test_other_rows_are_not_passed_over_for_the_file_for_evaluation(
    run: dict[str, Any], further: dict[str, Any], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "a.csv"):
        (tmp_path / name).touch()
    saved = load_config(keywords=run).config.model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "config": saved, "data": {}}))
    if not is_refused:
        assert saved_config(tmp_path, overrides=further).config.data.path in ("t.csv", "a.csv", "./a.csv")
        return
    said = r"^data\.path=t\.csv would not be evaluated: .*data\.validation_path=b(\.csv)? \(run\.json\); give data\."
    with pytest.raises(ConfigError, match=said + r"validation_path=t\.csv$"):
        saved_config(tmp_path, overrides=further)
    with pytest.raises(ConfigError, match=said):
        saved_config(tmp_path, overrides=[f"{key}={value}" for key, value in further.items()])


def test_the_file_for_training_may_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read together with the held-out rows."""
    monkeypatch.setenv("HOME", str(tmp_path))
    saved = load_config(keywords={**TEXTS, "data.path": "~/a.csv"}).config.model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps({"format_version": 1, "config": saved, "data": {}}))
    assert saved_config(tmp_path, overrides={"data.path": "moved/a.csv"}).config.data.path == "moved/a.csv"
    (tmp_path / "a.csv").touch()
    assert saved_config(tmp_path, overrides={"data.path": f"{tmp_path}/a.csv"}).config.data.path
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    for other in ("t.csv", str(tmp_path / "loop.csv")):
        with pytest.raises(ConfigError, match="would not be evaluated"):
            saved_config(tmp_path, overrides={"data.path": other})


def test_sources_that_are_those_of_the_run_were_not_trained_on() -> None:
    def of(title: float, more: int) -> Any:
        parts = [("title", title), ("body", 0.3)]
        sources = [{"kind": "jsonl", "path": "two.jsonl", "field": k, "validation_fraction": s} for k, s in parts]
        keys = {"data.kind": "mixture", "data.sequence_length": more}
        components = [{"source": source, "weight": 1.0} for source in sources]
        return load_config(keywords={**keys, "data.components": components}).config

    assert trained_rows_line(of(0.05, 16), of(0.05, 8)) is None
    assert trained_rows_line(of(0.05, 16), of(0.5, 8)) is not None


@pytest.mark.parametrize("kind", ["table", "labelled_text", "text"])
def test_all_rows_of_other_data_are_evaluated(kind: str, tmp_path: Path) -> None:
    model: dict[str, Any] = {"kind": "mlp", "hidden_dims": [4]}
    if kind != "table":
        model = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": 8}
    if kind == "labelled_text":
        model |= {"causal": False, "head": {"kind": "sequence"}}
    for name, count in (("a", 40), ("b", 31)):
        header = "" if kind == "text" else f"{'text' if kind == 'labelled_text' else 'x'},label\n"
        rows = "".join(f"{i},{'yn'[i % 2]}\n" for i in range(10, 10 + count))
        (tmp_path / f"{name}.{'txt' if kind == 'text' else 'csv'}").write_text(header + rows)
    config = {"model": model, "data": {"kind": kind, "path": str(next(tmp_path.glob("a.*")))}}
    config |= {} if kind == "text" else {"task": "classification"}
    jt.run_config({**config, **QUIET, "train.global_batch_size": 8}, run_dir=tmp_path / "run")
    other = {"data.path": str(next(tmp_path.glob("b.*"))), "data.validation_fraction": 1}
    run = jt.open_run(tmp_path / "run", overrides=other, report=pytest.fail)
    assert run.held_out().num_rows == (31 * 5 // 8 if kind == "text" else 31)
    assert run.evaluate()["eval_loss"] > 0
    with pytest.raises(ConfigError, match=r"data\.validation_fraction=1 leaves no rows to train on; give less, or"):
        jt.open_data({"kind": kind, "path": other["data.path"], "validation_fraction": 1}, sequence_length=8)


def test_a_source_of_a_mixture_is_evaluated_whole_by_itself() -> None:
    with pytest.raises(
        ConfigError, match=r"validation_fraction=1 is for a source alone; .*data\.kind=text data\.path="
    ):
        load_config(keywords=mixed(("a", 1.0)))


SAVED = {
    "config": {"seed": 0, "train": {"global_batch_size": 8}, "optimizer": {"learning_rate": 0.1}},
    "stream": {"kind": "digits", "sequence_length": 8, "seed": 0, "global_batch_size": 8},
}
RATE = {"optimizer": {"learning_rate": 0.2}}
# id: (other groups of the config, other parts of the stream, error, what its line says)
OTHER_BATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "seed": ({"seed": 1}, {"seed": 1}, ConfigError, "another configuration: seed 0 -> 1, which no resume changes; set"),
    "batch size": (
        {"train": {"global_batch_size": 16}},
        {"global_batch_size": 16},
        ConfigError,
        "another configuration: train.global_batch_size 8 -> 16, which no resume changes; set",
    ),
    "seed and more": (
        {"seed": 1, **RATE},
        {"seed": 1},
        ConfigError,
        "another configuration: seed 0 -> 1, which no resume",
    ),
    "a key of the model that makes other rows": (
        RATE,
        {"sequence_length": 4},
        DataError,
        "sequence_length was 8, is 4",
    ),
}


@pytest.mark.parametrize("may_change", [False, True], ids=["by default", "must"])
@pytest.mark.parametrize(("config", "stream", "error", "line"), OTHER_BATCHES.values(), ids=OTHER_BATCHES)
def test_no_advice_is_given_that_would_be_refused(
    tmp_path: Path, config: dict[str, Any], stream: dict[str, Any], error: type[Exception], line: str, may_change: bool
) -> None:
    """No `resume` goes on with other batches, so that none may be offered."""
    current = {"config": {**SAVED["config"], **config}, "stream": {**SAVED["stream"], **stream}}
    with pytest.raises(error) as caught:
        changes_since(SAVED, current, run_dir=tmp_path, may_change=may_change)
    assert line in str(caught.value)
    assert "must" not in str(caught.value)
    assert "; set it back, use another run directory" in str(caught.value)
