"""Bytes that one decode step of a model reads and writes per device, by the compilers of hardware that is not here.

    python scripts/decode_bytes.py [--targets h100:1x8,v5e:2x4] [--size llama3.1_8b] [--layers N]
        [--weights bf16,int8,nf4] [--caches bf16,int8] [--slots 8] [--length 2048] [--json FILE]

The step is the engine's: every slot is fed one token, over `tensor` = all devices, in bfloat16. Nothing is allocated.
It takes the compilers (pip install 'jaxtrain[aot,aot-tpu]') and, per row, 20 seconds to some minutes.

"needed" is what a step must read at least: all weights, of an embedding table that is only looked up the rows, and the
cache of all positions. "moved" is counted instruction by instruction (`jaxtrain/bench/program_bytes.py`), "XLA" the
compiler's own figure, which counts the body of a loop once, and is missing for GPUs.
"""

import argparse
import functools
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.bench.program_bytes import moved_bytes
from jaxtrain.config.transformer import TransformerConfig
from jaxtrain.inference.choose import row_sampling
from jaxtrain.inference.engine.cache_layout import cache_layout, fitting
from jaxtrain.inference.engine.programs import SlotState, decode_slots
from jaxtrain.inference.sampling import Sampling
from jaxtrain.layout.mesh import make_mesh
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.quantize import quantize
from jaxtrain.models.ring_cache import make_cache
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.shipped.build import build_model
from jaxtrain.ops.attention.cached import BLOCK
from jaxtrain.plan.compilers.topology import topology_devices
from jaxtrain.precision.kernels import is_quantized
from jaxtrain.precision.nf4 import Nf4Kernel
from jaxtrain.runtime.compiler import decoding_options, out_of_cache
from jaxtrain.train.parallelism import shard_model

# Tokens of a prompt that the engine reads at a time, which a cache of windows has room for.
CHUNK = 128


def place(leaf: Any, mesh: Mesh, *entries: Any) -> jax.ShapeDtypeStruct:
    """The shape, sharded over the entries whose dims divide."""
    fits = [
        None if entry is None or size % mesh.size else entry for size, entry in zip(leaf.shape, entries, strict=False)
    ]
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*fits)))


def quantized_shapes(sharded: ShardedModel, name: str) -> Any:
    """The parameters with quantized kernels, as shapes, sharded as the compiler shards what it makes of floats."""
    params, model = sharded.abstract_params, sharded.model
    small = jax.eval_shape(lambda params: quantize(params, model, name), params)

    def one(path: Any, leaf: Any, kernel: Any) -> Any:
        if not is_quantized(kernel):
            return leaf
        inputs, outputs = model.linears[path_name(path)]
        spec = (*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec)))
        stack, into, out = spec[: -inputs - outputs], spec[-inputs - outputs : -outputs], spec[-outputs:]
        if not isinstance(kernel, Nf4Kernel):
            return replace(
                kernel,
                values=place(kernel.values, sharded.mesh, *spec),
                scale=place(kernel.scale, sharded.mesh, *stack, *out),
            )
        flat = next((entry for entry in into if entry is not None), None)
        return replace(
            kernel,
            codes=place(kernel.codes, sharded.mesh, *stack, flat, *out),
            absmax=place(kernel.absmax, sharded.mesh, *stack, flat, *out),
            nested_absmax=place(kernel.nested_absmax, sharded.mesh),
            offset=place(kernel.offset, sharded.mesh),
        )

    return jax.tree_util.tree_map_with_path(one, params, small)


