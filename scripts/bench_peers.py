"""jaxtrain and its peers on the same work in the same run: tokens/s, images/s, memory, time to the first step.

    python scripts/bench_peers.py --peers-python PEERS/bin/python [--rounds 5] [--only PyTorch] [--json FILE]

PEERS is an environment with `pip install 'jaxtrain[peers]'` (torch, keras, transformers). Every peer is a process that
stays alive. In each round every peer makes a block of steps, one peer after the other, so that the noise of a shared
machine affects all of them. Figures are medians over the rounds. All peers count the same model FLOPs
(jaxtrain/metrics/flops.py) and train in float32 from the same initial values, on the same batches in the same order, at
the same learning rates, with the same optimizer, clipping and weight decay (scripts/peers/given.py writes them). Where
the mean losses of their last blocks differ by more than 2 %, the script prints no ratio of that work, and ends with
exit code 1. BERT (of MiniLM's size, with labels) and T5-small are those of transformers, without dropout, and count no
FLOPs.
"""

import argparse
import json
import operator
import os
import platform
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

from jaxtrain.config.model import ResNetConfig, TransformerConfig  # noqa: E402  (the checkout's, not an installed one)
from jaxtrain.metrics.flops import model_flops_per_row  # noqa: E402
from jaxtrain.runtime.host import SETTINGS  # noqa: E402

# A small constant rate, at which a net of fifty layers learns these rows from its first steps; at 0.1 its loss jumps,
# and rounding alone makes two peers differ.
_SGD = (
    "optimizer.learning_rate=0.01", "optimizer.schedule.kind=constant", "optimizer.weight_decay=0",
    "optimizer.schedule.warmup_steps=0", "optimizer.nesterov=false",
)  # fmt: skip
_RESNET50 = (
    "resnet50_imagenet", "data.kind=synthetic", "data.task=images", "data.image_size=96", "data.num_classes=1000",
    "data.num_rows=64", "precision.policy=fp32", "train.global_batch_size=8", *_SGD,
)  # fmt: skip
_RESNET18 = ("digits_resnet", "model.stage_blocks=[2,2,2,2]", "model.width=64", "remat.policy=none", *_SGD)
# Largest relative difference of the losses of two peers after the same steps. Rounding differs between their programs,
# and grows with the steps; another schedule, order or initial value differs by much more.
_SAME_LOSS = 0.02


@dataclass(frozen=True)
class Peer:
    """One row of the table.

    Attributes:
        name: the name in the table.
        work: "transformer", "resnet50", "resnet18", "bert", "t5" or "matmul"; rows of the same work are compared.
        command: file in scripts/peers and its arguments.
        theirs: whether it runs in the environment of the peers.
        malloc: whether it gets the malloc settings of jaxtrain; it is then an upper limit and not a peer.
    """

    name: str
    work: str
    command: tuple[str, ...]
    theirs: bool = False
    malloc: bool = False


