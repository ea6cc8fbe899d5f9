"""Trains for many steps with everything on that runs beside a step, and watches the process from outside.

    python scripts/soak.py --steps 20000

The run evaluates, samples, saves, prunes, compares replicas, replays steps and looks for spikes. Memory, threads and
open files are read from /proc, files from the run directory, once per second. It prints one row (medians) for each
tenth of the run, and ends with exit code 1 where the run failed, or where the last tenth is above the third: the least
number of threads, open files or files of the run by more than --few (a save that is being written adds some), the
median of memory by more than --fraction.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """What was seen of the process at one moment."""

    step: float
    memory_mib: float
    threads: float
    descriptors: float
    files: float
    run_mib: float


def config(steps: int) -> dict[str, object]:
    """A small model that takes a few milliseconds per step, with every check on."""
    return {
        "name": "soak",
        "model": {"kind": "transformer", "num_layers": 1, "embed_dim": 32, "num_heads": 2, "max_sequence_length": 32},
        "data": {"kind": "text", "tokenizer": {"kind": "byte"}},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
        "train": {"steps": steps, "global_batch_size": 8},
        "parallel": {"data": 2},
        "spikes": {"window": 50, "sigmas": 20.0, "action": "skip"},
        "checks": {"replay_every": 500, "replicas_every": 100},
        "watchdog": {},
        "evaluation": {"every": 250, "max_batches": 2, "sample_prompt": "The", "sample_tokens": 8},
        "checkpoint": {"every": 500, "keep_last": 3},
        "logging": {"every": 10},
    }


def sample(pid: int, run_dir: Path) -> Sample | None:
    """What is there of a process and its run; None before its first row of metrics, and once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        named = dict(line.split(":", 1) for line in status.splitlines())
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        with (run_dir / "metrics.jsonl").open("rb") as rows:
            rows.seek(max(0, rows.seek(0, os.SEEK_END) - 2000))
            last = rows.read().splitlines()[-2:]
        step = json.loads(last[0])["step"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    sizes = []
    for path in run_dir.rglob("*"):
        try:
            if path.is_file():
                sizes.append(path.stat().st_size)
        except FileNotFoundError:
            pass  # pruned meanwhile
    memory = int(named["VmRSS"].split()[0]) / 1024 if "VmRSS" in named else 0.0
    return Sample(step, memory, int(named["Threads"]), descriptors, len(sizes), sum(sizes) / 2**20)


def merged(samples: list[Sample], merge: Callable[[list[float]], float]) -> Sample:
    """One sample that has in each field what `merge` makes of all."""
    return Sample(**{field.name: merge([getattr(one, field.name) for one in samples]) for field in fields(Sample)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--few", type=int, default=2, help="threads, open files and folders that may come and go")
    parser.add_argument("--fraction", type=float, default=0.03, help="of memory that may come and go")
    options = parser.parse_args()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder) / "soak.yaml", Path(folder) / "run"
        path.write_text(json.dumps(config(options.steps)))  # JSON is YAML
        command = [sys.executable, "-m", "jaxtrain", "train", str(path), "--run-dir", str(run_dir), "--emulate", "2"]
        began = time.monotonic()
        with (Path(folder) / "said.txt").open("w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
            while process.poll() is None:
                seen = sample(process.pid, run_dir)
                samples += [seen] if seen and seen.step < options.steps else []  # not of the report at the end
                time.sleep(1.0)
        seconds = time.monotonic() - began
        if process.returncode:
            print((Path(folder) / "said.txt").read_text()[-3000:])
            return 1
        rows = len((run_dir / "metrics.jsonl").read_text().splitlines())
    if len(samples) < 20:
        sys.exit(f"{len(samples)} samples: give more --steps")
    tenths = [samples[len(samples) * part // 10 : len(samples) * (part + 1) // 10] for part in range(10)]
    print(f"{options.steps} steps in {seconds:.0f} s, {len(samples)} samples, {rows} rows of metrics")
    print("  step  MiB in memory  threads  open files  files in the run  MiB of the run")
    for tenth in tenths:
        one = merged(tenth, statistics.median)
        print(
            f"{one.step:6.0f}  {one.memory_mib:13.1f}  {one.threads:7.0f}  {one.descriptors:10.0f}  {one.files:16.0f}"
            f"  {one.run_mib:14.2f}"
        )
    early, late = merged(tenths[2], min), merged(tenths[9], min)
    before_mib, after_mib = (merged(tenths[part], statistics.median).memory_mib for part in (2, 9))
    wrong = [
        f"{name} grew from {before} to {after}"
        for name, before, after, allowed in (
            ("threads", early.threads, late.threads, options.few),
            ("open files", early.descriptors, late.descriptors, options.few),
            ("files in the run", early.files, late.files, options.few),
            ("MiB in memory", before_mib, after_mib, options.fraction * before_mib),
        )
        if after - before > allowed
    ]
    print("\n".join(wrong) or "flat")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
