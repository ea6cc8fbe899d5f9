"""jaxtrain and its peers on the same work in the same run: tokens/s, memory, time to the first step.

    python scripts/bench_peers.py --peers-python PEERS/bin/python [--rounds 5] [--only PyTorch] [--json FILE]

PEERS is an environment with `pip install '.[peers]'` (torch, keras). Every peer is a process that stays alive.
In each round every peer makes a block of steps, one peer after the other, so that the noise of a shared machine affects
all of them. Figures are medians over the rounds. All peers train the transformer of configs/bench_cpu.yaml in float32
from the same initial values, on the same batches in the same order, at the same learning rates, with the same
optimizer, clipping and weight decay (scripts/peers/given.py writes them). Where the mean losses of their last blocks
differ by more than 2 %, the script prints no ratio and ends with exit code 1.
"""

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from jaxtrain.bench.measure import machine  # noqa: E402  (the checkout's, not an installed one)
from jaxtrain.config.model import TransformerConfig  # noqa: E402
from jaxtrain.metrics.flops import model_flops_per_row  # noqa: E402

# Largest relative difference of the losses of two peers after the same steps. Rounding differs between their programs,
# and grows with the steps; another schedule, order or initial value differs by much more.
_SAME_LOSS = 0.02
_CONFIG = "bench_cpu"
_ROWS, _LENGTH = 16, 256


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes:
        name: the name in the table.
        command: file in scripts/peers and its arguments.
        theirs: whether it runs in the environment of the peers.
    """

    name: str
    command: tuple[str, ...]
    theirs: bool = False


PEERS = (
    Peer("jaxtrain", ("ours.py", _CONFIG)),
    Peer("hand-written JAX, no remat", ("bare_jax.py", "none")),
    Peer("hand-written JAX, remat dots", ("bare_jax.py", "dots")),
    Peer("hand-written JAX, remat full", ("bare_jax.py", "full")),
    Peer("PyTorch eager", ("torch_transformer.py", "eager"), theirs=True),
    Peer("PyTorch torch.compile", ("torch_transformer.py", "compile"), theirs=True),
    Peer("Keras on JAX", ("keras_transformer.py",), theirs=True),
)


def step_flops() -> float:
    """Count the model FLOPs of one step."""
    model = TransformerConfig(position="learned", norm="layernorm", activation="gelu")
    row = model_flops_per_row(model, sequence_length=_LENGTH, input_shape=None, num_outputs=None, vocab_size=256)
    assert row is not None
    return row * _ROWS


@dataclass
class Running:
    """The process of a peer and the figures that it printed.

    Attributes:
        peer: the row of the table.
        process: reads numbers of steps and prints JSON lines.
        facts: of the peer, from its first and its last line.
        blocks: figures of each block of steps.
        error: why the process ended; None while it works.
    """

    peer: Peer
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    blocks: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None


def ask(running: Running, steps: int | None) -> dict[str, Any]:
    """Read the next line of a peer; where its process ends instead, `error` is set.

    Args:
        running: the peer.
        steps: number of steps to ask for before; None: ask for nothing.
    """
    try:
        if steps is not None:
            assert running.process.stdin is not None
            running.process.stdin.write(f"{steps}\n")
            running.process.stdin.flush()
        assert running.process.stdout is not None
        for line in running.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
    except OSError:
        pass
    running.process.wait(timeout=60)
    running.error = f"ended with {running.process.returncode}"
    return {}


def write_given(folder: Path, *, steps: int, errors: IO[str]) -> None:
    """Write what all peers start from and step on; each of them will make `steps` steps."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "peers" / "given.py"), str(folder), str(steps), _CONFIG]
    done = subprocess.run(command, stdout=errors, stderr=errors, env=environment, check=False)
    if done.returncode:
        errors.seek(0)
        raise SystemExit(f"bench_peers: what the peers start from was not written: {errors.read()[-2000:]}")


def launch(peer: Peer, python: str, errors: IO[str], given: Path) -> Running:
    """Start a peer and wait for its first step; `given` is the folder of `write_given`."""
    # Each process compiles once, without the cache of an earlier run: torch.compile has its own cache.
    cache = tempfile.mkdtemp(prefix="peer-")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "JAX_PLATFORMS": "cpu",
        "PEER_GIVEN": str(given),
    }
    began = time.time()
    process = subprocess.Popen(
        [python, str(HERE / "peers" / peer.command[0]), *peer.command[1:]],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
    )  # fmt: skip
    running = Running(peer, process, {})
    running.facts = ask(running, None)
    running.facts["first_step_seconds"] = round(time.time() - began, 2)
    return running


def finish(running: Running) -> None:
    """Read the peak memory of a peer, and let it end."""
    if running.error is None:
        assert running.process.stdin is not None
        running.process.stdin.close()
        running.facts |= ask(running, None)


