"""A model of each structure compiles for eight absent TPUs and GPUs, and takes the memory that the planner says."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.plan.catalogue.hardware import parse_targets
from jaxtrain.plan.search.analyse import analyse

TOKENS = "data={kind: synthetic, task: tokens, vocab_size: 32000, sequence_length: 256}"
# Short rows: what takes a compiler long is the kernels of long ones, which tests/plan/test_portability.py compiles. 16
# divides all lengths: XLA's compiler for absent GPUs, which cannot try tiles out, gives up on others (114 targets, 197
# positions of an image of 224 pixels; jax 0.10.2).
PAIRS = "data={kind: text_pairs, path: null, builtin: python_docstrings, sequence_length: 128, target_length: 64}"
IMAGES = "data={kind: synthetic, task: images, image_size: 256, num_classes: 1000}"
# With two options that `train` tries on a v5e, libtpu 0.0.42.1 gives up on this model after 100 s (out of vmem), and
# compiles it without them; tests/runtime/test_tried_options.py proves that a step does so.
WITHOUT_TRIED = (
    "compiler_options={xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter: false, "
    "xla_enable_async_reduce_scatter_fusion: false}"
)
# Structure -> (config, what it takes from the command line).
STRUCTURES = {
    "sandwich with local layers": ("gpt2_124m", ["model={size: gemma3_1b, vocab_size: 32000}", TOKENS, WITHOUT_TRIED]),
    "parallel block": ("gpt2_124m", ["model={size: pythia_410m}", TOKENS]),
    "encoder-decoder": (
        "gpt2_124m",
        ["model={kind: encoder_decoder, size: flan_t5_base}", PAIRS, "task=sequence_to_sequence"],
    ),
    "vision transformer": (
        "digits_resnet",
        ["model={kind: vit, size: vit_base, image_size: 256, pooling: mean}", IMAGES],
    ),
}
SHARED = [
    "train.global_batch_size=64",
    "train.accumulation_steps=1",
    "precision.policy=bf16",
    "remat.policy=full",
    "parallel.data=1",
    "parallel.fsdp=8",
]
# Target -> the package that has its compiler.
TARGETS = {"v5e-8": "libtpu", "h100x8": "jax_cuda12_plugin"}


def compiled(target: str, name: str) -> dict:
    """What the compiler of a target said of a structure, in a process of its own.

    A process per row: workers that share a table would each compile all of it, or wait for the one that does.
    """
    config, overrides = STRUCTURES[name]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_structures.py"))],
        input=json.dumps({name: [target, config, [*SHARED, *overrides]]}),
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout)[name]


@pytest.mark.long
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("target_name", TARGETS)
def test_the_structure_compiles_and_takes_the_memory_planned(target_name: str, name: str) -> None:
    if importlib.util.find_spec(TARGETS[target_name]) is None:
        pytest.skip(f"{TARGETS[target_name]} is not installed: pip install 'jaxtrain[aot]'")
    result = compiled(target_name, name)
    assert "error" not in result, result["error"]
    config, overrides = STRUCTURES[name]
    (target,) = parse_targets(target_name, None)
    memory = analyse(load_config(config, overrides=[*SHARED, *overrides]).config, target).memory
    # State is a matter of shapes.
    assert memory.state_bytes == pytest.approx(result["state_bytes"], rel=0.01)
    assert memory.total_bytes == pytest.approx(result["peak_bytes"], rel=0.25)