PEERS = (
    Peer("jaxtrain", "transformer", ("ours.py", "bench_cpu")),
    Peer("hand-written JAX, no remat", "transformer", ("bare_jax.py", "none")),
    Peer("hand-written JAX, remat dots", "transformer", ("bare_jax.py", "dots")),
    Peer("hand-written JAX, remat full", "transformer", ("bare_jax.py", "full")),
    Peer("hand-written JAX, remat dots, flattened", "transformer", ("bare_jax.py", "dots", "flat")),
    Peer("PyTorch eager", "transformer", ("torch_transformer.py", "eager"), theirs=True),
    Peer("PyTorch torch.compile", "transformer", ("torch_transformer.py", "compile"), theirs=True),
    Peer("Keras on JAX", "transformer", ("keras_transformer.py",), theirs=True),
    Peer("hand-written JAX, remat dots, our malloc", "transformer", ("bare_jax.py", "dots"), malloc=True),
    Peer("PyTorch eager, our malloc", "transformer", ("torch_transformer.py", "eager"), theirs=True, malloc=True),
    Peer("torch.compile, our malloc", "transformer", ("torch_transformer.py", "compile"), theirs=True, malloc=True),
    Peer("jaxtrain ResNet-50", "resnet50", ("ours.py", *_RESNET50)),
    Peer("PyTorch eager ResNet-50", "resnet50", ("torch_resnet.py", "eager", "resnet50"), theirs=True),
    Peer("PyTorch torch.compile ResNet-50", "resnet50", ("torch_resnet.py", "compile", "resnet50"), theirs=True),
    Peer("jaxtrain ResNet-18", "resnet18", ("ours.py", *_RESNET18)),
    Peer("PyTorch eager ResNet-18", "resnet18", ("torch_resnet.py", "eager", "resnet18"), theirs=True),
    Peer("PyTorch torch.compile ResNet-18", "resnet18", ("torch_resnet.py", "compile", "resnet18"), theirs=True),
    Peer("jaxtrain BERT", "bert", ("ours_published.py", "bert")),
    Peer("PyTorch eager BERT", "bert", ("torch_published.py", "bert"), theirs=True),
    Peer("jaxtrain T5", "t5", ("ours_published.py", "t5")),
    Peer("PyTorch eager T5", "t5", ("torch_published.py", "t5"), theirs=True),
    Peer("matmul", "matmul", ("matmul.py",)),
)
# These rows are upper limits and not peers: the flattened step is jaxtrain's step written by hand, and users of a peer
# do not tune malloc.
_CEILINGS = {"hand-written JAX, remat dots, flattened", *(peer.name for peer in PEERS if peer.malloc)}
# Work -> rows per step and items (tokens, of a T5 those of both sides, or images) per row.
_ITEMS = {"transformer": (16, 256), "resnet50": (8, 1), "resnet18": (64, 1), "bert": (16, 128), "t5": (8, 192)}


def work_flops(work: str) -> float | None:
    """Count the model FLOPs of one step; None: its peers count none."""
    if work in ("bert", "t5"):
        return None
    if work == "transformer":
        model = TransformerConfig(position="learned", norm="layernorm", activation="gelu")
        row = model_flops_per_row(model, sequence_length=256, input_shape=None, num_outputs=None, vocab_size=256)
    else:
        if work == "resnet50":
            resnet, shape, classes = ResNetConfig(stage_blocks=(3, 4, 6, 3), bottleneck=True), (96, 96, 3), 1000
        else:
            resnet, shape, classes = ResNetConfig(stem="small"), (8, 8, 1), 10
        row = model_flops_per_row(resnet, sequence_length=None, input_shape=shape, num_outputs=classes, vocab_size=None)
    assert row is not None
    return row * _ITEMS[work][0]


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


def write_given(work: str, folder: Path, *, steps: int, errors: IO[str]) -> Path:
    """Write what all peers of a work start from and step on.

    Args:
        work: as of a peer.
        folder: gets a folder of the work.
        steps: number of steps that each peer will make.
        errors: gets the standard error of the process.

    Returns:
        The folder of the work.
    """
    ours = next(peer for peer in PEERS if peer.work == work)
    (folder / work).mkdir()
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(HERE / "peers" / "given.py"), str(folder / work), str(steps), *ours.command]
    done = subprocess.run(command, stdout=errors, stderr=errors, env=environment, check=False)
    if done.returncode:
        errors.seek(0)
        raise SystemExit(f"bench_peers: what the peers of {work} start from was not written: {errors.read()[-2000:]}")
    return folder / work


