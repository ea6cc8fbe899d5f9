"""What the second run of the tests leaves out: `.ci/run` runs plain `pytest` on the newest Python and jax, then every
test on the oldest, where a plain test that passed is run again only if another version of jax can change its result.
"""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

# Below tests/: steps, layouts, operations, resumed runs and processes. All else is text, files, tables and arithmetic.
BOTH_PYTHONS = (
    *("layout/", "models/", "ops/", "optim/", "parallel/", "precision/", "remat/", "train/"),
    *("checkpoint/test_round_trip.py", "run/test_processes.py", "run/test_resume.py"),
)


def left_out(file: Path) -> frozenset[str]:
    """Returns the ids of the tests that a second run leaves out, from the file that the first wrote by `--junitxml`."""
    passed: set[str] = set()
    failed: set[str] = set()
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        ended_otherwise = any(part.tag in ("failure", "error", "skipped") for part in case)
        (failed if ended_otherwise else passed).add(test)
    # A test that fails as it is torn down has two entries, the first of them like that of a test that passed.
    return frozenset(one for one in passed - failed if not one.removeprefix("tests/").startswith(BOTH_PYTHONS))
