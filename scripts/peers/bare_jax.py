"""A hand-written JAX step of the transformer, with products over three dims, as is usual.

python scripts/peers/bare_jax.py none|dots|full
"""

import sys

import jax
import jax.numpy as jnp
import optax
from peer import (
    B1,
    B2,
    BATCH,
    CLIP,
    EPSILON,
    HEADS,
    LAYERS,
    LENGTH,
    NORM_EPSILON,
    WEIGHT_DECAY,
    WIDTH,
    batches,
    rates,
    serve,
    values,
)


def norm(x, scale):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON) * scale


def block(x, p):
    def split(y):
        return y.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS)

    y = norm(x, p["norm1"])
    q, k, v = split(y @ p["q"]), split(y @ p["k"]), split(y @ p["v"])
    scores = jnp.einsum("blhd,bshd->bhls", q, k) / (WIDTH // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    y = jnp.einsum("bhls,bshd->blhd", jax.nn.softmax(scores, axis=-1), v)
    x = x + y.reshape(BATCH, LENGTH, WIDTH) @ p["o"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"], None


def given() -> dict:
    """Return the given values, those of the layers stacked."""
    ours = values()

    def blocks(path: str, *shape: int):
        return jnp.asarray(ours[f"blocks/{path}"].reshape(LAYERS, *shape))

    attention = {
        name[0]: blocks(f"attention/{name}/kernel", WIDTH, WIDTH) for name in ("query", "key", "value", "output")
    }
    return {
        "embedding": jnp.asarray(ours["embedding"]),
        "positions": jnp.asarray(ours["positions"]),
        "blocks": {
            "norm1": blocks("attention_norm/scale", WIDTH),
            "norm2": blocks("mlp_norm/scale", WIDTH),
            **attention,
            "up": blocks("mlp/up/kernel", WIDTH, 4 * WIDTH),
            "down": blocks("mlp/down/kernel", 4 * WIDTH, WIDTH),
        },
        "norm": jnp.asarray(ours["output_norm/scale"]),
        "output": jnp.asarray(ours["output"]),
    }


def main(remat: str) -> None:
    body = block
    if remat == "dots":
        keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        body = jax.checkpoint(body, policy=keep, prevent_cse=False)
    elif remat == "full":
        body = jax.checkpoint(body, prevent_cse=False)

    def loss_fn(params, inputs, targets):
        x, _ = jax.lax.scan(body, params["embedding"][inputs] + params["positions"], params["blocks"])
        logits = norm(x, params["norm"]) @ params["output"]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))

    def decayed(params):
        return jax.tree.map(lambda p: p.ndim > 2 or (p.ndim == 2 and p.shape[0] != LAYERS), params)

    table = jnp.asarray(rates())
    adamw = optax.adamw(lambda step: table[step], b1=B1, b2=B2, eps=EPSILON, weight_decay=WEIGHT_DECAY, mask=decayed)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), adamw)

    def step(params, state, inputs, targets):
        loss, gradients = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(step, donate_argnums=(0, 1))
    params = given()
    state = jax.jit(optimizer.init)(params)
    rows = batches()

    def run(steps: int) -> float:
        nonlocal params, state
        losses = []
        for _ in range(steps):
            params, state, loss = step(params, state, *next(rows))
            losses.append(loss)
        jax.block_until_ready((params, state))
        return float(sum(losses)) / steps

    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    serve(run, parameters=count, versions=f"jax {jax.__version__}, optax {optax.__version__}")


if __name__ == "__main__":
    main(sys.argv[1])
