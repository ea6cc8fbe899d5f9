"""What the README prints runs as printed, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("index", range(3), ids=["own-model", "config", "parts"])
def test_example_runs_as_printed(
    index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(EXAMPLES[index], f"README.md example {index + 1}", "exec"), names)
    printed = capsys.readouterr().out
    if index == 0:
        assert float(printed.split("accuracy")[1]) > 0.9
    elif index == 1:
        assert "20 " in printed
        assert (tmp_path / "runs" / "short" / "report.html").is_file()
    else:
        assert (tmp_path / "runs" / "parts" / "checkpoints" / "10").is_dir()
        exec(compile(EXAMPLES[index], "README.md example 3, again", "exec"), {})


def test_there_is_an_example_for_each_way_in() -> None:
    assert len(EXAMPLES) == 3
    assert len(EXAMPLES[0].splitlines()) <= 20


def test_links_and_proofs_exist() -> None:
    paths = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"`((?:tests|scripts|docs)/[^`]+)`", README)
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert paths
    assert not missing
