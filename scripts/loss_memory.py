"""Memory of the loss and its gradients with all logits at once and with logits in blocks, as compilers plan it.

    python scripts/loss_memory.py                      (this machine's CPU)
    python scripts/loss_memory.py h100:1x1 v5e:1x1     (absent hardware; pip install 'jaxtrain[aot]')

The hidden state has 8,192 tokens and the output layer 128,256 ids, in bf16. There is one line per width, with the
temporary memory of each way: the memory of the program besides the hidden state, the output layer and their gradients.
"""

import argparse
from typing import Any, get_args

import jax

from jaxtrain.ops.loss.blocks import Logits
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, cross_entropy_sums
from jaxtrain.plan.compilers.topology import compile_for, topology_devices
from jaxtrain.runtime import distributed

TOKENS, VOCABULARY, WIDTHS = 8192, 128_256, (1024, 4096)


def temporaries(device: Any, width: int, by: Logits, dtype: str) -> int:
    """Compile the loss and its gradients, and return the bytes of the program without arguments and results."""
    place = jax.sharding.SingleDeviceSharding(device)

    def shape(*dims: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=place)

    def loss(factors: tuple[jax.Array, jax.Array], targets: jax.Array, weights: jax.Array) -> jax.Array:
        return cross_entropy_sums(DeferredLogits(*factors), targets, weights, z_loss=1e-4, by=by).total

    factors = (shape(1, TOKENS, width, dtype=dtype), shape(width, VOCABULARY, dtype=dtype))
    tokens = (shape(1, TOKENS, dtype="int32"), shape(1, TOKENS, dtype="float32"))
    program = jax.jit(jax.value_and_grad(loss)).lower(factors, *tokens)
    memory = compile_for(device, program).memory_analysis()
    assert memory is not None, "every compiler of compile_for reports its memory"
    return memory.temp_size_in_bytes


def main(targets: list[str]) -> None:
    """Print the table."""
    distributed.start(emulate=1, compilation_cache=None)
    for target in targets:
        device = jax.devices()[0] if target == "cpu" else topology_devices(target)[0]
        for width in WIDTHS:
            found = {by: temporaries(device, width, by, "bfloat16") for by in get_args(Logits)}
            line = [f"{by} {size / 2**20:,.0f} MiB ({found['whole'] / size:.1f} x)" for by, size in found.items()]
            print(f"{target}, width {width}: {', '.join(line)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["cpu"])
    main(parser.parse_args().targets)
