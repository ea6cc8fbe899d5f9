"""Show the peak memory of a process that reads a published folder into an nf4 or int8 base.

    python scripts/quantized_loading_memory.py [--base nf4] [--fsdp 4] [--megabytes 300]

A folder with random weights in bfloat16 is made first, in a process of its own; in another one the base is read on
emulated devices, which are memory of this process. Beside what the base takes, the peak should hold the floats of a
layer, and not those of the model.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any


def main() -> None:
    """Make the folder, read it, print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="nf4", choices=("nf4", "int8"))
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--folder")
    parser.add_argument("--only", choices=("make", "read"))
    arguments = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.fsdp}"
    if arguments.only == "make":
        make(arguments.folder, arguments.megabytes)
    elif arguments.only == "read":
        read(arguments.folder, arguments.base, arguments.fsdp)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for only in ("make", "read"):
                words = [sys.executable, __file__, *sys.argv[1:], "--folder", f"{folder}/model", "--only", only]
                subprocess.run(words, check=True)


def make(folder: str, megabytes: int) -> None:
    """Write a Llama of about so many megabytes in bfloat16."""
    import jax

    import jaxtrain as jt

    layer = 2 * (4 * 512**2 + 3 * 512 * 2048)
    sizes: dict[str, Any] = {"kind": "transformer", "embed_dim": 512, "num_heads": 8, "mlp_dim": 2048}
    group = {**sizes, "num_layers": max(1, megabytes * 10**6 // layer), "vocab_size": 256}
    model = jt.build_model(group, input_shape=(64,), vocab_size=256)
    jt.save_pretrained(folder, jax.jit(model.init)(jax.random.key(0))[0], model=group, dtype="bfloat16")


def read(folder: str, base: str, fsdp: int) -> None:
    """Read it as a base, and print bytes and peaks."""
    import jax
    import optax

    import jaxtrain as jt

    pretrained = jt.load_pretrained(folder)
    adapted = jt.adapt(pretrained.model, lora=jt.LoraConfig(rank=8), base=base)
    step = jt.make_train_step(adapted, jt.language_modeling(), optax.adam(1e-3), mesh=jt.make_mesh(fsdp=fsdp))
    floats = 4 * sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(pretrained.model.init, jax.random.key(0))[0]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = step.init(0, params=folder)
    jax.block_until_ready(state)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    print(
        f"{base}, fsdp={fsdp}: the model is {floats / 1e6:.0f} MB in float32, base and adapters are "
        f"{stored / 1e6:.0f} MB; peak RSS {before / 1e3:.0f} MB before and {after / 1e3:.0f} MB after reading"
    )


if __name__ == "__main__":
    main()