def row_of(running: Running, steps: int) -> dict[str, Any]:
    """Compute the figures of a peer: medians over its blocks."""
    peer, facts = running.peer, running.facts
    row: dict[str, Any] = {"name": peer.name}
    if running.error is not None or not running.blocks:
        return row | {"error": running.error or "made no block"}
    step_seconds = statistics.median(block["seconds"] for block in running.blocks) / steps
    row |= {name: facts[name] for name in ("parameters", "versions", "first_step_seconds", "peak_memory_bytes", "remat")
            if name in facts}  # fmt: skip
    # Of all threads. PyTorch's spin while they wait, so that a busy machine adds to its time and hardly to ours.
    processor_seconds = statistics.median(block["processor_seconds"] for block in running.blocks) / steps
    row |= {
        "step_seconds": step_seconds,
        "processor_seconds": processor_seconds,
        "rounds": [block["seconds"] / steps for block in running.blocks],
    }
    return row | {
        "tokens_per_second": _ROWS * _LENGTH / step_seconds,
        "flops_per_second": step_flops() / step_seconds,
        "loss": running.blocks[-1]["loss"],
    }


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the ratios of jaxtrain to each peer and to the best one, of speed and of peak memory."""
    done = {row["name"]: row for row in rows if "error" not in row}
    ours = done.pop("jaxtrain", None)
    if ours is None or not done:
        return {}
    rate = operator.itemgetter("tokens_per_second")
    best = max(done.values(), key=rate)

    def ratios(name: str, *, inverse: bool = False) -> dict[str, float]:
        found = {peer: ours[name] / row[name] for peer, row in done.items()}
        return {peer: round(1 / ratio if inverse else ratio, 3) for peer, ratio in found.items()}

    return {
        "over_best_peer": round(rate(ours) / rate(best), 3),
        "best_peer": best["name"],
        "over": ratios("tokens_per_second"),
        "over_by_processor_time": ratios("processor_seconds", inverse=True),
        "memory_over": ratios("peak_memory_bytes"),
    }


def differing_losses(rows: list[dict[str, Any]]) -> str | None:
    """Return a line where peers did not train alike: they cannot be compared."""
    losses = {row["name"]: row["loss"] for row in rows if "loss" in row}
    first = next(iter(losses.values()), 0.0)
    # Written so that a loss that is no number differs.
    if all(abs(loss - first) <= _SAME_LOSS * abs(first) for loss in losses.values()):
        return None
    shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    return f"losses differ by more than {_SAME_LOSS:.0%} after the same steps: {shown}"


def line_of(row: dict[str, Any]) -> str:
    """Format the line of a peer for the terminal."""
    if "error" in row:
        return f"{row['name']:40} {row['error']}"
    rate = f"{row['flops_per_second'] / 1e9:5.0f} GFLOP/s"
    return (
        f"{row['name']:40} {row['tokens_per_second']:9,.1f} per second {rate}, peak "
        f"{row['peak_memory_bytes'] / 2**30:.2f} GiB, first step after {row['first_step_seconds']:.1f} s, "
        f"loss {row['loss']:.3f}"
    )


def main() -> None:
    """Run the rounds, print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=os.environ.get("JAXTRAIN_PEERS_PYTHON", sys.executable))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--only", action="append", help="part of a peer's name; jaxtrain always runs")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    only = ["jaxtrain", *(arguments.only or [""])]
    chosen = [peer for peer in PEERS if any(text in peer.name for text in only)]
    about = {**machine(), "date": time.strftime("%Y-%m-%d")}
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as folder:
        alive: list[Running] = []
        write_given(Path(folder), steps=1 + arguments.rounds * arguments.steps, errors=errors)
        try:
            for peer in chosen:
                python = arguments.peers_python if peer.theirs else sys.executable
                alive.append(launch(peer, python, errors, Path(folder)))
                print(f"{peer.name}: {alive[-1].error or alive[-1].facts}", file=sys.stderr, flush=True)
            for number in range(arguments.rounds):
                for running in alive:
                    block = ask(running, arguments.steps) if running.error is None else {}
                    if block:
                        running.blocks.append(block)
                print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr, flush=True)
            for running in alive:
                finish(running)
        finally:
            for running in alive:
                running.process.kill()
        rows = [row_of(running, arguments.steps) for running in alive]
        if any("error" in row for row in rows):
            errors.seek(0)
            print(errors.read()[-4000:], file=sys.stderr)
    print("\n".join(map(line_of, rows)))
    answer = {"machine": about, "rounds": arguments.rounds, "steps": arguments.steps, "rows": rows}
    refused = differing_losses(rows)
    answer["ratios"] = {} if refused else compare(rows)
    print(json.dumps(answer["ratios"], indent=2))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    if refused:
        raise SystemExit(f"bench_peers: {refused}")


if __name__ == "__main__":
    main()
