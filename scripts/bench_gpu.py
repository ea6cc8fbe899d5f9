"""All measurements for a GPU, in one run of some minutes that needs no network.

    python scripts/bench_gpu.py --out DIR [--only llama] [--timeout 300]
    python scripts/bench_gpu.py --out DIR --smoke          (tiny shapes on any backend, to test the script)

Each row is a process with a time limit: where it fails or takes too long its error is recorded, and the other rows
continue. DIR gets rows.json after every row, table.md for docs/benchmarks.md, the output of each row, and targets/, the
description of the card for the planner. The rows of PyTorch run where the same Python can import torch, or with
--torch-python.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

_ONE = ("parallel.data=auto", "parallel.fsdp=1", "train.accumulation_steps=1")
_LLAMA = ("llama3_8b", "data.sequence_length=4096", "model.max_sequence_length=4096", *_ONE)
_BERT = (
    "gpt2_124m", "model.causal=false", "model.vocab_size=30522", "model.max_sequence_length=512",
    "data.sequence_length=512", "train.global_batch_size=64", *_ONE,
)  # fmt: skip
_GPT2 = ("gpt2_124m", "train.global_batch_size=32", *_ONE)
_RESNET = ("resnet50_imagenet", "train.global_batch_size=256")
# Options that skip the parts of `jaxtrain bench` that only the first row measures.
_STEP_ONLY = ("--skip", "start", "--skip", "limits")
_TINY = ("model.num_layers=1", "model.embed_dim=32", "model.num_heads=2", "train.global_batch_size=8")
_SHORT = (*_TINY, "model.max_sequence_length=32")
_SMALL = {
    "transformer": (
        *_SHORT, "model.num_kv_heads=2", "model.mlp_dim=64", "model.vocab_size=64", "data.sequence_length=32",
    ),
    "resnet": ("model.stage_blocks=[1]", "model.width=8", "data.image_size=32", "train.global_batch_size=8"),
    "own": (*_SHORT, "data.kind=synthetic", "data.num_rows=64"),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: the name in the table.
        kind: "bench" (a config of `jaxtrain bench`), "torch" or "script".
        words: a config and its settings, or a file and its arguments.
        options: options of `jaxtrain bench`.
        small: key of the settings in `_SMALL` that make the row tiny.
    """

    name: str
    kind: str
    words: tuple[str, ...]
    options: tuple[str, ...] = _STEP_ONLY
    small: str = "transformer"


def _llama(size: str, rows: int, policy: str) -> Row:
    model, batch = f"model.size=llama3.2_{size}", f"train.global_batch_size={rows}"
    words = (*_LLAMA, model, batch, "remat.policy=dots", f"precision.policy={policy}")
    return Row(f"Llama {size} {policy}, sequence 4096", "bench", words)


ROWS = (
    Row("device, and bench_cpu's step", "bench", ("bench_cpu",), (), "own"),
    Row("card for the planner", "script", ("capture_target.py", "{out}/targets")),
    Row("GPT-2 124M bf16", "bench", _GPT2),
    Row("GPT-2 124M fp8", "bench", (*_GPT2, "precision.policy=fp8")),
    Row("GPT-2 124M bf16, PyTorch", "torch", ("gpt2", "--rows", "32")),
    *(_llama(size, rows, policy) for size, rows in (("1b", 8), ("3b", 4)) for policy in ("bf16", "fp8")),
    Row(
        "Llama 8B bf16, sequence 4096, int8 moments, full remat",
        "bench",
        (*_LLAMA, "train.global_batch_size=2", "optimizer.moments=int8", "remat.policy=full"),
    ),
    Row("ResNet-50 bf16, 224", "bench", _RESNET, small="resnet"),
    Row("ResNet-50 bf16, 224, PyTorch", "torch", ("resnet50", "--rows", "256")),
    Row("encoder of BERT's size bf16, sequence 512", "bench", _BERT),
    Row(
        "planner against the step",
        "script",
        (
            "check_plan.py",
            "gpt2_124m data.kind=synthetic data.num_rows=64 train.global_batch_size=32 train.accumulation_steps=1",
            "llama3_8b model.size=llama3.2_1b data.kind=synthetic data.num_rows=16 data.sequence_length=4096 "
            "model.max_sequence_length=4096 parallel.fsdp=1 train.global_batch_size=8 train.accumulation_steps=1 "
            "remat.policy=dots",
        ),
        small="own",
    ),
)


