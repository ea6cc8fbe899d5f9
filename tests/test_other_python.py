"""No test falls between two runs on two Pythons: the second leaves out only what the first passed."""

from pathlib import Path

from other_python import BOTH_PYTHONS, left_out

TESTS = Path(__file__).resolve().parent
# What the first run says: a test may pass, fail, be skipped, or fail only when it is torn down.
FIRST_RUN = """<testsuites><testsuite>
<testcase classname="tests.config.test_load" name="test_a[1]"/>
<testcase classname="tests.config.test_load" name="test_a[2]"><failure/></testcase>
<testcase classname="tests.config.test_load" name="test_a[3]"><skipped/></testcase>
<testcase classname="tests.config.test_load" name="test_a[4]"/>
<testcase classname="tests.config.test_load" name="test_a[4]"><error/></testcase>
<testcase classname="tests.ops.test_linear" name="test_one"/>
</testsuite></testsuites>"""


def test_only_what_passed_and_no_jax_changes_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "passed.xml").write_text(FIRST_RUN)
    assert left_out(tmp_path / "passed.xml") == {"tests/config/test_load.py::test_a[1]"}
    assert [path for path in BOTH_PYTHONS if not (TESTS / path).exists()] == []
