"""Overlap of communication and matmuls, read off the scheduled programs of hardware that is not here.

Per target and layout of the 8B model: the bytes that a device's collectives exchange in a step, and the share of them
whose start and end have matmuls between them. The rows after it are the collectives of one kind.

    python scripts/overlap.py [--on h100x8,v5px8] [--only fsdp=8] [--each] [--json] [compiler_options.NAME=VALUE ...]

Layers stand in a loop, whose turns are counted, so that a program of few layers takes as long to compile as one of
many. Of TPUs the scheduled program is read as soon as the compiler has written it; generating code, which takes
minutes, is not waited for: where the compiler would give up there with options that are tried, the row is of a program
that a run does not take. Needs the compilers of the targets (pip install 'jaxtrain[aot,aot-tpu]').
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.plan.compilers.schedule import Transfer, overlapped_share, transfers

# name -> words of the config.
LAYOUTS = {
    "fsdp=8": "parallel.fsdp=8",
    "data=8": "parallel.data=8",
    "data=2,fsdp=4": "parallel.data=2 parallel.fsdp=4",
    "tensor=8": "parallel.tensor=8",
    "tensor=8, sequence parallel": "parallel.tensor=8 parallel.sequence_parallel=true",
    "context=8 ring": "parallel.context=8 parallel.context_attention=ring",
    "context=8 all_to_all": "parallel.context=8 parallel.context_attention=all_to_all",
    "pipe=2,fsdp=4": "parallel.pipe=2 parallel.fsdp=4 parallel.schedule=1f1b parallel.microbatches=8",
    "zero 1, data=8": "parallel.data=8 parallel.zero=1 train.accumulation_steps=2",
    "zero 2, data=8": "parallel.data=8 parallel.zero=2 train.accumulation_steps=2",
}
# Sequences of 4,096 tokens, one a device; 8 microbatches of a row a device where there is a pipeline, 2 under ZeRO.
BASE = (
    "parallel.data=1 parallel.fsdp=1 data.kind=synthetic data.vocab_size=128256 data.sequence_length=4096 "
    "train.accumulation_steps=1"
)
_WRITTEN = "*_step*.after_optimizations.txt"
_AFTER_IT = "*_step*.after_optimizations_after_buffer_assignment.txt"


def layers_of(target: str, layout: str) -> int:
    """Layers whose state a device holds: where it does not fit, compilers give up all overlap.

    A v5e holds no layer of a layout that replicates the parameters: its embedding and head alone fill it.
    """
    if not any(axis in layout for axis in ("fsdp", "tensor")):
        return 8
    if target.startswith("v5e"):
        return 8 if "fsdp=4" in layout else 16
    return 32


def words_of(layout: str, layers: int) -> list[str]:
    """The words of the config of a row."""
    rows = {"pipe=2,fsdp=4": 32, "zero 1, data=8": 16, "zero 2, data=8": 16}.get(layout, 8)
    return [*BASE.split(), f"train.global_batch_size={rows}", f"model.num_layers={layers}", *LAYOUTS[layout].split()]


def scheduled_program(target: str, words: list[str]) -> str:
    """The scheduled program of a step, compiled in a process of its own."""
    # libtpu ends the process at a flag that it does not know, such as those of CPUs.
    environment = {**{key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}, "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "messages").open("w") as messages:
            process = subprocess.Popen(
                [sys.executable, __file__, "--write", name, "--on", target, *words],
                stdout=messages,
                stderr=messages,
                env=environment,
            )
            try:
                while process.poll() is None and not list(folder.glob(_AFTER_IT)):
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
        found = list(folder.glob(_WRITTEN))
        if not found:
            said = (folder / "messages").read_text().strip().splitlines() or ["no message"]
            raise SystemExit(f"{target}: the compiler failed: {said[-1][:500]}")
        return found[0].read_text()


def write_program(folder: str, target: str, words: list[str]) -> None:
    """Compile the step of a config, and leave its scheduled program in a folder."""
    from jaxtrain.runtime import distributed

    distributed.start(emulate=1, compilation_cache=None)
    from jaxtrain.config import load_config
    from jaxtrain.plan.catalogue.hardware import parse_targets
    from jaxtrain.plan.compilers.exact import planned_step
    from jaxtrain.plan.compilers.topology import compile_for, topology_devices
    from jaxtrain.plan.workload.describe import describe_workload
    from jaxtrain.runtime.compiler_options import Value, out_of_cache
    from jaxtrain.runtime.tried_options import compile_trying

    topology = parse_targets(target)[0].topology
    if topology is None:
        sys.exit(f"no compiler for {target}")
    devices = topology_devices(topology)
    config = load_config("llama3_8b", overrides=words).config
    step, batch = planned_step(config, describe_workload(config), devices)
    lowered = step.lower(batch)
    if devices[0].platform == "gpu":
        text = compile_for(devices[0], lowered).as_text() or ""
        (Path(folder) / "jit__step.after_optimizations.txt").write_text(text)
        return

    def compile_with(more: Mapping[str, Value]) -> Any:
        for path in Path(folder).glob("*_step*"):
            path.unlink()  # of a program that the compiler gave up on
        options: dict[str, Any] = {**more, "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        return lowered.compile(compiler_options=options)

    with out_of_cache():
        compile_trying(compile_with, step.compiler_options.tried)


def row_of(found: list[Transfer]) -> dict[str, Any]:
    """Bytes of a step and the share of them beside matmuls, in all and by kind of collective."""
    kinds = {kind: [one for one in found if one.kind == kind] for kind in sorted({one.kind for one in found})}
    gigabytes = {kind: round(sum(one.step_bytes for one in some) / 1e9, 2) for kind, some in kinds.items()}
    return {
        "gigabytes": round(sum(one.step_bytes for one in found) / 1e9, 2),
        "overlapped": round(overlapped_share(found), 3),
        "kinds": {kind: [gigabytes[kind], round(overlapped_share(some), 3)] for kind, some in kinds.items()},
    }


def main() -> None:
    """Print a row per target and layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="h100x8,v5px8", help="targets, as of jaxtrain plan")
    parser.add_argument("--only", default="", help="part of a layout's name")
    parser.add_argument("--layers", type=int, help="of the model; else 32, or as many as a device can hold")
    parser.add_argument("--each", action="store_true", help="also print each collective, the largest first")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per row")
    parser.add_argument("--keep", type=Path, help="a folder for the programs")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="further words of the config, as compiler_options.NAME=VALUE")
    arguments = parser.parse_args()
    if arguments.write:
        write_program(arguments.write, arguments.on, arguments.words)
        return
    for target in arguments.on.split(","):
        for layout in [arguments.only] if arguments.only in LAYOUTS else [x for x in LAYOUTS if arguments.only in x]:
            layers = arguments.layers or layers_of(target, layout)
            text = scheduled_program(target, [*words_of(layout, layers), *arguments.words])
            if arguments.keep:
                (arguments.keep / f"{target} {layout}.txt").write_text(text)
            found = transfers(text)
            row = row_of(found)
            if arguments.json:
                print(json.dumps({"target": target, "layout": layout, "layers": layers, **row}), flush=True)
                continue
            kinds = ", ".join(f"{kind} {size} GB {share:.0%}" for kind, (size, share) in row["kinds"].items())
            print(
                f"{target} {layout}, {layers} layers: {row['gigabytes']} GB, {row['overlapped']:.1%} beside matmuls "
                f"({kinds})",
                flush=True,
            )
            for one in sorted(found, key=lambda one: -one.step_bytes) if arguments.each else ():
                print(
                    f"  {one.kind:20} {one.bytes / 1e6:9.2f} MB x {one.turns:3}  {one.beside.number:4} matmuls "
                    f"{one.beside.flops / 1e12:8.3f} TFLOP beside  {one.name[-100:]}"
                )


if __name__ == "__main__":
    main()
