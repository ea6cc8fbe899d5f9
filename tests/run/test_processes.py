"""More than one process over loopback, and what signals do to a run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from training_runs import command, environment, losses, run_process, saved_arrays, write_config

from jaxtrain.run.lock import RunLock


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_two(config: Path, run_dir: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """Two real processes with two devices each, that find one another through the environment."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for index in range(2):
        variables = dict(JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index))
        processes.append(
            subprocess.Popen(
                command(config, run_dir, "--emulate", "2", *arguments),
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
def test_one_process_then_two(tmp_path: Path) -> None:
    """A run of one process with four devices goes on in two processes with two each."""
    sample = dict(max_batches=2, sample_prompt="The", sample_tokens=5)
    config = write_config(tmp_path, train__steps=8, evaluation=sample)
    layout = ("parallel.fsdp=2",)
    first = run_process(config, tmp_path / "moved", "--emulate", "4", "train.steps=4", *layout)
    assert first.returncode == 0, first.stderr
    results = finish(start_two(config, tmp_path / "moved", *layout))
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming step 4" in results[0][2]
    assert "step 8/8" in results[0][2]
    assert "step 8/8" not in results[1][2], "only the first process talks"
    assert (tmp_path / "moved" / "sample.txt").read_text().startswith("The")
    alone = run_process(config, tmp_path / "alone", "--emulate", "4", *layout)
    assert alone.returncode == 0, alone.stderr
    moved, still = losses(tmp_path / "moved"), losses(tmp_path / "alone")
    assert list(moved) == list(still) == list(range(1, 9))
    # Reductions between processes sum in another order: 2^-24 a sum.
    np.testing.assert_allclose(list(moved.values()), list(still.values()), rtol=1e-5)
    a, b = saved_arrays(tmp_path / "moved", 8), saved_arrays(tmp_path / "alone", 8)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=2e-5, err_msg=name)


@pytest.mark.long
def test_sigterm_to_one_of_two_processes_saves_on_both(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__steps=100000)
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
        tmp_path, task="classification", data=images, model=dict(kind="mlp"), train=dict(steps=50, global_batch_size=4)
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
    with RunLock(tmp_path / "run"):
        results = finish(start_two(config, tmp_path / "run"))
    assert [code for code, _, _ in results] == [2, 2], results
    assert "in use by process" in results[0][2]
    assert "process 0 could not start" in results[1][2]


@pytest.mark.long
@pytest.mark.parametrize("stopped", [0, 1], ids=["process 0", "process 1"])
def test_processes_that_wait_for_a_run_directory_stop_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    monkeypatch.setenv("JAXTRAIN_JOIN_TIMEOUT_SECONDS", "200")
    config = write_config(tmp_path, train__steps=4)
    with RunLock(tmp_path / "run"):
        processes = start_two(config, tmp_path / "run")
        assert processes[0].stderr is not None
        assert any("waiting up to" in line for line in iter(processes[0].stderr.readline, ""))
        began = time.monotonic()
        processes[stopped].send_signal(signal.SIGTERM)
        results = finish(processes)
    assert [code for code, _, _ in results] == [75, 75], results
    assert "where nothing was unsaved" in results[0][2]
    assert time.monotonic() - began < 60


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "ctrl-c"])
def test_a_signal_finishes_the_step_saves_and_exits_75(tmp_path: Path, number: signal.Signals) -> None:
    config = write_config(tmp_path, train__steps=100000)
    process = subprocess.Popen(
        command(config, tmp_path / "run", "--emulate", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_for(lambda: steps_logged(tmp_path / "run") >= 3, process)
    process.send_signal(number)
    [(code, _, errors)] = finish([process])
    assert code == 75, errors
    assert "Traceback" not in errors
    last = max(losses(tmp_path / "run"))
    assert f"stopped after step {last} of 100000" in errors
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "preempted"
    again = run_process(config, tmp_path / "run", "--emulate", "1", f"train.steps={last + 2}")
    assert again.returncode == 0, again.stderr
    assert f"resuming step {last}" in again.stderr
    assert list(losses(tmp_path / "run")) == list(range(1, last + 3))


def test_kill_loses_at_most_the_work_since_the_last_save(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__steps=100000, checkpoint__every=5)
    process = subprocess.Popen(
        command(config, tmp_path / "run", "--emulate", "1"), stderr=subprocess.DEVNULL, env=environment()
    )
    wait_for(lambda: steps_logged(tmp_path / "run") >= 23, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    reached = max(losses(tmp_path / "run"))
    again = run_process(config, tmp_path / "run", "--emulate", "1", f"train.steps={reached + 5}", "--resume", "must")
    assert again.returncode == 0, again.stderr
    resumed = int(again.stderr.split("resuming step ")[1].split()[0])
    assert resumed % 5 == 0
    assert reached - resumed <= 10, "one save may be in flight besides the steps since the last"
    assert list(losses(tmp_path / "run")) == list(range(1, reached + 6))


@pytest.mark.long
def test_a_second_process_is_kept_off_the_run_directory(tmp_path: Path) -> None:
    config = write_config(tmp_path, train__steps=100000)
    process = subprocess.Popen(
        command(config, tmp_path / "run", "--emulate", "1"), stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        wait_for(lambda: steps_logged(tmp_path / "run") >= 1, process)
        second = run_process(config, tmp_path / "run", "--emulate", "1")
        assert second.returncode == 2
        lines = second.stderr.strip().splitlines()
        assert len(lines) == 1
        assert f"in use by process {process.pid}" in lines[0]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_float16_is_refused_where_processes_would_add_it_up(tmp_path: Path) -> None:
    """Gloo drops numbers from sums of float16: 54,944 - 100 is -100 there."""
    config = write_config(tmp_path, train__steps=2)
    for status, _, err in finish(start_two(config, tmp_path / "run", "precision.policy=fp16")):
        assert status == 2, err
        lines = [line for line in err.splitlines() if line.startswith("jaxtrain: ")]
        assert len(lines) == 1
        assert "fp16 computes in float16, of which Gloo loses numbers" in lines[0]


# Every float16 that is not negative and finite, and -100 from another process: how many sums are not what they are.
SUMS = """
import sys
import jax, ml_dtypes, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x[0], "d"), mesh=mesh, in_specs=PartitionSpec("d"),
                            out_specs=PartitionSpec()))
halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
for dtype, within in ((np.float16, 0.001), (ml_dtypes.bfloat16, 0.01)):
    rows = np.stack([halves, np.full_like(halves, -100)]).astype(dtype)
    whole = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, PartitionSpec("d")), lambda at: rows[at])
    found = np.asarray(add(whole).addressable_data(0)).astype(np.float64)
    right = rows.astype(np.float64).sum(0)
    print(int((np.abs(found - right) > within * (np.abs(right) + 100)).sum()))
"""


@pytest.mark.long
def test_gloo_still_drops_numbers_from_sums_of_float16() -> None:
    """Where this fails, `precision/sums.py` may let several processes on CPUs compute in float16 again."""
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SUMS, address, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(XLA_FLAGS="--xla_force_host_platform_device_count=1"),
        )
        for index in range(2)
    ]
    for status, out, err in finish(processes):
        assert status == 0, err
        wrong = [int(line) for line in out.splitlines() if line.isdigit()]
        assert wrong[0] > 0
        assert wrong[1] == 0
