"""Time to the first step: cold and warm starts of a config, commands without jax, and compiling a deeper model.

    python scripts/bench_start.py [--config quickstart] [--rounds 3] [--layers 6 48]

A start is timed from the start of the process to the end of its first step (the first row of metrics.jsonl). A cold
start has an empty cache folder, a warm start uses the folder of the cold start before it. Depths are compiled in fresh
processes without a cache, interleaved. The script prints one JSON object; figures are medians.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from jaxtrain.bench.measure import start_seconds  # noqa: E402  (the checkout's, not an installed one)

_LIMIT_SECONDS = 600
_LIGHT_COMMANDS = ("--help", "train --help", "config", "config quickstart")


def environment(cache: Path) -> dict[str, str]:
    """Make the environment of a timed process, with its own cache folder and the package of this checkout."""
    return {**os.environ, "JAXTRAIN_CACHE_DIR": str(cache), "PYTHONPATH": _path(), "PYTHONUNBUFFERED": "1"}


def _path() -> str:
    return os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


_COMPILE = """
import json, sys, time
from jaxtrain.runtime import distributed
from jaxtrain.config import load_config
from jaxtrain.plan.compile import batch_shapes
from jaxtrain.plan.workload import describe_workload
from jaxtrain.train.assemble import build_step
distributed.start(compilation_cache=None)
config = load_config(sys.argv[1], overrides=sys.argv[2:]).config
work = describe_workload(config)
step = build_step(config, input_shape=work.input_shape, vocab_size=work.vocab_size, num_outputs=work.num_outputs)
began = time.perf_counter()
lowered = step.lower(batch_shapes(work))
traced = time.perf_counter()
lowered.compile()
print(json.dumps({"trace": traced - began, "compile": time.perf_counter() - traced}))
"""


def compile_depth(config: str, layers: int, cache: Path) -> dict[str, float]:
    """Measure the seconds of tracing and of compiling the step of a config with `layers` layers."""
    command = [sys.executable, "-c", _COMPILE, config, f"model.num_layers={layers}"]
    done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, timeout=_LIMIT_SECONDS)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def processor_seconds(words: str) -> float:
    """Measure the processor time of a command, which other processes of the machine lengthen less than the clock."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "jaxtrain", *words.split()]
    environment = {**os.environ, "PYTHONPATH": _path()}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=_LIMIT_SECONDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the rounds and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--depth-config", default="bench_cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs=2, default=(6, 48))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the config that is started")
    arguments = parser.parse_args()
    cold, warm, said = [], [], {}
    light: dict[str, list[float]] = {words: [] for words in _LIGHT_COMMANDS}
    depths: dict[int, list[dict[str, float]]] = {layers: [] for layers in arguments.layers}
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name, seconds in (("cold", cold), ("warm", warm)):
                taken, said[name] = start_seconds(arguments.config, arguments.overrides, cache)
                seconds.append(taken)
        for words, seconds in light.items():
            seconds.append(processor_seconds(words))
        for layers, rows in depths.items():
            with tempfile.TemporaryDirectory() as cache:
                rows.append(compile_depth(arguments.depth_config, layers, Path(cache)))
        print(f"round {number + 1}: cold {cold[-1]:.2f} s, warm {warm[-1]:.2f} s, {depths}", file=sys.stderr)

    def depth_seconds(layers: int) -> float:
        return statistics.median(row["trace"] + row["compile"] for row in depths[layers])

    shallow, deep = arguments.layers
    answer = {
        "config": arguments.config,
        "cold_seconds": round(statistics.median(cold), 2),
        "warm_seconds": round(statistics.median(warm), 2),
        "cold_over_warm": round(statistics.median(cold) / statistics.median(warm), 2),
        "light_processor_seconds": {words: round(statistics.median(taken), 3) for words, taken in light.items()},
        "trace_and_compile_seconds": {str(layers): round(depth_seconds(layers), 2) for layers in depths},
        f"{deep}_layers_over_{shallow}": round(depth_seconds(deep) / depth_seconds(shallow), 3),
        "said": said,
    }
    print(json.dumps(answer, indent=2))


if __name__ == "__main__":
    main()
