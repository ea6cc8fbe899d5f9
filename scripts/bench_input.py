"""Input: images that one core decodes and augments per second, and the share of a step that configs wait for data.

    python scripts/bench_input.py images                       (rate per core, by size of the file and by threads)
    python scripts/bench_input.py wait quickstart bench_cpu    (no name: every config that trains on any machine)
    python scripts/bench_input.py formats                      (processor time per row by format, and the share waited)

The script makes the images: smooth shapes with noise, JPEG of quality 90, close to ImageNet's 110 kB at 500 x 375.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config.data import ImageFolderData

SIZES = {"ImageNet's 500 x 375": (500, 375), "a photo of 2000 x 1500": (2000, 1500)}
IMAGES, ROUNDS = 24, 5
# Enough steps for about 10 s each; the first ones, in which the queue is empty, are not counted.
CONFIGS = {"quickstart": 100, "bench_cpu": 15, "digits_mlp": 400, "digits_resnet": 200, "tabular_mlp": 400}
SKIPPED = 5
# Texts per format, and the length of a step that only sleeps.
TEXTS, STEP_SECONDS = 20_000, 0.1


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


def formats() -> None:
    """Time a row in each format, and the share of steps of 100 ms that wait for batches of 32 rows read ahead.

    Texts of about 200 bytes are read in random order and not encoded; the time is of the processor, so that other jobs
    on the machine do not change it. The steps sleep.
    """
    import pyarrow
    from pyarrow import ipc, parquet

    from jaxtrain.data import Batches, open_data, prefetch
    from jaxtrain.data.formats.opened import find_rows, open_rows

    random = np.random.default_rng(0)
    texts = [f"text {i} " * int(random.integers(10, 40)) for i in range(TEXTS)]
    table = pyarrow.table({"text": texts})
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["JAXTRAIN_CACHE_DIR"] = temporary
        files = _format_files(Path(temporary), texts, table, parquet, ipc)
        for name, path in files.items():
            reader = open_rows(find_rows(str(path), what="the file"), [("field", "text")], label=name)
            used = []
            for _ in range(ROUNDS):
                numbers = random.integers(0, TEXTS, 320).tolist()
                began = time.process_time()
                for first in range(0, 320, 32):
                    reader.rows(numbers[first : first + 32])
                used.append((time.process_time() - began) / 320)
            if name == "parquet_groups_of_1000":
                _time_without_memory(path, random)
            data = open_data({"kind": "documents", "path": str(path), "rows": "document"}, sequence_length=128)
            batches = Batches(data.train, 32, seed=0, shuffle=True)
            shardings = dict.fromkeys(batches.spec(), _one_device())
            waited, steps = [], 40
            found = prefetch(lambda k, b=batches, s=shardings: b.load(k, s), 0, steps, depth=16)
            for _ in range(steps):
                began = time.perf_counter()
                next(found)
                waited.append(time.perf_counter() - began)
                time.sleep(STEP_SECONDS)
            share = statistics.median(waited[SKIPPED:]) / STEP_SECONDS
            mean = sum(waited[SKIPPED:]) / (STEP_SECONDS * len(waited[SKIPPED:]))
            print(
                f"{name}: {statistics.median(used) * 1e6:,.0f} us per row; of a step waited {share:.2%} (median), "
                f"{mean:.2%} (mean)",
                flush=True,
            )


def _time_without_memory(path: Path, random: np.random.Generator) -> None:
    """Time rows of Parquet files that are too large for their row groups to stay in memory."""
    from jaxtrain.data.files import file_state
    from jaxtrain.data.formats.parquet import GroupCache, ParquetReader

    reader, used = ParquetReader(file_state(path), [("field", "text")], GroupCache(1)), []
    for _ in range(ROUNDS):
        numbers = random.integers(0, TEXTS, 320).tolist()
        began = time.process_time()
        for first in range(0, 320, 32):
            reader.rows(numbers[first : first + 32])
        used.append((time.process_time() - began) / 320)
    print(f"{path.stem}, no group in memory: {statistics.median(used) * 1e6:,.0f} us per row")


def _format_files(folder: Path, texts: list[str], table: Any, parquet: Any, ipc: Any) -> dict[str, Path]:
    """Write the same texts in every format that is read by row."""
    import io
    import tarfile

    from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue] compiled

    files = {
        name: folder / f"{name}.{suffix}"
        for name, suffix in (
            ("arrow", "arrow"),
            ("lines", "jsonl"),
            ("tar", "tar"),
            ("array_record", "array_record"),
            ("parquet_groups_of_1000", "parquet"),
            ("parquet_one_group", "parquet"),
        )
    }
    with ipc.new_stream(str(files["arrow"]), table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    files["lines"].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with tarfile.open(files["tar"], "w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number:06d}.text")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    writer = array_record_module.ArrayRecordWriter(str(files["array_record"]), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    parquet.write_table(table, files["parquet_groups_of_1000"], row_group_size=1000, compression="zstd")
    parquet.write_table(table, files["parquet_one_group"], row_group_size=len(texts), compression="zstd")
    return files


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("images", "wait", "formats"), default="images")
    parser.add_argument("configs", nargs="*", help="for wait")
    asked = parser.parse_args()
    if asked.kind == "images":
        images()
    elif asked.kind == "formats":
        formats()
    else:
        wait(asked.configs)
