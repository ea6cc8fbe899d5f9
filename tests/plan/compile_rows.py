"""Compile the train step of a small transformer for hardware that is not here; what `test_portability.py` runs.

A program of its own, so that the plugins that it loads stay out of the process of the other tests. Reads rows as JSON
from standard input, {id: {target, degrees, model, step}}, and prints {id: what came out}.
"""

import json
import math
import sys
import time
from typing import Any

import jax
import numpy as np
import optax

from jaxtrain.bench.fp8_program import fp8_products
from jaxtrain.config.models import TransformerConfig
from jaxtrain.layout.mesh import crossing_axes, make_mesh
from jaxtrain.models.shipped.build import build_model
from jaxtrain.models.tasks import language_modeling
from jaxtrain.parallel.programs import collectives, crosses
from jaxtrain.plan.compilers.schedule import transfers
from jaxtrain.plan.compilers.topology import compile_for, topology_devices
from jaxtrain.remat.policy import Remat
from jaxtrain.runtime import distributed
from jaxtrain.runtime.choices import record_choices
from jaxtrain.runtime.tried_options import compile_trying
from jaxtrain.train.make_step import make_train_step
from jaxtrain.train.parallelism import Parallelism

MODEL = dict(num_layers=2, embed_dim=64, num_heads=8, max_sequence_length=128)
ROWS, LENGTH, VOCABULARY = 32, 128, 512


def program_text(compiled: jax.stages.Compiled) -> str:
    """The program; what TPUs fuse into `all-reduce-scatter` is written as the reduce-scatter that it is."""
    blocks = compiled.as_text().split("\n\n")
    return "\n\n".join(
        block.replace(" all-reduce(", " reduce-scatter(") if block.startswith("%all-reduce-scatter") else block
        for block in blocks
    )


def compile_row(row: dict[str, Any]) -> dict[str, Any]:
    devices = topology_devices(row["target"])
    mesh = make_mesh(**row["degrees"], devices=devices)
    config = TransformerConfig.model_validate({**MODEL, **row["model"]})
    length = row.get("length", LENGTH)
    remat = Remat(row.get("remat", "dots"))
    model = build_model(config, input_shape=(length,), vocab_size=VOCABULARY, remat=remat)
    options = {"policy": "bf16", "clip_norm": 1.0, **row["step"]}
    options["parallelism"] = Parallelism(**options.get("parallelism", {}))
    step = make_train_step(model, language_modeling(), optax.adamw(1e-3), mesh=mesh, **options)
    shape = jax.ShapeDtypeStruct((row.get("rows", ROWS), length), np.int32)
    began = time.monotonic()
    with record_choices() as choices:
        lowered = step.lower({"inputs": shape, "targets": shape})
    lowered_at = time.monotonic()
    tried = step.compiler_options.tried
    taken = compile_trying(lambda more: compile_for(devices[0], lowered, options=more), tried)
    compiled = taken.compiled
    seconds = time.monotonic() - lowered_at
    memory = compiled.memory_analysis()
    leaves = [leaf for leaf in jax.tree.leaves(step.abstract_state) if leaf.dtype != jax.random.key(0).dtype]
    text = program_text(compiled)
    found = collectives(text)
    sent: dict[str, int] = {}
    for one in transfers(text) if devices[0].platform == "gpu" else ():
        sent[one.kind] = sent.get(one.kind, 0) + one.step_bytes
    return {
        "devices": len(devices),
        "kind": devices[0].device_kind,
        "crossing": crossing_axes(mesh),
        "state_bytes": sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves),
        # Float32, of the stage's layers and of all that stands outside the stack.
        "gradient_bytes": sum(
            4 * leaf.size // (mesh.shape["pipe"] if name == "blocks" else 1)
            for name, tree in step.abstract_state.params.items()
            for leaf in jax.tree.leaves(tree)
        ),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": sorted(
            {f"{one.kind} {axis}" for one in found for axis in mesh.shape if crosses(one, mesh, axis)}
        ),
        "sent_bytes": sent,
        "permutes_in_branches": [one.line for one in found if one.kind == "collective-permute" and one.in_branch],
        "choices": choices,
        "kernel_calls": text.count("tpu_custom_call") + text.count("__cudnn$fmha"),
        "fp8_products": {name: [found.native, found.emulated] for name, found in fp8_products(text).items()},
        "lower_seconds": lowered_at - began,
        "compile_seconds": seconds,
    }


if __name__ == "__main__":
    distributed.start(emulate=1)
    results = {}
    for name, row in json.load(sys.stdin).items():
        try:
            results[name] = compile_row(row)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
    json.dump(results, sys.stdout)
