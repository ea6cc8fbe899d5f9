"""DPO in two processes, which `jaxtrain launch` starts: the losses of one, the reference kept once, and resuming."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

CONFIG = {
    "task": "dpo",
    "model": {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "max_sequence_length": 40},
    "finetune": {"lora": {"rank": 2}},
    "data": {
        "kind": "chat",
        "path": "pairs.jsonl",
        "validation_fraction": 0.0,
        "template": "plain",
        "packing": False,
        "tokenizer": {"kind": "byte"},
    },
    "optimizer": {"kind": "adamw", "learning_rate": 0.01, "schedule": {"kind": "constant", "warmup_steps": 0}},
    "train": {"steps": 4, "global_batch_size": 4},
    "checkpoint": {"every": 2},
    "logging": {"every": 1, "report": False, "tensorboard": False},
}
ONE = ("train", "dpo.json", "--emulate", "2")
TWO = ("launch", "--processes", "2", "--emulate", "1", "--", "train", "dpo.json")


@pytest.mark.long
def test_two_processes_train_as_one_and_go_on(tmp_path):
    """Sums over devices are in another order between processes: losses agree to rounding."""
    pairs = [{"prompt": f"{i}?", "chosen": f"It is {i}.", "rejected": f"No {i + 1}."} for i in range(10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "dpo.json").write_text(json.dumps(CONFIG))

    def train(words, folder, *overrides):
        command = [sys.executable, "-m", "jaxtrain", *words, "--run-dir", folder, "parallel.fsdp=2", *overrides]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if "loss" in row]

    wanted = train(ONE, "one")
    first = train(TWO, "two", "train.steps=2")
    kept = (tmp_path / "two" / "reference.npz").read_bytes()
    found = train(TWO, "two")
    assert abs(first[0] - np.log(2)) < 1e-6
    assert found[:2] == first
    assert (tmp_path / "two" / "reference.npz").read_bytes() == kept
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
