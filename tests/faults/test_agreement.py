"""Processes of one run that were started differently: all end with one line before anything is compiled."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.run import agreed
from jaxtrain.runtime.agreement import differences, verdict_of
from jaxtrain.runtime.compiler_options import CompilerOptions

SEED = {"seed": ("1", "command line")}
# id: (facts of each process, lines)
DIFFERENCES = {
    "alike": ([SEED, SEED], []),
    "a value": ([SEED, {"seed": ("2", "")}], ["seed: process 0 has 1 (command line), process 1 has 2"]),
    "set at another place": ([SEED, {"seed": ("1", "tiny.yaml:3")}], []),
    "the third of three": (
        [SEED, SEED, {"seed": ("2", "")}],
        ["seed: process 0 has 1 (command line), process 2 has 2"],
    ),
    "three values": (
        [SEED, {"seed": ("2", "")}, {"seed": ("3", "")}],
        ["seed: process 0 has 1 (command line), process 1 has 2 (others differ as well)"],
    ),
    "missing": ([SEED, {}], ["seed: process 0 has 1 (command line), process 1 has none"]),
    "of another kind": (
        [{"optimizer.kind": ("adamw", ""), "optimizer.b1": ("0.9", "")}, {"optimizer.kind": ("sgd", "")}],
        ["optimizer.kind: process 0 has adamw, process 1 has sgd"],
    ),
    "long": ([{"x": ("a" * 100, "")}, {"x": ("b", "")}], [f"x: process 0 has {'a' * 77}..., process 1 has b"]),
}


@pytest.mark.parametrize(("everyone", "lines"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_differs_is_named_with_both_values(everyone, lines):
    assert differences(everyone) == lines


def test_options_that_compilers_accept_are_told_one_by_one():
    """A value that is told is cut after 80 characters, which a name or two of options take."""
    names = [f"xla_some_option_of_a_compiler_with_a_long_name_{number}" for number in range(3)]

    def facts(used):
        options = CompilerOptions({name: True for name in used}, tried={names[0]: True})
        return agreed.run_facts(SimpleNamespace(stream={"seed": 0}, step=SimpleNamespace(compiler_options=options)))

    assert differences([facts(names), facts(names)]) == []
    lines = differences([facts(names), facts(names[:2])])
    assert lines == [f"compiler option {names[2]}: process 0 has True, process 1 has none"]


@pytest.mark.parametrize(
    ("everyone", "kind", "line"),
    [
        pytest.param([{"facts": SEED}, {"facts": SEED}], None, "", id="all alike"),
        pytest.param(
            [{"facts": {}}, {"failed": "no such file", "code": 3}], DataError, "process 1 cannot go on: no such file",
            id="one failed",
        ),
        pytest.param([{"facts": SEED}, {"facts": {}}], ConfigError, "the processes disagree: seed:", id="they differ"),
        pytest.param(
            [{"facts": {str(n): ("1", "") for n in range(9)}}, {"facts": {}}], ConfigError, "; and 1 more", id="much"
        ),
    ],
)  # fmt: skip
def test_one_line_for_all(everyone, kind, line):
    found = verdict_of(everyone)
    assert (None if found is None else type(found)) == kind
    assert line in str(found or "")


def test_what_may_differ_is_a_key():
    keys = agreed.flat(load_config("quickstart").config.model_dump(mode="json"))
    # Of other kinds of data, and a mapping that is empty.
    assert set(agreed.MAY_DIFFER) - set(keys) <= {"data.validation_path", "data.tokenizer.path", "logging.tags"}


TINY = {
    "model": dict(kind="transformer", num_layers=1, embed_dim=16, num_heads=2, max_sequence_length=16),
    "data": dict(kind="text", tokenizer=dict(kind="byte")),
    "train": dict(steps=4, global_batch_size=8),
    "logging": dict(tensorboard=False, report=False),
}
# id: (words of process 0, words of process 1, code, lines of both)
STARTS = {
    "configs": (
        "seed=3 checkpoint.every=7 logging.every=3",
        "optimizer.learning_rate=0.01 train.steps=6 precision.policy=bf16 evaluation.every=2",
        2,
        "the processes disagree: checkpoint.every: process 0 has 7 (command line), process 1 has 1000; "
        "evaluation.every: process 0 has None, process 1 has 2 (command line); "
        "optimizer.learning_rate: process 0 has 0.001, process 1 has 0.01 (command line); "
        "precision.policy: process 0 has fp32, process 1 has bf16 (command line); "
        "seed: process 0 has 3 (command line), process 1 has 0; "
        "train.steps: process 0 has 4 (tiny.yaml:1), process 1 has 6 (command line)",
    ),
    "a mistake before joining": ("train.stepz=3", "", 2, "unknown key 'train.stepz' (command line); did you mean"),
    "a mistake under a supervisor": (
        "train.stepz=3 --restarts 2",
        "--restarts 2",
        2,
        "unknown key 'train.stepz' (command",
    ),
    "data of one size": ("data.path=a.txt", "data.path=b.txt", 2, "data (tokens_sha256): process 0 has "),
    "data missing for both": ("data.path=nowhere", "data.path=nowhere", 3, "data.path nowhere does not exist"),
    "missing data": ("", "data.path=nowhere", 3, "data.path nowhere does not exist"),
}


@pytest.mark.parametrize(
    ("first", "second", "code", "line"),
    [pytest.param(*row, id=name, marks=[pytest.mark.long] * (name != "configs")) for name, row in STARTS.items()],
)
def test_both_end_before_the_first_step(tmp_path: Path, first, second, code, line):
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"The cat {name} sat on the mat.\n" * 500)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = []
    for index, words in enumerate((first, second)):
        cluster = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index))
        command = [sys.executable, "-m", "jaxtrain", "train", "tiny.yaml", "--emulate", "1", "--run-dir", "run"]
        environment = {**os.environ, **cluster, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([*command, *words.split()], cwd=tmp_path, env=environment, **pipes))
    try:
        found = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code, code], found
    for _, err in found:
        # What Gloo says as it connects the two is not theirs.
        said = [text for text in err.splitlines() if not text.startswith(("reading data", "[Gloo]"))]
        assert len(said) == 1, err
        assert said[0].startswith("jaxtrain: ")
        assert line in said[0]
    assert not (tmp_path / "run" / "run.json").exists()


# Errors that all raise alike, then one that process 1 alone raises, and a join after it.
PROGRAM = """
import sys
import jax
import jaxtrain as jt
from jaxtrain.runtime.agreement import together
from jaxtrain.runtime.distributed import start


