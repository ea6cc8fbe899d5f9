"""What must hold for a whole process: a light help, no jax where none is needed, pipes, exit codes."""

import subprocess
import sys

import pytest

JAXTRAIN = [sys.executable, "-m", "jaxtrain"]
# Runs a command in a new interpreter and says which heavy packages it imported.
WATCHED = """
import sys
from jaxtrain.cli import main
code = main(sys.argv[1:])
heavy = ("jax", "flax", "optax", "orbax", "grain", "numpy", "pydantic", "rich", "yaml")
loaded = [name for name in heavy if name in sys.modules]
print("loaded:", *loaded, file=sys.stderr)
sys.exit(code)
"""


def run(*words, **settings):
    return subprocess.run([*words], capture_output=True, text=True, timeout=120, **settings)


PLAN = ["plan", "quickstart", "--on", "h100x8,v5e-8,rtx4090", "--analytic", "--json"]


@pytest.mark.parametrize(
    ("words", "loaded"),
    [(["train", "--help"], ""), (["config", "quickstart"], "pydantic yaml"), (PLAN, "numpy pydantic yaml")],
    ids=["train --help", "config quickstart", "plan"],
)
def test_imports_no_more_than_it_needs(words, loaded):
    """What a command costs before it does anything is what it imports."""
    done = run(sys.executable, "-c", WATCHED, *words)
    assert (done.returncode, {*done.stderr.split()}) == (0, {"loaded:", *loaded.split()})


def test_checkpoints_are_listed_without_jax(text_run):
    done = run(sys.executable, "-c", WATCHED, "ckpt", "ls", str(text_run))
    assert done.returncode == 0
    assert not {"jax", "flax", "optax", "orbax", "grain"} & set(done.stderr.split())


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
