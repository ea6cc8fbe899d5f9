"""Prints the perplexity of a published model on held-out Python prose, in fp32, in bf16 and with int8 weights.

    python scripts/published_perplexity.py SmolLM2-135M-Instruct.Q4_1.gguf

The text is the last tenth of `data.builtin=python_prose` (the topics of Python's own help), which depends on the
version of Python. Rows of 1,024 tokens do not overlap; each token but the first of its row is predicted. Perplexity is
exp of the mean loss in nats, as `jaxtrain eval` reports it.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxtrain as jt
from jaxtrain.config.data import TextData
from jaxtrain.data.documents import open_documents
from jaxtrain.data.tokenizer import load_tokenizer

# Label -> policy, and the format of the kernels.
FORMATS = {"fp32": ("fp32", None), "bf16": ("bf16", None), "int8": ("fp32", "int8")}


def held_out_rows(tokenizer_path: Path, *, length: int, most: int) -> np.ndarray:
    """Returns the first rows of the last tenth of the text, int32 [rows, length]."""
    text = "\n\n".join(open_documents(TextData()).read())
    ids = load_tokenizer(tokenizer_path).encode(text[-len(text) // 10 :])
    rows = min(len(ids) // length, most)
    return ids[: rows * length].reshape(rows, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder with config.json and safetensors, or a GGUF file")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row")
    parser.add_argument("--rows", type=int, default=8, help="rows at most")
    given = parser.parse_args()
    pretrained = jt.load_pretrained(given.model)
    if pretrained.tokenizer_path is None:
        sys.exit(f"{given.model} holds no tokenizer")
    rows = held_out_rows(pretrained.tokenizer_path, length=given.length, most=given.rows)
    version = sys.version.split()[0]
    print(f"{rows.shape[0]} rows of {given.length} tokens of python_prose (Python {version})")
    print(f"{'format':>6}  {'loss':>7}  {'perplexity':>10}  {'seconds':>7}")
    for label, (policy, format) in FORMATS.items():
        sharded = jt.shard_model(pretrained.model, policy=policy, mesh=jt.make_mesh(devices=jax.devices()[:1]))
        params, model_state = pretrained.read(sharded)
        if format is not None:
            params = jt.quantize(params, pretrained.model, format)

        @jax.jit
        def loss(params, row, sharded=sharded, model_state=model_state):
            logits = sharded.apply(params, model_state, row[None], key=None, train=False)[0][0].astype(jnp.float32)
            scores = jax.nn.log_softmax(logits[:-1], axis=-1)
            return -jnp.take_along_axis(scores, row[1:, None], axis=-1).mean()

        began = time.perf_counter()
        mean = float(np.mean([loss(params, row) for row in rows]))
        print(f"{label:>6}  {mean:7.4f}  {math.exp(mean):10.3f}  {time.perf_counter() - began:7.1f}", flush=True)


if __name__ == "__main__":
    main()
