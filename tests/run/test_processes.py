"""More than one process over loopback: the same numbers as one, and what signals and locks do to all of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from training_runs import TINY, command, environment, losses, saved_arrays, write_config

import jaxtrain as jt
from jaxtrain.run.directory import lock_run
from jaxtrain.run.signals import handle_signals


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_two(config: Path, run_dir: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two real processes with four devices each, that find one another through the environment."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for index in range(2):
        variables = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index))
        processes.append(
            subprocess.Popen(
                command(config, run_dir, "--emulate", "4", *arguments),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(**variables),
            )
        )
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended early with {process.returncode}: {process.communicate()[1]}"
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def steps_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"finetune": dict(lora=dict(rank=2, dropout=0.1))}], ids=["all", "adapters"])
def test_one_process_then_two(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A run of one process with eight devices goes on in two processes with four each."""
    sample = dict(max_batches=2, sample_prompt="The", sample_tokens=5)
    layout = dict(data=4, fsdp=2)
    if changes:
        group = TINY["model"] | {"vocab_size": 256}
        params, _ = jax.jit(jt.build_model(group, input_shape=(32,)).init)(jax.random.key(7))
        changes = changes | {"model": {"from": str(jt.save_pretrained(tmp_path / "base", params, model=group))}}
    config = write_config(tmp_path, train__steps=8, evaluation=sample, parallel=layout, **changes)
    jt.run_config(str(config), run_dir=tmp_path / "moved", overrides={"train.steps": 4})
    results = finish(start_two(config, tmp_path / "moved"))
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming step 4" in results[0][2]
    assert "step 8/8" in results[0][2]
    assert "step 8/8" not in results[1][2], "only the first process talks"
    assert (tmp_path / "moved" / "sample.txt").read_text().startswith("The")
    jt.run_config(str(config), run_dir=tmp_path / "alone")
    moved, still = losses(tmp_path / "moved"), losses(tmp_path / "alone")
    assert list(moved) == list(still) == list(range(1, 9))
    # Reductions between processes sum in another order: 2^-24 a sum.
    np.testing.assert_allclose(list(moved.values()), list(still.values()), rtol=1e-5)
    a, b = saved_arrays(tmp_path / "moved", 8), saved_arrays(tmp_path / "alone", 8)
    assert a.keys() == b.keys()
    assert ("lora_a" in next(iter(a))) == bool(changes)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=2e-5, err_msg=name)


LAYOUTS = {
    "data": ["parallel.data=8", "train.accumulation_steps=2"],
    "fsdp x tensor": ["parallel.fsdp=4", "parallel.tensor=2", "train.accumulation_steps=2"],
    "stages across processes": ["parallel.pipe=2", "parallel.data=4", "parallel.microbatches=2"],
}
# Nothing is evaluated, which would be one program more in every process.
SHORT = dict(train__steps=2, data__validation_fraction=0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("alone")
    layout = {"parallel.data": 8, "train.accumulation_steps": 2, "train.global_batch_size": 16}
    jt.run_config(str(write_config(folder, **SHORT)), run_dir=folder / "run", overrides=layout)
    return losses(folder / "run")


@pytest.mark.parametrize("row", ["data", *(pytest.param(row, marks=pytest.mark.long) for row in list(LAYOUTS)[1:])])
def test_two_launched_processes_have_the_losses_of_one(row: str, alone: dict[int, float], tmp_path: Path) -> None:
    config = write_config(tmp_path, **SHORT)
    launch = ["launch", "--processes", "2", "--emulate", "4", "--"]
    words = [*launch, "train", str(config), "--run-dir", str(tmp_path / "run")]
    result = subprocess.run(
        [sys.executable, "-m", "jaxtrain", *words, "train.global_batch_size=16", *LAYOUTS[row]],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = losses(tmp_path / "run")
    assert found.keys() == alone.keys()
    np.testing.assert_allclose(list(found.values()), list(alone.values()), rtol=1e-5)


@pytest.mark.long
def test_sigterm_to_one_of_two_processes_saves_on_both(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__steps=100_000)
    processes = start_two(config, tmp_path / "run")
    wait_for(lambda: steps_logged(tmp_path / "run") >= 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    results = finish(processes)
    assert [code for code, _, _ in results] == [75, 75], results
    saved = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit())
    assert saved >= max(losses(tmp_path / "run")), "no finished step may be lost"


@pytest.mark.long
def test_an_error_on_one_process_ends_both(tmp_path: Path) -> None:
    """Only one process reads the image that cannot be decoded; the other must not wait for it for ever."""
    from PIL import Image

    for label in ("a", "b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for index in range(8):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / "images" / label / f"{index}.png")
    (tmp_path / "images" / "a" / "3.png").write_bytes(b"no image")
    images = dict(
        kind="image_folder", path=str(tmp_path / "images"), image_size=8, augment=False, validation_fraction=0
    )
    config = write_config(
        tmp_path, task="classification", data=images, model=dict(kind="mlp"), train=dict(steps=50, global_batch_size=8)
    )
    began = time.monotonic()
    results = finish(start_two(config, tmp_path / "run"))
    codes = sorted(code for code, _, _ in results)
    assert 3 in codes, results
    assert 0 not in codes, results
    assert any("images/a/3.png" in errors for _, _, errors in results)
    # The heartbeat timeout is 30 s; the rest is start-up on a busy machine.
    assert time.monotonic() - began < 150


@pytest.mark.long
def test_two_processes_are_kept_off_a_run_directory_in_use(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__steps=4)
    with lock_run(tmp_path / "run"):
        results = finish(start_two(config, tmp_path / "run"))
    assert [code for code, _, _ in results] == [2, 2], results
    assert "in use by process" in results[0][2]
    assert "process 0 could not start" in results[1][2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_wish(number, capfd):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    with handle_signals() as interrupt:
        assert not interrupt.requested()
        os.kill(os.getpid(), number)
        assert interrupt.requested()
        assert interrupt.requested()
    assert {each: signal.getsignal(each) for each in before} == before
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith(f"{number.name}: saving what is unsaved, then exit 75")


def test_the_second_ctrl_c_stops_at_once():
    with handle_signals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
