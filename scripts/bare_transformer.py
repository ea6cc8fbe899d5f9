"""A hand-written JAX training script without any trainer: the upper limit that `bench_overhead.py` compares with.

It computes the same as `configs/bench_cpu.yaml` (GPT-2 style blocks, scanned, matmul results kept, linear layers on
flattened tokens, fp32, AdamW) in one jitted step and a plain loop, and prints one JSON line.
"""

import json
import time

STARTED = time.time()

import pydoc_data.topics  # noqa: E402  (the clock above starts before the imports)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

LAYERS, WIDTH, HEADS, LENGTH, VOCABULARY, BATCH = 6, 384, 6, 256, 256, 16
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.1, 1.0


def init(key):
    keys = iter(jax.random.split(key, 9))

    def normal(*shape, stddev=0.02):
        return stddev * jax.random.normal(next(keys), shape, jnp.float32)

    small = 0.02 / (2 * LAYERS) ** 0.5
    return {
        "embedding": normal(VOCABULARY, WIDTH),
        "positions": normal(LENGTH, WIDTH),
        "blocks": {
            "norm1": jnp.ones((LAYERS, WIDTH)),
            "norm2": jnp.ones((LAYERS, WIDTH)),
            "q": normal(LAYERS, WIDTH, WIDTH),
            "k": normal(LAYERS, WIDTH, WIDTH),
            "v": normal(LAYERS, WIDTH, WIDTH),
            "o": normal(LAYERS, WIDTH, WIDTH, stddev=small),
            "up": normal(LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(LAYERS, 4 * WIDTH, WIDTH, stddev=small),
        },
        "norm": jnp.ones((WIDTH,)),
        "output": normal(WIDTH, VOCABULARY),
    }


def norm(x, scale):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def block(x, p):
    def split(y):
        return y.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS)

    y = norm(x, p["norm1"])
    q, k, v = split(y @ p["q"]), split(y @ p["k"]), split(y @ p["v"])
    scores = jnp.einsum("blhd,bshd->bhls", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    y = jnp.einsum("bhls,bshd->blhd", jax.nn.softmax(scores, axis=-1), v).reshape(-1, WIDTH)
    x = x + y @ p["o"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"], None


def loss_fn(params, inputs, targets):
    x = (params["embedding"][inputs] + params["positions"]).reshape(-1, WIDTH)
    keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    x, _ = jax.lax.scan(jax.checkpoint(block, policy=keep, prevent_cse=False), x, params["blocks"])
    logits = norm(x, params["norm"]) @ params["output"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets.reshape(-1)))


def main(steps: int) -> None:
    text = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(
            LEARNING_RATE,
            b2=0.95,
            weight_decay=WEIGHT_DECAY,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 2 or (p.ndim == 2 and p.shape[0] != LAYERS), params),
        ),
    )

    @jax.jit
    def create(key):
        params = init(key)
        return params, optimizer.init(params)

    def step(params, state, inputs, targets):
        loss, gradients = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    params, state = create(jax.random.key(0))
    generator = np.random.default_rng(0)
    rows = (len(tokens) - 1) // LENGTH
    seconds, losses, first_step = [], [], 0.0
    for number in range(steps):
        begin = time.perf_counter()
        starts = generator.integers(0, rows, BATCH)[:, None] * LENGTH + np.arange(LENGTH)
        params, state, loss = step(params, state, tokens[starts], tokens[starts + 1])
        losses.append(float(loss))
        seconds.append(time.perf_counter() - begin)
        if number == 0:
            first_step = time.time() - STARTED
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    median = float(np.median(seconds[1:])) if steps > 1 else None
    figures = {"first_step_seconds": first_step, "step_seconds": median, "parameters": count, "loss": losses[-1]}
    print(json.dumps(figures))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="?", type=int, default=20)
    main(parser.parse_args().steps)
