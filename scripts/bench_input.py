"""Input: images that one core decodes and augments per second, and the share of a step that configs wait for data.

    python scripts/bench_input.py images                       (rate per core, by size of the file and by threads)
    python scripts/bench_input.py wait quickstart bench_cpu    (no name: every config that trains on any machine)

The script makes the images: smooth shapes with noise, JPEG of quality 90, close to ImageNet's 110 kB at 500 x 375.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from jaxtrain.config.data import ImageFolderData

SIZES = {"ImageNet's 500 x 375": (500, 375), "a photo of 2000 x 1500": (2000, 1500)}
IMAGES, ROUNDS = 24, 5
# Enough steps for about 10 s each; the first ones, in which the queue is empty, are not counted.
CONFIGS = {"quickstart": 100, "bench_cpu": 15, "digits_mlp": 400, "digits_resnet": 200, "tabular_mlp": 400}
SKIPPED = 5


def write_images(folder: Path, width: int, height: int) -> int:
    """Write JPEGs of two classes, and return the mean size of a file in bytes."""
    from PIL import Image

    random = np.random.default_rng(0)
    sizes = []
    for number in range(IMAGES):
        coarse = random.integers(0, 256, (height // 25, width // 25, 3), np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + random.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
        path = folder / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        Image.fromarray(noisy).save(path, quality=90)
        sizes.append(path.stat().st_size)
    return round(statistics.mean(sizes))


def images() -> None:
    """Time decoding and augmenting in seconds of processor time, which other jobs on the machine do not change."""
    from jaxtrain.data import Batches, open_data

    for name, (width, height) in SIZES.items():
        with tempfile.TemporaryDirectory() as temporary:
            size = write_images(Path(temporary), width, height)
            config = ImageFolderData(path=temporary, validation_fraction=0.1)
            rows = open_data(config, sequence_length=None, seed=0).train
            used = []
            for _ in range(ROUNDS):
                began = time.process_time()
                for index in range(IMAGES):
                    rows[index]
                used.append((time.process_time() - began) / IMAGES)
            core = statistics.median(used)
            print(f"{name} ({size / 1e3:.0f} kB): {1 / core:,.0f} images/s per core ({core * 1e3:.2f} ms each)")
            for workers in (1, 2, 4):
                batches = Batches(rows, IMAGES, seed=0, shuffle=True, workers=workers)
                shardings = dict.fromkeys(batches.spec(), _one_device())
                rates = []
                for k in range(ROUNDS):
                    began = time.perf_counter()
                    batches.load(k, shardings)
                    rates.append(IMAGES / (time.perf_counter() - began))
                print(f"  {workers} workers on {len(os.sched_getaffinity(0))} cores: {statistics.median(rates):,.0f}")


def _one_device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def wait(names: list[str]) -> None:
    """Train a few steps, and read the wait for data from metrics.jsonl."""
    for name in names or CONFIGS:
        steps = CONFIGS.get(name, 50)
        with tempfile.TemporaryDirectory() as temporary:
            options = [f"train.steps={steps}", "logging.every=1", "logging.report=false", "logging.tensorboard=false"]
            options += ["evaluation.every=null", "evaluation.max_batches=1", "checkpoint.every=null"]
            command = [sys.executable, "-m", "jaxtrain", "train", name, *options, "--run-dir", f"{temporary}/run"]
            subprocess.run(command, check=True, capture_output=True)
            lines = (Path(temporary) / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if "step_seconds" in row and row["step"] > SKIPPED]
        waited, took = (sum(row[key] for row in rows) for key in ("data_wait_seconds", "step_seconds"))
        median = statistics.median(row["data_wait_seconds"] / row["step_seconds"] for row in rows)
        print(
            f"{name}: {len(rows)} steps of {took / len(rows) * 1e3:.2f} ms, data wait {waited / took:.2%} of the time, "
            f"median of a step {median:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    kind, *rest = sys.argv[1:] or ["images"]
    if kind == "images":
        images()
    else:
        wait(rest)
