"""How long reading a published folder into shardings takes, beside reading its bytes, and how much memory it takes.

    python scripts/time_published_reading.py [--megabytes 400] [--dtype bfloat16] [--devices 8] [--cold]

Makes a Llama-like folder of about that size in a temporary directory, reads its files once so that they are in the
page cache, and takes turns between reading the bytes (`readinto` a buffer) and reading the parameters onto fsdp=N.
With --cold the file's pages are dropped from the cache before each turn, so that both come from the disk.
Prints the medians, their ratio, and the growth of resident memory over the first read.
"""

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import jaxtrain
from jaxtrain.interop.settings import parse_settings, settings_of
from jaxtrain.published.entries import Entry, names_of, positions
from jaxtrain.published.families.llama import FAMILY
from jaxtrain.published.safetensors import DTYPES, write_safetensors


def make_folder(folder: Path, megabytes: int, dtype: str) -> None:
    """Writes a folder of about this size."""
    kind = DTYPES[{"float32": "F32", "bfloat16": "BF16"}[dtype]]
    width, vocabulary = 1024, 32000
    layer = width * width * 4 + 3 * width * 4 * width
    layers = max(1, round((megabytes * 1e6 / kind.itemsize - vocabulary * width) / layer))
    config = dict(
        model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=layers, num_attention_heads=16, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    settings = settings_of(parse_settings(FAMILY.from_published(config)))
    rows = [row for row in FAMILY.tensors(settings) if isinstance(row, Entry)]
    shapes = {names_of(row, at)[0]: (row.transform.theirs, kind) for row in rows for at in positions(row)}
    generator = np.random.default_rng(0)
    tensors = ((name, generator.standard_normal(shape, np.float32).astype(kind)) for name, (shape, _) in shapes.items())
    write_safetensors(folder / "model.safetensors", shapes, tensors)


def drop_from_cache(file: Path) -> None:
    """Drops the pages of a file from the operating system's cache, written ones after they reached the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    jaxtrain.start(emulate=arguments.devices)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        make_folder(folder, arguments.megabytes, arguments.dtype)
        file = folder / "model.safetensors"
        size = file.stat().st_size
        pretrained = jaxtrain.load_pretrained(folder)
        sharded = jaxtrain.shard_model(pretrained.model, mesh=jaxtrain.make_mesh(fsdp=arguments.devices))
        share = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sharded.abstract_params))
        largest = max(np.prod(shape) * dtype.itemsize for shape, dtype in pretrained.published.source.tensors.values())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times: dict[str, list[float]] = {"bytes": [], "parameters": []}
        grown = 0
        for round_number in range(arguments.rounds):
            if arguments.cold:
                drop_from_cache(file)
            start = time.perf_counter()
            params = jax.block_until_ready(pretrained.read(sharded)[0])
            times["parameters"].append(time.perf_counter() - start)
            if round_number == 0:
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            del params
            if arguments.cold:
                drop_from_cache(file)
            start = time.perf_counter()
            buffer = bytearray(size)
            with file.open("rb") as stream:
                stream.readinto(buffer)
            times["bytes"].append(time.perf_counter() - start)
            del buffer
        median = {name: statistics.median(found) for name, found in times.items()}
        print(
            f"{size / 1e6:.0f} MB of {arguments.dtype}, {share / 1e6:.0f} MB of float32 on {arguments.devices} devices"
        )
        print(f"bytes {median['bytes']:.3f} s, parameters {median['parameters']:.3f} s", end=", ")
        print(f"ratio {median['parameters'] / median['bytes']:.2f}")
        bound = (1.3 * share + largest) / 1e6
        print(f"memory grew by {grown / 1e6:.0f} MB; 1.3 x share + largest tensor is {bound:.0f} MB")


if __name__ == "__main__":
    main()
