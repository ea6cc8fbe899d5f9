"""What the README prints runs as printed, its links lead somewhere, and its table is proved by plain `pytest`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
# What each row of the table under "What works, and the proof" claims, and what it names as proof.
TABLE = re.findall(r"^\| (?!what \|)([^|]+) \| ([^|]+) \|$", README, flags=re.MULTILINE)
# The tests of what a row names and that is no test itself: a script that measures, a command, the page.
TESTS_OF = {
    "this page": "tests/test_readme.py",
    "`jaxtrain bench`": "tests/bench/test_bench_command.py",
}


def test_example_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = EXAMPLES
    exec(compile(example, "README.md's example", "exec"), {})
    assert float(capsys.readouterr().out.split("accuracy")[1]) > 0.9


def test_links_and_proofs_exist() -> None:
    paths = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"`((?:tests|scripts|docs)/[^`]+)`", README)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert paths
    assert not missing


def test_the_table_is_read() -> None:
    assert len(TABLE) == README.count("\n| ") - 1, "each row but that of the titles"


@pytest.mark.parametrize(("claim", "proof"), TABLE, ids=[claim[:40] for claim, _ in TABLE])
def test_each_row_is_proved_by_plain_pytest(claim: str, proof: str, plain_tests: list[str]) -> None:
    named = re.findall(r"`(tests/[^`]+)`", proof) + [tests for name, tests in TESTS_OF.items() if name in proof]
    assert named, f"no test proves: {claim}"
    begins = {path: path if path.endswith("/") else f"{path}::" for path in named}
    without = [path for path, begin in begins.items() if not any(test.startswith(begin) for test in plain_tests)]
    assert not without, f"plain pytest runs no test of {without}, which prove: {claim}"
