"""Show the peak memory of a process that starts a state from a published folder of float32.

    python scripts/first_state_memory.py [--rank 8] [--devices 1] [--megabytes 500]

A folder with random weights is made first, in a process of its own; in another one a state starts from it, on emulated
devices, which are memory of this process. With adapters (rank above 0) the peak should hold the model about once; with
all parameters trained (rank 0) it holds the two moments of Adam as well.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any


def main() -> None:
    """Make the folder, start from it, print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--folder")
    parser.add_argument("--only", choices=("make", "start"))
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    if arguments.only == "make":
        make(arguments.folder, arguments.megabytes)
    elif arguments.only == "start":
        start(arguments.folder, arguments.rank, arguments.devices)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for only in ("make", "start"):
                words = [sys.executable, __file__, *sys.argv[1:], "--folder", f"{folder}/model", "--only", only]
                subprocess.run(words, check=True)


def make(folder: str, megabytes: int) -> None:
    """Write a Llama of about so many megabytes in float32."""
    import jax

    import jaxtrain as jt

    layer = 4 * (4 * 512**2 + 3 * 512 * 2048)
    sizes: dict[str, Any] = {"kind": "transformer", "embed_dim": 512, "num_heads": 8, "mlp_dim": 2048}
    group = {**sizes, "num_layers": max(1, megabytes * 10**6 // layer), "vocab_size": 256}
    model = jt.build_model(group, input_shape=(64,), vocab_size=256)
    jt.save_pretrained(folder, jax.jit(model.init)(jax.random.key(0))[0], model=group)


def start(folder: str, rank: int, devices: int) -> None:
    """Start from it, and print bytes and peaks."""
    import jax
    import optax

    import jaxtrain as jt

    model = jt.load_pretrained(folder).model
    model = jt.adapt(model, lora=jt.LoraConfig(rank=rank)) if rank else model
    step = jt.make_train_step(model, jt.language_modeling(), optax.adam(1e-3), mesh=jt.make_mesh(fsdp=devices))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = step.init(0, params=folder)
    jax.block_until_ready(state)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.optimizer_state))
    print(
        f"rank {rank}, {devices} devices: parameters of {params / 1e6:.0f} MB, optimizer state of {moments / 1e6:.0f} "
        f"MB; peak RSS grows by {(after - before) * 1024 / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