def per_device(tree: Any) -> int:
    """Bytes of arrays on each device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def measure(
    target: str, config: TransformerConfig, *, weights: str, cache: str, slots: int, length: int
) -> dict[str, Any]:
    """Compile one decode step, and count.

    Args:
        target: as `topology_devices` takes it.
        config: of the model.
        weights: bf16, int8 or nf4.
        cache: bf16 or int8.
        slots: rows.
        length: positions of the cache.
    """
    devices = topology_devices(target)
    mesh = make_mesh(tensor=len(devices), data=1, devices=devices)
    model = build_model(config, input_shape=(length,))
    sharded = shard_model(model, mesh=mesh, policy="bf16_pure")
    params = sharded.abstract_params if weights == "bf16" else quantized_shapes(sharded, weights)
    decoder, vocabulary = model.decoder, model.vocab_size
    assert decoder is not None
    assert vocabulary is not None
    dtype = {"bf16": jnp.bfloat16, "int8": jnp.int8}[cache]
    layout = cache_layout(decoder, sharded.layout, slots=slots, length=length, chunk=CHUNK, dtype=dtype)
    whole = NamedSharding(mesh, PartitionSpec())
    table = NamedSharding(mesh, fitting(sharded.layout, (slots, vocabulary), "batch", None))
    placed = SlotState(layout.shardings, table, table, table)

    def begin() -> SlotState:
        counts = jnp.zeros((slots, vocabulary), jnp.int32)
        cache = make_cache(decoder, slots, length, dtype, chunk=CHUNK)
        return SlotState(cache, counts, counts, counts.astype(jnp.float32))

    def shapes(tree: Any, shardings: Any) -> Any:
        return jax.tree.map(
            lambda leaf, one: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), tree, shardings
        )

    rows = row_sampling([Sampling(temperature=0)] * slots, [0] * slots)
    fed = (np.zeros((slots, 1), np.int32), np.zeros(slots, np.int32), np.zeros(slots, bool), rows, np.bool_(False))
    step = jax.jit(functools.partial(decode_slots, decoder=decoder), donate_argnums=1, out_shardings=(placed, whole))
    with sharded.context():
        state = shapes(jax.eval_shape(begin), placed)
        lowered = step.lower(params, state, *jax.tree.map(lambda leaf: shapes(leaf, whole), fed))
    options: dict[str, Any] = {**decoding_options(devices[0])}
    if devices[0].platform == "gpu":
        options["xla_gpu_autotune_level"] = "0"  # kernels are chosen by running them
    began = time.monotonic()
    with out_of_cache():
        compiled = lowered.compile(compiler_options=options or None)
    seconds = time.monotonic() - began
    moved = moved_bytes(compiled.as_text() or "", unknown_trips=-(-length // BLOCK))
    looked_up = 0 if config.tie_embeddings else per_device(params["embedding"])
    cost, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
    assert memory is not None
    total = sum(one.bytes for one in moved)
    needed = per_device(params) - looked_up + per_device(state.cache)
    return {
        "target": target,
        "weights": weights,
        "cache": cache,
        "weight_bytes": per_device(params),
        "cache_bytes": per_device(state.cache),
        "needed_bytes": needed,
        "moved_bytes": round(total),
        "ratio": total / needed,
        "xla_bytes": cost.get("bytes accessed"),
        "temporary_bytes": memory.temp_size_in_bytes,
        "compile_seconds": seconds,
        "largest": [{"name": one.name, "bytes": one.bytes, "result": one.result[:80]} for one in moved[:12]],
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="bytes of a decode step")
    parser.add_argument("--targets", default="h100:1x8,v5e:2x4")
    parser.add_argument("--size", default="llama3.1_8b")
    parser.add_argument("--layers", type=int, help="of the model; left out: all")
    parser.add_argument("--weights", default="bf16,int8,nf4")
    parser.add_argument("--caches", default="bf16,int8")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cut = {} if arguments.layers is None else {"num_layers": arguments.layers}
    config = TransformerConfig.model_validate({"size": arguments.size, **cut})
    found = []
    print("target    weights cache  weights   cache   needed    moved ratio    XLA (MB per device)")
    for target in arguments.targets.split(","):
        for weights in arguments.weights.split(","):
            for cache in arguments.caches.split(","):
                row = measure(
                    target, config, weights=weights, cache=cache, slots=arguments.slots, length=arguments.length
                )
                found.append(row)
                sizes = (row[f"{name}_bytes"] / 1e6 for name in ("weight", "cache", "needed", "moved"))
                weight, cached, needed, moved = sizes
                own = "none" if row["xla_bytes"] is None else f"{row['xla_bytes'] / 1e6:.0f}"
                print(
                    f"{target:9} {weights:7} {cache:5} {weight:8.0f} {cached:7.0f} {needed:8.0f} {moved:8.0f} "
                    f"{row['ratio']:5.2f} {own:>6}",
                    flush=True,
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
