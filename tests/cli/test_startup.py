"""What must hold for a whole process: a light help, no jax where none is needed, pipes, exit codes."""

import json
import subprocess
import sys

import pytest

JAXTRAIN = [sys.executable, "-m", "jaxtrain"]
# Runs a command in a new interpreter and says which heavy packages it imported.
WATCHED = """
import sys
from jaxtrain.cli import main
code = main(sys.argv[1:])
loaded = [name for name in ("jax", "flax", "optax", "orbax", "grain") if name in sys.modules]
print("loaded:", *loaded, file=sys.stderr)
sys.exit(code)
"""
# Runs a command in a new interpreter and counts what it imported.
COUNTED = """
import json, sys
from jaxtrain.cli import main
code = main(sys.argv[1:])
roots = [name.partition(".")[0] for name in sys.modules]
heavy = ("jax", "flax", "optax", "orbax", "grain", "numpy", "pydantic", "rich", "yaml")
print(json.dumps({
    "ours": roots.count("jaxtrain"),
    "standard": sum(root in sys.stdlib_module_names for root in roots),
    "packages": [name for name in heavy if name in roots],
}), file=sys.stderr)
sys.exit(code)
"""


def run(*words, **settings):
    return subprocess.run([*words], capture_output=True, text=True, timeout=120, **settings)


# What a command costs before it does anything is what it imports. `scripts/bench_start.py` measures the seconds; the
# modules are counted here, which no other process of the machine changes. The bounds for the files of jaxtrain and of
# the standard library are a few per cent above what was counted on Python 3.11 to 3.13. The files of other packages
# have no bound, because each version of a package may divide them in another way.
@pytest.mark.parametrize(
    ("words", "ours", "standard", "packages"),
    [
        (["train", "--help"], 23, 111, []),
        (["config", "quickstart"], 98, 190, ["pydantic", "yaml"]),
    ],
    ids=["train --help", "config quickstart"],
)
def test_imports_no_more_than_it_needs(words, ours, standard, packages):
    done = run(sys.executable, "-c", COUNTED, *words)
    assert done.returncode == 0
    assert done.stdout
    found = json.loads(done.stderr)
    assert found["packages"] == packages
    assert found["ours"] <= ours
    assert found["standard"] <= standard


def test_checkpoints_are_listed_without_jax(text_run):
    done = run(sys.executable, "-c", WATCHED, "ckpt", "ls", str(text_run))
    assert (done.returncode, done.stderr) == (0, "loaded:\n")


def test_exit_code_and_debug_reach_the_shell(tmp_path):
    debug = run(*JAXTRAIN, "train", "nothing", "--debug", cwd=tmp_path)
    assert debug.returncode == 2
    assert "Traceback" in debug.stderr
    assert debug.stderr.splitlines()[-1].startswith("jaxtrain: no config 'nothing'")


def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen([*JAXTRAIN, "config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before the interpreter on the other side has started
    with process.stderr as errors:
        assert errors.read() == ""
    assert process.wait(60) == 141


@pytest.mark.long
def test_evaluates_and_samples_on_other_devices_through_pipes(text_run, tmp_path):
    done = run(*JAXTRAIN, "eval", str(text_run), "--emulate", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    # 8 rows do not divide by 3 devices, so batches have 9; the rows are those of the run's two batches of 8.
    assert (answer["step"], answer["rows"]) == (4, 16)
    assert "batches of 9 rows instead of 8" in done.stderr
    words = ("sample", str(text_run), "-n", "4", "--temperature", "0", "--emulate", "1")
    done = run(*JAXTRAIN, *words, input="From a pipe\n", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("From a pipe")
    assert not done.stdout.startswith("From a pipe\n")
