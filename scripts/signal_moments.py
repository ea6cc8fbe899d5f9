"""Signals at random moments of a run, until it is done; then what it left beside what an undisturbed run left.

    python scripts/signal_moments.py --moments 25 --seed 0 [--kill] [--processes 2] [--store s3://bucket/moments]

Each start of the run gets one signal (TERM, INT, USR1, USR2 or HUP) after a time drawn from the length of an
undisturbed start, and must end with exit code 75, or 0 where it was done before. With `--kill` it is killed (KILL), or
with `--processes` one of its processes is, and the others must end by themselves. It prints a line for each, with the
seconds from the signal to the end, and ends with exit code 1 where anything differs. With `--store` the checkpoints are
in an object store, each run's in a folder of its own.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.run_folder import checkpoint_folder

STORE = "JAXTRAIN_MOMENTS_STORE"  # the address that the starts read
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
STEPS = 40
CONFIG = {
    "name": "moments",
    "model": {"kind": "transformer", "num_layers": 2, "embed_dim": 32, "num_heads": 4, "max_sequence_length": 32},
    "data": {"kind": "text", "tokenizer": {"kind": "byte"}},
    "train": {"steps": STEPS, "global_batch_size": 8},
    "evaluation": {"every": 8, "max_batches": 20, "sample_prompt": "The", "sample_tokens": 20},
    "checkpoint": {"every": 10, "keep_last": 9},
    "logging": {"every": 1, "tensorboard": False},
}


def outcome(run_dir: Path) -> dict[str, Any]:
    """What must not depend on the signals."""
    with Checkpointer(checkpoint_folder(run_dir), read_only=True) as checkpointer:
        info = checkpointer.verify(STEPS)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "checkpoint": info.digests,
        "eval_loss": info.eval_loss,
        "losses": [(row["step"], row["loss"]) for row in rows if "loss" in row],
        "evaluations": [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row],
        "sample": (run_dir / "sample.txt").read_text(),
        "status": json.loads((run_dir / "run.json").read_text())["status"],
        "report": (run_dir / "report.html").exists(),
    }


def start(config: Path, run_dir: Path, processes: int) -> subprocess.Popen[str]:
    command = ["train", str(config), "--run-dir", str(run_dir)]
    if STORE in os.environ:
        command += [f"checkpoint.directory={os.environ[STORE]}/{run_dir.parent.name}/{run_dir.name}"]
    command = command if processes == 1 else ["launch", "--processes", str(processes), "--", *command]
    command = [sys.executable, "-m", "jaxtrain", *command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run_to_the_end(config: Path, run_dir: Path, processes: int) -> float:
    """The seconds that a start without a signal takes."""
    began = time.monotonic()
    process = start(config, run_dir, processes)
    _, said = process.communicate(timeout=600)
    if process.returncode:
        sys.exit(f"a start without a signal ended with exit code {process.returncode}:\n{said}")
    return time.monotonic() - began


def signalled(
    config: Path, run_dir: Path, number: signal.Signals, after: float, processes: int, victim: int
) -> tuple[int, float, str]:
    """Exit code, seconds from the signal to the end, and standard error of a start that gets a signal."""
    process = start(config, run_dir, processes)
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        if number == signal.SIGKILL and processes > 1:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if len(children) == processes:  # else it is not yet started
                os.kill(int(children[victim]), number)
        else:
            process.send_signal(number)
    sent = time.monotonic()
    _, said = process.communicate(timeout=300)
    return process.returncode, time.monotonic() - sent, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=25, help="number of signals")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and signals")
    parser.add_argument("--kill", action="store_true", help="KILL in place of the signals that are heard")
    parser.add_argument("--processes", type=int, default=1, help="of the run, by `jaxtrain launch`")
    parser.add_argument("--store", metavar="ADDRESS", help="gs://bucket/name or s3://bucket/name for the checkpoints")
    options = parser.parse_args()
    if options.store is not None:
        os.environ[STORE] = options.store
    draw = random.Random(options.seed)
    wrong, processes = [], options.processes
    signals = (signal.SIGKILL,) if options.kill else SIGNALS
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "moments.yaml"
        config.write_text(json.dumps(CONFIG))  # JSON is YAML
        run_to_the_end(config, Path(folder) / "first", processes)  # compiles
        length = run_to_the_end(config, Path(folder) / "whole", processes)
        whole = outcome(Path(folder) / "whole")
        run_dir = Path(folder) / "run-0"
        for moment in range(options.moments):
            number, after, victim = draw.choice(signals), draw.uniform(0.1, length), draw.randrange(processes)
            began = time.monotonic()
            code, seconds, said = signalled(config, run_dir, number, after, processes, victim)
            if code == 0:  # the machine was busier when the length was measured
                length = min(length, time.monotonic() - began)
            last = re.sub(r"\s+", " ", said.strip().splitlines()[-1] if said.strip() else "")[:150]
            print(f"{moment:3} {number.name} after {after:.1f} s: exit code {code}, {seconds:.1f} s later; {last}")
            # Ctrl-C is Python's before the run begins, and so are all signals before Python has begun.
            is_early = code < 0 or code == 130
            is_killed = options.kill and (code == -signal.SIGKILL if processes == 1 else "Traceback" not in said)
            if code not in (0, 75) and not is_killed and not (is_early and "step" not in said):
                wrong.append(f"moment {moment}: exit code {code}: {said[-2000:]}")
            if code == 0 or moment == options.moments - 1:
                run_to_the_end(config, run_dir, processes)
                found = outcome(run_dir)
                wrong += [f"{run_dir.name}: {key} differs" for key, value in whole.items() if found[key] != value]
                run_dir = Path(folder) / f"run-{moment + 1}"
    print("\n".join(wrong) or "nothing was lost")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
