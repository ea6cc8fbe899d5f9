"""Names of runs stay below runs/ and are readable; paths that no file can have are one line."""

import re
from pathlib import Path

import pytest

from jaxtrain.cli import main
from jaxtrain.config import load_config
from jaxtrain.config.local_path import local_path
from jaxtrain.errors import ConfigError
from jaxtrain.run.folder import run_folder

HINT = "use letters, digits, '-', '_' and '.', such as name=my_run"
OUT = "leads out of its folder below runs/ (--run-dir takes any path)"
HIDDEN = "holds characters that are not shown, such as line ends or escape codes"
# id: (name, what is wrong)
WRONG = {
    "above": ("../../x", OUT),
    "the folder above": ("..", OUT),
    "the folder itself": (".", OUT),
    "above, inside": ("a/../../x", OUT),
    "absolute": ("/tmp/x", "is a path of its own, and the folder of a run lies below runs/ (--run-dir takes any path)"),
    "empty": ("", "is empty, or has an empty part"),
    "spaces": ("  ", "is empty, or has an empty part"),
    "empty part": ("a//b", "is empty, or has an empty part"),
    "space at its end": ("a ", "begins or ends with a space"),
    "line end": ("a\nb", HIDDEN),
    "escape code": ("\x1b[31mred", HIDDEN),
    "text that runs backwards": ("a\u202eb", HIDDEN),
    "backslash": ("a\\b", "holds a backslash"),
    "300 characters": ("a" * 300, "has more than 200 bytes"),
    "201 bytes": ("é" * 101, "has more than 200 bytes"),
}


@pytest.mark.parametrize(("name", "reason"), WRONG.values(), ids=WRONG)
def test_a_name_that_is_no_folder_below_runs(name, reason):
    shown = repr(name) if len(name) <= 60 else f"{name[:60]!r}..."
    with pytest.raises(ConfigError) as caught:
        load_config(keywords={"name": name})
    assert str(caught.value) == f"name (keyword): {shown} {reason}; {HINT}"
    # What a config file or run.json is called gets there without the key.
    with pytest.raises(ConfigError):
        run_folder(None, name)


@pytest.mark.parametrize(
    "name", ["quickstart", "a.b-c_d", "lr=0.1", "sweep/lr_0.1", "größe 2", "実験", "a..b", ".hidden"]
)
def test_a_name_is_a_folder_below_runs(name):
    assert load_config(keywords={"name": name}).config.name == name
    assert run_folder(None, name) == Path("runs") / name


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("", "run directory '' is empty; write a path, or leave it out"),
        ("a\0b", "run directory 'a\\x00b' holds a NUL character, which no path does; leave it out"),
        ("b" * 300, f"run directory {'b' * 60!r} has 300 characters; a name in a path has at most 255 bytes"),
        ("b/" * 3000, f"run directory {'b/' * 30!r} has 6000 characters; a name in a path has at most 255 bytes"),
        ("\ud800", "run directory '\\ud800' holds characters that no path on this machine can have; rename it"),
    ],
    ids=["empty", "NUL", "long name", "long path", "half of a character"],
)
def test_a_path_that_no_file_can_have(path, line):
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        local_path(path, what="run directory")


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "/dev/zero", "/dev/null"], ids=["long", "NUL", "zero", "null"])
def test_a_config_that_is_no_file(name):
    with pytest.raises(ConfigError, match=r"has 300 characters|NUL character|is a pipe or a device"):
        load_config(name)


@pytest.mark.parametrize(
    "words",
    [["train", "x" * 300], ["ckpt", "ls", "x" * 300], ["config", "quickstart", f"model.from={'x' * 300}"]],
    ids=["config", "checkpoints", "published"],
)
def test_a_path_that_no_file_system_takes_is_one_line(words, capsys):
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert "has 300 characters; a name in a path has at most 255 bytes" in printed
    assert printed.count("\n") == 1
