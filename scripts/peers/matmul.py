"""The limit of the machine: one fp32 product in the shape of the MLP, [4096, 384] x [384, 1536], at XLA's best rate."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peer import BATCH, LENGTH, WIDTH, serve

from jaxtrain.runtime.compiler import choose_options

FLOPS = 2 * BATCH * LENGTH * WIDTH * 4 * WIDTH
REPEATS = 20


def main() -> None:
    generator = np.random.default_rng(0)
    a = jnp.asarray(generator.standard_normal((BATCH * LENGTH, WIDTH), np.float32))
    b = jnp.asarray(generator.standard_normal((WIDTH, 4 * WIDTH), np.float32))
    # With jax's defaults the product may run on one thread, which would not be the limit of the machine.
    options: dict[str, Any] = dict(choose_options(jax.devices()[0], 1).used)
    multiply = jax.jit(lambda a, b: a @ b).lower(a, b).compile(compiler_options=options)

    def run(steps: int) -> float:
        for _ in range(steps * REPEATS):
            multiply(a, b).block_until_ready()
        return 0.0

    serve(run, flops_per_step=FLOPS * REPEATS, versions=f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
