"""One of two processes gives up on a program with an option that is tried: both take the same program, or both end."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tried_runs import LETHAL

TINY = {
    "model": dict(kind="transformer", num_layers=1, embed_dim=16, num_heads=2, max_sequence_length=16),
    "data": dict(kind="text", tokenizer=dict(kind="byte")),
    "train": dict(steps=4, global_batch_size=8),
    "parallel": dict(fsdp=4),
    "logging": dict(every=1, tensorboard=False, report=False),
    "checkpoint": dict(every=None),
}
OPTION = "xla_llvm_disable_expensive_passes"
WHY = "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"
ASKED = "the compiler is asked for the option"


def run_two(folder: Path, place: str, *do: str, words: tuple[str, ...] = ()) -> list[tuple[int, str, str]]:
    """Exit code, output and messages of both processes, whose compilers do what is said."""
    (folder / f"{place}.yaml").write_text(json.dumps(TINY))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = []
    for index, does in enumerate(do):
        cluster = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index))
        # Each keeps its programs in a folder of its own, as hosts do.
        cluster |= dict(JAXTRAIN_CACHE_DIR=str(folder / f"cache {index}"), PYTHONPATH=os.pathsep.join(sys.path))
        command = [sys.executable, str(Path(__file__).with_name("tried_runs.py")), place, does, *words]
        pipe = subprocess.PIPE
        environment = {**os.environ, **cluster}
        processes.append(subprocess.Popen(command, cwd=folder, text=True, env=environment, stdout=pipe, stderr=pipe))
    try:
        found = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, found, strict=True)]


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def recorded(run_dir: Path) -> tuple[bool, list[str]]:
    """Whether run.json says that the option was taken, and what it says of the compiler."""
    info = json.loads((run_dir / "run.json").read_text())
    return OPTION in info["compiler_options"], [line for line in info["choices"] if line.startswith("compiler: ")]


@pytest.mark.long
def test_both_go_without_what_one_gives_up_with_and_remember_it(tmp_path: Path) -> None:
    found = run_two(tmp_path, "first", "compiles", "gives up")
    assert [code for code, _, _ in found] == [0, 0], found
    for _, out, _ in found:
        assert ASKED in out
        assert [line for line in out.splitlines() if line.startswith("compiled ")] == ["compiled without the option"]
    line = f"compiler: goes without {OPTION}, with which it gave up on process 1: {WHY}"
    assert recorded(tmp_path / "first") == (False, [line])
    assert line in " ".join(found[0][2].split()), "the line of compiling says so"
    assert [len(list((tmp_path / f"cache {index}").glob("compiled/gave-up-*.json"))) for index in range(2)] == [1, 1]

    # The second start asks no compiler for the option, though it would compile.
    again = run_two(tmp_path, "second", "compiles", "compiles")
    assert [code for code, _, _ in again] == [0, 0], again
    for _, out, _ in again:
        assert ASKED not in out
        assert "compiled without the option" in out
    is_taken, (line,) = recorded(tmp_path / "second")
    assert not is_taken
    assert "with which it gave up on process 0 at an earlier start (" in line
    assert losses(tmp_path / "second") == losses(tmp_path / "first")


@pytest.mark.long
def test_both_take_what_both_compile(tmp_path: Path) -> None:
    found = run_two(tmp_path, "with", "compiles", "compiles")
    assert [code for code, _, _ in found] == [0, 0], found
    assert all("compiled with the option" in out for _, out, _ in found)
    assert recorded(tmp_path / "with") == (True, [f"compiler: with {OPTION}"])
    assert run_two(tmp_path, "without", "gives up", "compiles")[0][0] == 0
    # LLVM may order sums otherwise: 2^-24 a sum.
    np.testing.assert_allclose(losses(tmp_path / "with"), losses(tmp_path / "without"), rtol=1e-5)


@pytest.mark.long
def test_an_error_that_is_not_the_compiler_s_ends_both(tmp_path: Path) -> None:
    found = run_two(tmp_path, "run", "compiles", "raises")
    assert [code for code, _, _ in found] == [1, 1], found
    assert "process 1 cannot go on: internal error: LookupError: no such program" in found[0][2]
    assert not any("compiled " in out for _, out, _ in found)


@pytest.mark.long
def test_a_process_that_dies_between_the_two_programs_ends_the_other(tmp_path: Path) -> None:
    found = run_two(tmp_path, "run", "compiles", "dies")
    assert found[1][0] == LETHAL
    assert found[0][0] not in (0, LETHAL), found
    assert "compiled without the option" not in found[1][1]
    assert "step 1/4" not in found[0][2]


@pytest.mark.long
def test_a_loop_of_one_s_own_takes_one_program_too(tmp_path: Path) -> None:
    found = run_two(tmp_path, "own loop", "gives up", "compiles")
    assert [code for code, _, _ in found] == [0, 0], found
    for _, out, _ in found:
        assert "compiled without the option" in out
        assert f"compiler: goes without {OPTION}, with which it gave up on process 0: {WHY}" in out
    assert len({line for _, out, _ in found for line in out.splitlines() if line.startswith("loss ")}) == 1
