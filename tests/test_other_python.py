"""No test falls between two runs on two Pythons: the second leaves out only what the first passed and one may prove."""

import re
import shlex
from pathlib import Path

import pytest
from other_python import ONE_PYTHON, function_of, is_proved, read_passed

TESTS = Path(__file__).resolve().parent
# What the first run says: a test may pass, fail, be skipped, or fail only when it is torn down.
FIRST_RUN = """<testsuites><testsuite>
<testcase classname="tests.config.test_load" name="test_a[1]"/>
<testcase classname="tests.config.test_load" name="test_a[2]"><failure/></testcase>
<testcase classname="tests.config.test_load" name="test_a[3]"><skipped/></testcase>
<testcase classname="tests.config.test_load" name="test_a[4]"/>
<testcase classname="tests.config.test_load" name="test_a[4]"><error/></testcase>
<testcase classname="tests.run.test_fit" name="test_table[row]"/>
<testcase classname="tests.run.test_fit" name="test_one"/>
</testsuite></testsuites>"""
# A plain test -> whether the second run may leave it out, where tests/run/test_fit.py::test_table has long rows.
ROWS = {
    "passed, of a folder of text": ("tests/config/test_load.py::test_a[1]", True),
    "failed": ("tests/config/test_load.py::test_a[2]", False),
    "skipped": ("tests/config/test_load.py::test_a[3]", False),
    "failed at the end": ("tests/config/test_load.py::test_a[4]", False),
    "not run": ("tests/config/test_load.py::test_a[5]", False),
    "a row of a table with long rows": ("tests/run/test_fit.py::test_table[row]", True),
    "a row that was not run": ("tests/run/test_fit.py::test_table[other]", False),
    "depends on the version of jax": ("tests/run/test_fit.py::test_one", False),
}


@pytest.mark.parametrize(("test", "left_out"), ROWS.values(), ids=ROWS)
def test_only_what_passed_and_one_python_proves_is_left_out(test: str, left_out: bool, tmp_path: Path) -> None:
    (tmp_path / "passed.xml").write_text(FIRST_RUN)
    passed = read_passed(tmp_path / "passed.xml")
    assert is_proved(test, passed=passed, tables={"tests/run/test_fit.py::test_table"}) == left_out


@pytest.mark.parametrize("path", ONE_PYTHON)
def test_what_needs_one_python_is_there(path: str) -> None:
    assert (TESTS / path).is_dir() if path.endswith("/") else (TESTS / path).is_file()


def test_the_second_run_is_given_options_that_pytest_knows_and_no_path(pytestconfig: pytest.Config) -> None:
    """A word that is no option is a path to pytest, which then reads tests/conftest.py too late for its options."""
    script = (TESTS.parent / ".ci" / "run").read_text()
    lines = re.findall(r'^  "\$whole/bin/pytest" (.*)$', script, re.MULTILINE)
    assert len(lines) == 1
    for word in shlex.split(lines[0]):
        assert word.startswith("--"), f"{word} is taken for a path"
        pytestconfig.getoption(word.partition("=")[0])


def test_rows_of_a_table_share_their_function() -> None:
    assert function_of("tests/run/test_fit.py::test_table[a[0]-b]") == "tests/run/test_fit.py::test_table"
