"""Two processes with four devices each, started by `jaxtrain launch`, train as one process with eight."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from training_runs import environment, losses, write_config

import jaxtrain as jt

LAYOUTS = {
    "data": ["parallel.data=8", "train.accumulation_steps=2"],
    "fsdp x tensor": ["parallel.fsdp=4", "parallel.tensor=2", "train.accumulation_steps=2"],
    "stages across processes": ["parallel.pipe=2", "parallel.data=4", "parallel.microbatches=2"],
}
SHORT = dict(train__steps=4, evaluation={"max_batches": 2})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("alone")
    layout = {"parallel.data": 8, "train.accumulation_steps": 2, "train.global_batch_size": 16}
    jt.run_config(str(write_config(folder, **SHORT)), run_dir=folder / "run", overrides=layout)
    return losses(folder / "run")


@pytest.mark.parametrize("row", ["data", *(pytest.param(row, marks=pytest.mark.long) for row in list(LAYOUTS)[1:])])
def test_same_losses(row: str, alone: dict[int, float], tmp_path: Path) -> None:
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
