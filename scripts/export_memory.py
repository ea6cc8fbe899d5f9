"""How much memory exporting a published folder takes, beside the bytes of its tensors.

    python scripts/export_memory.py [--megabytes 250] [--dtype float32] [--devices 4]

Makes a Llama-like folder of about that size in a temporary directory, reads it onto fsdp=N, and writes it again. Prints
the growth of the most resident memory over the export, and the size of the folder and of its largest tensor.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from time_published_reading import make_folder

import jaxtrain


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=250)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--devices", type=int, default=4)
    arguments = parser.parse_args()
    jaxtrain.start(emulate=arguments.devices)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        make_folder(folder, arguments.megabytes, arguments.dtype)
        pretrained = jaxtrain.load_pretrained(folder)
        sharded = jaxtrain.shard_model(pretrained.model, mesh=jaxtrain.make_mesh(data=1, fsdp=arguments.devices))
        params = jax.block_until_ready(pretrained.read(sharded)[0])
        sizes = [np.prod(shape) * dtype.itemsize / 1e6 for shape, dtype in pretrained.published.source.tensors.values()]
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        jaxtrain.save_pretrained(Path(temporary) / "out", params, model=pretrained)
        seconds = time.perf_counter() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6
        print(
            f"{sum(sizes):.0f} MB of {arguments.dtype} on fsdp={arguments.devices}, largest tensor {max(sizes):.0f} MB"
        )
        print(f"export: {seconds:.1f} s, memory grew by {grown:.0f} MB over the most that reading took")


if __name__ == "__main__":
    main()
