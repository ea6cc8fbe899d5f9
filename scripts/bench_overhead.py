"""The overhead of the trainer over a plain loop: tokens/s, and the time from process start to the first step's end.

    python scripts/bench_overhead.py [--rounds 5] [--steps 15]

Each round runs the hand-written script and `jaxtrain train` one after the other in fresh processes, so that the noise
of a shared machine affects both. Figures are medians over the rounds. Cold starts use an empty compilation cache.
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

HERE = Path(__file__).resolve().parent


def run_bare(steps: int) -> dict[str, float]:
    """Run the hand-written script in a process, and return its figures and the seconds of the process."""
    began = time.time()
    command = [sys.executable, str(HERE / "bare_transformer.py"), str(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(None))
    figures = json.loads(done.stdout.splitlines()[-1])
    # The interpreter starts before the script's clock does.
    figures["total_seconds"] = time.time() - began
    return figures


def environment(cache: Path | None) -> dict[str, str]:
    """Make the environment of a timed process, with its own cache folder."""
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)}
    if cache is not None:
        settings["JAXTRAIN_CACHE_DIR"] = str(cache)
    return {**os.environ, **settings}


def run_trainer(steps: int, folder: Path, cache: Path) -> dict[str, float]:
    """Run `jaxtrain train` in a process; its first step ends when metrics.jsonl gets its first row."""
    metrics = folder / "metrics.jsonl"
    began = time.time()
    command = [sys.executable, "-m", "jaxtrain", "train", str(HERE.parent / "configs" / "bench_cpu.yaml")]
    command += [f"train.steps={steps}", "logging.every=1", "logging.report=false", "--run-dir", str(folder)]
    process = subprocess.Popen(command, env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    first = None
    while process.poll() is None and first is None:
        time.sleep(0.005)
        if metrics.exists() and metrics.stat().st_size:
            first = time.time() - began
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(errors.decode())
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [row["step_seconds"] for row in rows if "loss" in row][1:]
    loss = [row["loss"] for row in rows if "loss" in row][-1]
    return {"first_step_seconds": first or 0.0, "step_seconds": statistics.median(seconds), "loss": loss}


def main() -> None:
    """Run the two interleaved, and print ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    arguments = parser.parse_args()
    bare, trainer = [], []
    for index in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            bare.append(run_bare(arguments.steps))
            trainer.append(run_trainer(arguments.steps, Path(folder) / "run", Path(folder) / "cache"))
        print(f"round {index + 1}: bare {bare[-1]}  jaxtrain {trainer[-1]}", flush=True)

    def median(rows: list[dict[str, float]], name: str) -> float:
        return statistics.median(row[name] for row in rows)

    speed = median(bare, "step_seconds") / median(trainer, "step_seconds")
    start = median(trainer, "first_step_seconds") / median(bare, "first_step_seconds")
    rates = [16 * 256 / median(rows, "step_seconds") for rows in (bare, trainer)]
    print(f"tokens/s: bare {rates[0]:.0f}, jaxtrain {rates[1]:.0f}")
    print(f"tokens/s of jaxtrain over bare: {speed:.3f} (goal: at least 0.97)")
    print(f"start to end of first step, cold: {start:.2f} x bare (goal: at most 1.6)")


if __name__ == "__main__":
    main()
