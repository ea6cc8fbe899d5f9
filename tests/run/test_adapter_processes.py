"""Adapter runs in real processes: killed without warning, and resumed by two processes that share the mesh."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_processes import finish, start_two, wait_for
from training_runs import command, environment, losses, run_process, saved_arrays, write_config

STEPS = 40
LORA = dict(lora=dict(rank=2, dropout=0.1))


@pytest.mark.long
def test_a_killed_adapter_run_loses_what_any_run_loses_and_two_processes_resume_it(tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        finetune=LORA,
        parallel=dict(data=2, fsdp=2),
        train__steps=STEPS,
        checkpoint=dict(every=5),
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_process(config, whole, "--emulate", "4").returncode == 0
    process = subprocess.Popen(
        command(config, killed, "--emulate", "4"), stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for((killed / "checkpoints" / "5" / "jaxtrain").is_dir, process)
    process.kill()
    process.communicate()
    for code, _, errors in finish(start_two(config, killed)):
        assert code == 0, errors
    left, expected = losses(killed), losses(whole)
    assert list(left) == list(expected)
    # The two processes add up gradients over loopback in another order: the last bits, as between layouts.
    np.testing.assert_allclose(list(left.values()), list(expected.values()), rtol=1e-5)
    found, wanted = saved_arrays(killed, STEPS), saved_arrays(whole, STEPS)
    assert found.keys() == wanted.keys()
    assert all(name.endswith(("lora_a", "lora_b")) for name in found)
