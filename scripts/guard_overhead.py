"""Measures what the guards of a run cost per step: watchdog, notices, spikes, comparisons of replicas, their records.

    python scripts/guard_overhead.py --steps 6000 --rounds 3

Each round trains a small model with the guards off, with the defaults and with all of them on (replicas compared every
100 steps), in a process each, one after the other. The figure is the processor time of all threads per step, between
step 1000 and the last, and the difference to the guards off in percent of a step of 100 ms: medians over the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

OFF = {"watchdog": {"enabled": False}, "notices": {"metadata": False}}
ON = {"watchdog": {}, "spikes": {"sigmas": 50.0}, "checks": {"replicas_every": 100}}
VARIANTS = {"off": OFF, "defaults": {}, "all": ON}
FIRST = 1000


def microseconds(name: str, steps: int) -> float:
    """Processor time per step of a run in this process."""
    import jaxtrain as jt

    config = {
        "name": name,
        "model": {"kind": "transformer", "num_layers": 1, "embed_dim": 32, "num_heads": 2, "max_sequence_length": 32},
        "data": {"kind": "text", "tokenizer": {"kind": "byte"}},
        "train": {"steps": steps, "global_batch_size": 8},
        "parallel": {"data": 2},
        "evaluation": {"every": None},
        "checkpoint": {"every": None},
        "logging": {"every": 10, "report": False, "tensorboard": False},
        **VARIANTS[name],
    }
    seen: list[float] = []
    callback = jt.Callback(on_step=lambda moment: seen.append(time.process_time()), every=FIRST)
    with tempfile.TemporaryDirectory() as folder:
        jt.run_config(config, run_dir=f"{folder}/run", callbacks=[callback])
    return 1e6 * (seen[-1] - seen[0]) / (steps - FIRST)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000, help="a multiple of 1000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help="measure one, in this process")
    options = parser.parse_args()
    if options.variant:
        import jaxtrain as jt

        jt.start(emulate=2)
        print("\n" + json.dumps(microseconds(options.variant, options.steps)))
        return
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(options.rounds):
        for name in VARIANTS:
            command = [sys.executable, __file__, "--variant", name, "--steps", str(options.steps)]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[name].append(float(said.splitlines()[-1]))
    off = statistics.median(found["off"])
    for name, values in found.items():
        more = statistics.median(values) - off
        print(
            f"{name:9} {statistics.median(values):7.0f} us per step ({min(values):.0f} to {max(values):.0f}); "
            f"{more:+6.0f} us, {more / 1e3:+.2f} % of a step of 100 ms"
        )


if __name__ == "__main__":
    main()
