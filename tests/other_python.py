"""What a second run of the tests, on another Python and another jax, leaves out because the first run proved it.

`.ci/run` runs plain `pytest` on the newest Python and `pytest --all` on the oldest. A test is left out of the second
run only if the first passed it (what was skipped there, for lack of a compiler or of weights, is never lost) and if
one of two rules says that one Python is enough:

- its folder or file stands in `ONE_PYTHON`: text, configs, wrong input, published tables, rows of data, HTTP,
  schedules of stages as tables, the planner's arithmetic, files of runs and checkpoints (Orbax is the same on both),
  what commands print and refuse, and how a text is chosen, row by row, from logits. Steps, layouts, optimizers,
  operations, models, resumed runs and processes run on both;
- it is a plain row of a table whose further rows are marked `long`: those run the same code in the second run.
"""

import xml.etree.ElementTree as ElementTree
from collections.abc import Collection
from pathlib import Path

# Below tests/: what no version of jax changes.
ONE_PYTHON = (
    "checkpoint/test_damage.py",
    "checkpoint/test_going_back.py",
    "checkpoint/test_policy.py",
    "checkpoint/test_upkeep.py",
    "cli/test_called_parts.py",
    "cli/test_chats.py",
    "cli/test_ckpt.py",
    "cli/test_config_command.py",
    "cli/test_data_prepare.py",
    "cli/test_eval.py",
    "cli/test_plan.py",
    "cli/test_report_command.py",
    "cli/test_sample.py",
    "cli/test_sample_folder.py",
    "cli/test_sample_stream.py",
    "cli/test_usage.py",
    "config/",
    "data/test_chat_ends.py",
    "data/test_chat_masks.py",
    "data/test_errors.py",
    "data/test_other_rows.py",
    "data/test_permutation.py",
    "data/test_row_names.py",
    "data/test_shard_errors.py",
    "data/test_sources.py",
    "data/test_text_rows.py",
    "data/test_tokenizer.py",
    "faults/test_bad_data.py",
    "faults/test_goodput.py",
    "faults/test_hostile_inputs.py",
    "faults/test_maintenance.py",
    "faults/test_too_large.py",
    "finetune/test_adapters_kept_apart.py",
    "finetune/test_adapters_that_travel.py",
    "inference/test_asked.py",
    "inference/test_beam.py",
    "inference/test_choose.py",
    "inference/test_rows.py",
    "inference/test_server.py",
    "inference/test_server_bodies.py",
    "inference/test_text_stream.py",
    "interop/test_family_of_a_model.py",
    "interop/test_gguf_blocks.py",
    "interop/test_gguf_reader.py",
    "interop/test_gguf_tokenizer.py",
    "interop/test_published_fixtures.py",
    "interop/test_published_folder.py",
    "interop/test_published_parts.py",
    "metrics/",
    "models/test_sizes.py",
    "parallel/test_pipeline_schedules.py",
    "parallel/test_refusals.py",
    "plan/test_context_way.py",
    "plan/test_cost.py",
    "plan/test_families_planned.py",
    "plan/test_fp8_plan.py",
    "plan/test_hardware.py",
    "plan/test_known_figures.py",
    "plan/test_memory.py",
    "plan/test_page.py",
    "plan/test_parameters.py",
    "plan/test_plan_search.py",
    "plan/test_published_speed.py",
    "plan/test_search_limits.py",
    "plan/test_show.py",
    "plan/test_traffic.py",
    "preferences/test_preference_runs.py",
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