def work(error):
    if error is not None:
        raise error


start(compilation_cache=None)
alone = jt.DataError("no such file") if jax.process_index() else None
for error in (jt.ConfigError("bad key"), jt.DataError("bad rows"), None, alone):
    try:
        start(compilation_cache=None)
        together(lambda: work(error))
        found = "done"
    except jt.UserError as raised:
        found = f"{type(raised).__name__} {raised}"
    sys.stderr.write(f"{found}\\n")
try:
    start(compilation_cache=None)
except jt.ConfigError as raised:
    sys.stderr.write(f"{raised}\\n")
"""


def launched(folder: Path, program: str) -> tuple[int, list[str], list[str]]:
    """The exit code of a program in two processes, and the lines of each."""
    (folder / "program.py").write_text(program)
    words = ["launch", "--processes", "2", "--emulate", "1", "--", sys.executable, "program.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "jaxtrain", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if "[Gloo]" not in line]
    other = [line.removeprefix("[1] ") for line in lines if line.startswith("[1] ")]
    return done.returncode, [line for line in lines if not line.startswith("[")], other


def test_a_program_goes_on_after_an_error_that_all_raise(tmp_path: Path):
    code, first, second = launched(tmp_path, PROGRAM)
    assert code == 0, (first, second)
    alike = ["ConfigError bad key", "DataError bad rows", "done"]
    left = "this process left the others after an earlier error (process 1 cannot go on: no such file), and jax cannot "
    left += "join them again; start the program again"
    assert first == [*alike, "DataError process 1 cannot go on: no such file", left]
    assert second == [*alike, "DataError no such file", left]


def test_a_program_that_used_jax_before_it_joined_is_told_so(tmp_path: Path):
    program = "import jax\njax.devices()\nimport jaxtrain as jt\ntry:\n    jt.start()\n"
    program += "except jt.UserError as error:\n    import sys\n    sys.stderr.write(f'{error}\\n')\n"
    code, first, second = launched(tmp_path, program)
    line = "the cluster found through JAX_COORDINATOR_ADDRESS can be joined only before jax is first used in a process"
    assert code == 0
    assert first == second == [f"{line}, and it was: call start() first, at the top of the program"]
