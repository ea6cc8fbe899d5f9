"""Where a step of bench_cpu goes on a CPU beside the same step in torch.compile: a table by kind of operation.

    python scripts/profile_transformer.py --peers-python PEERS/bin/python [--rounds 3] [--steps 3]

PEERS is an environment with torch. In each round both processes start anew, one after the other, and profile some steps
on the same batches from the same initial values (scripts/peers/given.py). Figures are milliseconds of wall time per
step, medians over the rounds: of kernels that run at once, each counts for its part. The first row is the time of as
many steps without a profiler.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_peers import HERE, write_given


def profiled(python: str, file: str, steps: int, given: Path) -> dict[str, Any]:
    """Return the JSON line of a profile in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu", "PEER_GIVEN": str(given)}
    done = subprocess.run(
        [python, str(HERE / "peers" / file), str(steps)], capture_output=True, text=True, env=environment, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{file} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return json.loads(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps are at least 1")
    both: dict[str, list[dict[str, Any]]] = {"jaxtrain": [], "torch.compile": []}
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile("w+") as errors:
        given = write_given("transformer", Path(name), steps=2 + 2 * arguments.steps, errors=errors)
        for _ in range(arguments.rounds):
            both["jaxtrain"].append(profiled(sys.executable, "profile_ours.py", arguments.steps, given))
            both["torch.compile"].append(profiled(arguments.peers_python, "profile_torch.py", arguments.steps, given))
    names = {name for found in both.values() for one in found for name in one["rows"]}
    columns = [
        {
            "a step, without a profiler": statistics.median(one["plain_ms"] for one in found),
            "a step, profiled": statistics.median(one["profiled_ms"] for one in found),
            **{name: statistics.median(one["rows"].get(name, 0.0) for one in found) for name in sorted(names)},
        }
        for found in both.values()
    ]
    print(f"| ms a step | {' | '.join(both)} | torch.compile over jaxtrain |\n|---|---|---|---|")
    for name, ours in columns[0].items():
        theirs = columns[1][name]
        ratio = f"{theirs / ours:.2f}" if ours >= 1 else ""
        print(f"| {name} | {ours:.1f} | {theirs:.1f} | {ratio} |")


if __name__ == "__main__":
    main()
