"""A program ends with its own code, though a thread is inside of jax as its interpreter ends."""

import subprocess
import sys

import pytest

BUSY = """
import atexit
import sys
import threading

from jaxtrain import cli


def run(words):
    import jax
    import numpy as np

    def work():
        while True:
            jax.block_until_ready(jax.device_put(np.ones((1000, 1000))))

    atexit.register(print, "late")
    jax.device_put(1)
    threading.Thread(target=work, daemon=True).start()
    {ends}


cli._run = run
cli.run_program()
"""


@pytest.mark.parametrize(
    ("ends", "code", "line"),
    [
        ("return 75", 75, ""),
        ("raise cli.ConfigError('wrong')", 2, "jaxtrain: wrong\n"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_the_code_of_the_command_is_that_of_the_process(ends, code, line):
    program = BUSY.format(ends=ends)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, "late\n", line)


LEFT_OPEN = """
from jaxtrain import cli


def run(words):
    global text, raw
    text, raw = open("text", "w"), open("raw", "wb")
    text.write("written")
    raw.write(b"written")
    return 5


cli._run = run
cli.run_program()
"""


def test_files_that_are_left_open_are_written(tmp_path):
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (5, "")
    assert [(tmp_path / name).read_text() for name in ("text", "raw")] == ["written", "written"]


INSIDE = """
import runpy
import sys

sys.argv = ["jaxtrain", "--version"]
try:
    runpy.run_module("jaxtrain", run_name="__main__")
except SystemExit as ended:
    print("ended with", ended.code)
left_open = open("written.txt", "w")
left_open.write("written")
sys.exit(7)
"""


def test_a_program_that_runs_the_command_inside_itself_ends_with_its_own_code(tmp_path):
    done = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout.endswith("ended with 0\n")
    assert (tmp_path / "written.txt").read_text() == "written"
