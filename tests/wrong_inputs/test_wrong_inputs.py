"""Whatever a user can pass wrongly to a public name is one line: what was given, what is wanted, how to write it.

A new public name needs rows: `"name: what is wrong": (call, words of what was given, words of how to write it)` in one
of the tables, and `"Name.method: ..."` for each method that takes arguments.
"""

import inspect
import re

import data_rows
import engine_rows
import fit_rows
import model_rows
import preference_rows
import published_rows
import pytest
import step_rows

import jaxtrain as jt

TABLES = (data_rows, model_rows, step_rows, fit_rows, published_rows, preference_rows, engine_rows)
ROWS = {name: row for table in TABLES for name, row in table.ROWS.items()}

# Public names that take nothing which could be wrong, and why.
WITHOUT_ROWS = {
    "CheckpointError": "an error",
    "ConfigError": "an error",
    "CorruptionError": "an error",
    "DataError": "an error",
    "DivergedError": "an error",
    "EngineDead": "an error",
    "EngineFull": "an error",
    "PreemptedError": "an error",
    "UserError": "an error",
    "DEFAULT_RULES": "a table",
    "ModelCall": "made for the loss of Task.calling",
    "Moment": "a record that callbacks get",
    "Pretrained": "a record that load_pretrained makes",
    "Result": "a record that run_config makes",
    "ShardedModel": "a record that shard_model makes",
    "TrainStep": "made by make_train_step",
    "classification": "takes nothing",
    "regression": "takes nothing",
    "token_classification": "takes nothing",
    "is_main_process": "takes nothing",
}
# Methods that are not called with what a user made.
METHODS_WITHOUT_ROWS = {
    "Moment.log": "tests/run/test_run_callbacks.py has them",
    "DeferredLogits.logits": "takes nothing",
    "Checkpointer.__exit__": "called by `with`",
    "JsonlWriter.__exit__": "called by `with`",
    "Checkpointer.wait": "takes a flag",
    "Checkpointer.close": "takes a flag",
    "Engine.__exit__": "called by `with`",
    "Engine.close": "takes a flag",
    "Evaluator.__call__": "Python's own errors",
    "ModelCall.deferred": "as a call",
    "ModelCall.with_state": "as a call",
    "Remat.scan": "called by models with their own blocks",
    "ShardedModel.apply_deferred": "as apply",
    "ShardedModel.context": "takes a flag",
    "DrawsByRow.__call__": "the function that it marks",
    "LogitsLoss.__call__": "the loss that it holds",
    "ArrayRows.gather": "called by Batches",
    "ArrayRows.order": "called by Batches",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_input_is_one_line(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, given, write = ROWS[row]
    with pytest.raises(jt.UserError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    assert given in line
    assert write in line
    # A line that nobody reads to its end tells nobody anything.
    assert len(line) < 500
    assert not list(tmp_path.iterdir())


def own_methods(kind):
    """Methods of a class of ours that take arguments."""
    for name, member in vars(kind).items():
        is_public = name in ("__call__", "__exit__") or not name.startswith("_")
        if inspect.isfunction(member) and is_public and len(inspect.signature(member).parameters) > 1:
            yield name


def callables():
    for name in jt.__all__:
        value = getattr(jt, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
            yield name, value


@pytest.mark.parametrize("name", [name for name in jt.__all__ if name != "__version__"])
def test_every_public_name_has_rows(name):
    has_rows = any(row.startswith(f"{name}:") for row in ROWS)
    assert has_rows != (name in WITHOUT_ROWS), (
        f"write rows for {name} in tests/wrong_inputs/, or say why there are none"
    )


@pytest.mark.parametrize("name", [name for name, value in callables() if isinstance(value, type)])
def test_every_public_method_has_rows(name):
    methods = {f"{name}.{method}" for method in own_methods(getattr(jt, name))}
    without = {
        one for one in methods if one not in METHODS_WITHOUT_ROWS and not any(row.startswith(f"{one}:") for row in ROWS)
    }
    assert not without, f"write rows for {sorted(without)} in tests/wrong_inputs/"


def test_every_row_is_of_a_public_name():
    names = {re.split(r"[.:]", row)[0] for row in ROWS}
    assert names <= set(jt.__all__)