def command_of(row: Row, out: Path, torch_python: str, *, smoke: bool) -> list[str]:
    """Return the command that runs a row."""
    match row.kind:
        case "bench":
            words = [*row.words, *(_SMALL[row.small] if smoke else ())]
            options = ("--skip", "start", *row.options) if smoke and not row.options else row.options
            return [sys.executable, "-m", "jaxtrain", "bench", *words, *options, "--json", str(file_of(row, out))]
        case "torch":
            return [torch_python, str(HERE / "peers" / "torch_gpu.py"), *row.words, *(["--smoke"] if smoke else [])]
        case _:
            script, *words = (word.replace("{out}", str(out)) for word in row.words)
            if smoke and script == "check_plan.py":
                words = [" ".join(("bench_cpu", *_SMALL["own"]))]
            return [sys.executable, str(HERE / script), *words]


def file_of(row: Row, out: Path) -> Path:
    """Return the path of the JSON of a row."""
    return out / "rows" / ("".join(letter if letter.isalnum() else "-" for letter in row.name) + ".json")


def run(row: Row, out: Path, torch_python: str, *, smoke: bool, timeout: float) -> dict[str, Any]:
    """Run a row, and return its figures, or its error where it failed."""
    command = command_of(row, out, torch_python, smoke=smoke)
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    answer: dict[str, Any] = {"name": row.name, "kind": row.kind, "words": list(row.words)}
    began = time.monotonic()
    log = file_of(row, out).with_suffix(".log")
    with log.open("w", encoding="utf-8") as errors:
        try:
            environment = {**os.environ, "PYTHONPATH": path}
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=timeout, env=environment
            )
        except subprocess.TimeoutExpired:
            return answer | {"error": f"not done within {timeout:.0f} s"}
        except OSError as error:
            return answer | {"error": f"cannot start {command[0]}: {error.strerror}"}
    answer["wall_seconds"] = round(time.monotonic() - began, 1)
    if done.returncode:
        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return answer | {"error": (said or [f"ended with {done.returncode}"])[-1][:300]}
    if row.kind == "bench":
        return answer | {"bench": json.loads(file_of(row, out).read_text(encoding="utf-8"))}
    if row.kind == "torch":
        return answer | {"torch": json.loads(done.stdout.strip().splitlines()[-1])}
    return answer | {"said": done.stdout.strip().splitlines()}


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    lines = [
        "| row | units per second | MFU | ms per step | memory: peak, planned |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| {row['name']} | {' | '.join(_cells(row))} |")
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [f"failed: {row['error']}", "", "", "", ""]
    if "torch" in row:
        torch = row["torch"]
        peak = torch.get("peak_memory_bytes")
        return [f"{torch['units_per_second']:,.0f}", "", f"{torch['seconds'] * 1e3:.1f}", _gib(peak), ""]
    if "bench" in row:
        step = row["bench"]["step"]
        use = step["model_flops_utilization"]
        return [
            f"{step['units_per_second']:,.0f} {step['unit']}",
            "" if use is None else f"{use:.1%}",
            f"{step['seconds'] * 1e3:.1f}",
            f"{_gib(step['device_peak_bytes'])}, {_gib(step['planned_bytes'])}",
        ]
    return ["; ".join(row["said"]), "", "", "", ""]


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f} GiB"


def main() -> None:
    """Run the rows, and write the results after each of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", help="part of a row's name; may be repeated")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per row")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    (arguments.out / "rows").mkdir(parents=True, exist_ok=True)
    chosen = [row for row in ROWS if not arguments.only or any(text in row.name for text in arguments.only)]
    rows: list[dict[str, Any]] = []
    for row in chosen:
        print(f"{row.name} ...", flush=True)
        rows.append(run(row, arguments.out, arguments.torch_python, smoke=arguments.smoke, timeout=arguments.timeout))
        print(f"  {rows[-1].get('error') or 'done'}", flush=True)
        about = {"date": time.strftime("%Y-%m-%d"), "smoke": arguments.smoke, "rows": rows}
        (arguments.out / "rows.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        (arguments.out / "table.md").write_text(table(rows), encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