def launch(peer: Peer, python: str, errors: IO[str], given: Path | None) -> Running:
    """Start a peer and wait for its first step; `given` is the folder of its work."""
    # Each process compiles once, without the cache of an earlier run: torch.compile has its own cache.
    cache = tempfile.mkdtemp(prefix="peer-")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in SETTINGS},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "JAX_PLATFORMS": "cpu",
        **({} if given is None else {"PEER_GIVEN": str(given)}),
        **(SETTINGS if peer.malloc else {}),
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
    row: dict[str, Any] = {"name": peer.name, "work": peer.work}
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
    if peer.work == "matmul":
        return row | {"flops_per_second": facts["flops_per_step"] / step_seconds}
    rows, items = _ITEMS[peer.work]
    flops = work_flops(peer.work)
    return row | {
        "items_per_second": rows * items / step_seconds,
        "flops_per_second": flops and flops / step_seconds,
        "loss": running.blocks[-1]["loss"],
    }


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute, for each work, the ratios of jaxtrain to each peer and to the best one, of speed and of peak memory."""
    answer: dict[str, Any] = {}
    limit = next((row["flops_per_second"] for row in rows if row["work"] == "matmul" and "error" not in row), None)
    for work in _ITEMS:
        done = [row for row in rows if row["work"] == work and "error" not in row]
        ours = next((row for row in done if row["name"].startswith("jaxtrain")), None)
        peers = [row for row in done if row is not ours]
        if ours is None or not peers:
            continue
        rate = operator.itemgetter("items_per_second")
        best = max((row for row in peers if row["name"] not in _CEILINGS), key=rate, default=None)
        answer[work] = {
            "over_best_peer": best and round(rate(ours) / rate(best), 3),
            "best_peer": best and best["name"],
            "over": {row["name"]: round(rate(ours) / rate(row), 3) for row in peers},
            "over_by_processor_time": {
                row["name"]: round(row["processor_seconds"] / ours["processor_seconds"], 3) for row in peers
            },
            "memory_over": {
                row["name"]: round(ours["peak_memory_bytes"] / row["peak_memory_bytes"], 3) for row in peers
            },
            "share_of_matmul_rate": (
                round(ours["flops_per_second"] / limit, 3) if limit and ours["flops_per_second"] else None
            ),
        }
    return answer


def differing_losses(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each work whose peers did not train alike: they cannot be compared."""
    lines = []
    for work in _ITEMS:
        losses = {row["name"]: row["loss"] for row in rows if row["work"] == work and "error" not in row}
        if not losses:
            continue
        ours = next(iter(losses.values()))
        # Written so that a loss that is no number differs.
        apart = [name for name, loss in losses.items() if not abs(loss - ours) <= _SAME_LOSS * abs(ours)]
        if apart:
            shown = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            lines.append(f"{work}: losses differ by more than {_SAME_LOSS:.0%} after the same steps: {shown}")
    return lines


def machine() -> dict[str, Any]:
    """Describe the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def wanted(peer: Peer, only: list[str] | None) -> bool:
    """Return whether a peer runs; jaxtrain runs wherever one of its peers does."""
    if not only:
        return True
    named = [other for other in PEERS if any(text == other.work or text in other.name for text in only)]
    return peer in named or (peer.name.startswith("jaxtrain") and any(other.work == peer.work for other in named))


def line_of(row: dict[str, Any]) -> str:
    """Format the line of a peer for the terminal."""
    if "error" in row:
        return f"{row['name']:40} {row['error']}"
    rate = f"{row['flops_per_second'] / 1e9:5.0f} GFLOP/s" if row["flops_per_second"] else f"{'':13}"
    if row["work"] == "matmul":
        return f"{row['name']:40} {'':18} {rate}"
    return (
        f"{row['name']:40} {row['items_per_second']:9,.1f} per second {rate}, peak "
        f"{row['peak_memory_bytes'] / 2**30:.2f} GiB, first step after {row['first_step_seconds']:.1f} s, "
        f"loss {row['loss']:.3f}"
    )


def main() -> None:
    """Run the rounds, print the table and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", default=os.environ.get("JAXTRAIN_PEERS_PYTHON", sys.executable))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--only", action="append", help="part of a peer's name, or its work; jaxtrain always runs")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    chosen = [peer for peer in PEERS if wanted(peer, arguments.only)]
    about = machine()
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as folder:
        alive: list[Running] = []
        steps = 1 + arguments.rounds * arguments.steps
        works = {peer.work for peer in chosen} - {"matmul"}
        given = {work: write_given(work, Path(folder), steps=steps, errors=errors) for work in sorted(works)}
        try:
            for peer in chosen:
                python = arguments.peers_python if peer.theirs else sys.executable
                alive.append(launch(peer, python, errors, given.get(peer.work)))
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
    unlike = {line.partition(":")[0] for line in refused}
    answer["ratios"] = compare([row for row in rows if row["work"] not in unlike])
    print(json.dumps(answer["ratios"], indent=2))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
    if refused:
        raise SystemExit("bench_peers: " + "; ".join(refused))


if __name__ == "__main__":
    main()
