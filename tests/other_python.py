"""What a second run of the tests, on another Python and another jax, leaves out because the first run proved it.

`.ci/run` runs plain `pytest` on the newest Python and `pytest --all` on the oldest. A test is left out of the second
run only if the first passed it (what was skipped there, for lack of a compiler or of weights, is never lost) and if
one of two rules says that one Python is enough:

- its folder or file stands in `ONE_PYTHON`: text, configs, wrong input, published tables and weights, rows of data,
  HTTP, schedules of stages as tables, the planner's arithmetic, files of runs and checkpoints (Orbax is the same on
  both), commands, faults, clusters, adapters and preferences (whose steps are those of train/), and generation. Their
  long rows run in the second run. Steps, layouts, optimizers, operations, models, resumed runs and processes run on
  both;
- it is a plain row of a table whose further rows are marked `long`: those run the same code in the second run.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Collection
from pathlib import Path

# Below tests/: what no version of jax changes.
ONE_PYTHON = (
    "bench/",
    "checkpoint/test_damage.py",
    "checkpoint/test_going_back.py",
    "checkpoint/test_policy.py",
    "checkpoint/test_upkeep.py",
    "cli/",
    "clusters/",
    "config/",
    "data/",
    "faults/",
    "finetune/",
    "inference/",
    "interop/",
    "metrics/",
    "models/test_sizes.py",
    "parallel/test_pipeline_schedules.py",
    "parallel/test_refusals.py",
    "plan/",
    "preferences/",
    "run/test_early_stopping.py",
    "run/test_given_batches.py",
    "run/test_kept_tokenizer.py",
    "run/test_lock.py",
    "run/test_mistakes.py",
    "run/test_open_run.py",
    "run/test_predict_file.py",
    "run/test_run_as_config.py",
    "run/test_run_callbacks.py",
    "run/test_session.py",
    "run/test_set_aside.py",
    "run/test_shown.py",
    "run/test_stalls.py",
    "runtime/test_heartbeats.py",
    "train/test_wrong_parts.py",
    "wrong_inputs/",
    "test_coming_from.py",
    "test_docs.py",
    "test_house.py",
    "test_package.py",
    "test_page_examples.py",
    "test_readme.py",
    "test_reference.py",
)


def read_passed(file: Path) -> frozenset[tuple[str, str]]:
    """Returns the tests that passed in a run, from the file of its `--junitxml`: (module, name with parameters)."""
    passed: set[tuple[str, str]] = set()
    failed: set[tuple[str, str]] = set()
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        ended_otherwise = any(part.tag in ("failure", "error", "skipped") for part in case)
        (failed if ended_otherwise else passed).add((case.get("classname", ""), case.get("name", "")))
    # A test that fails as it is torn down has two entries, the first of them like that of a test that passed.
    return frozenset(passed - failed)


def key_of(test: str) -> tuple[str, str]:
    """Returns the name of a test in that file, from its id: "tests/run/test_fit.py::test_a[1]"."""
    path, _, name = test.partition("::")
    return path.removesuffix(".py").replace("/", "."), name


def function_of(test: str) -> str:
    """Returns the id of a test without its parameters, which is what all rows of a table share."""
    return test.partition("[")[0]


def is_proved(test: str, *, passed: Collection[tuple[str, str]], tables: Collection[str]) -> bool:
    """Returns whether a second run may leave a plain test out.

    Args:
        test: Its id.
        passed: The tests that passed in the first run.
        tables: The functions that have long rows.
    """
    one_python = test.removeprefix("tests/").startswith(ONE_PYTHON)
    return key_of(test) in passed and (one_python or function_of(test) in tables)
