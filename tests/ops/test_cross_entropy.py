"""Cross-entropy, whole and in blocks, against its formula in numpy: sums, gradients, memory.

Shapes: B batch, L sequence, D embed, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.models.tasks import language_modeling
from jaxtrain.ops.loss.blocks import Logits, block_bytes, choose_blocks
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, cross_entropy_sums

B, L, D, V = 2, 21, 16, 300


@dataclass(frozen=True)
class Row:
    """How logits are cut, and what else differs from the plainest case."""

    by: Logits
    size: int | None
    dtype: Any = jnp.float32
    tied: bool = False
    weights: bool = False
    z_loss: float | None = None
    offset: float = 0.0
    bias: bool = False
    softcap: float | None = None


ALL = dict(weights=True, z_loss=1e-2, bias=True, softcap=3.0)
ROWS = {
    "whole": Row("whole", None, **ALL),
    "whole, tied": Row("whole", None, tied=True),
    "vocabulary, logits far from zero": Row("vocabulary", 100, offset=1e4),
    "vocabulary that blocks do not divide": Row("vocabulary", 64, **ALL),
    "vocabulary in one block": Row("vocabulary", 1000, tied=True, z_loss=1e-2),
    "vocabulary, tied, bf16": Row("vocabulary", 128, dtype=jnp.bfloat16, tied=True, bias=True, weights=True),
    "vocabulary, fp16": Row("vocabulary", 128, dtype=jnp.float16, bias=True, softcap=3.0),
    "tokens, logits far from zero": Row("tokens", 14, offset=1e4),
    "tokens that blocks do not divide": Row("tokens", 16, **ALL),
    "tokens in one block": Row("tokens", 1000, tied=True),
    "tokens, tied, bf16": Row("tokens", 8, dtype=jnp.bfloat16, tied=True, **ALL),
}


def inputs(row: Row) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Hidden states, kernel, targets and weights."""
    rng = np.random.default_rng(0)
    hidden, kernel = rng.normal(size=(B, L, D)), rng.normal(size=(V, D) if row.tied else (D, V))
    if row.offset:
        hidden[..., 0], kernel[0] = 1, kernel[0] + row.offset
    targets = rng.integers(0, V, (B, L))
    targets[0, :4] = 0, V - 1, V - 2, V - 1  # the ends, where the last block overlaps
    weights = rng.integers(0, 3, (B, L)) / 2 if row.weights else np.ones((B, L))
    return (
        jnp.asarray(hidden, row.dtype),
        jnp.asarray(kernel, row.dtype),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


def bias_of(row: Row) -> jax.Array | None:
    return jnp.asarray(np.random.default_rng(1).normal(size=V), row.dtype) if row.bias else None


def numbers(row: Row) -> list[np.ndarray]:
    """Total, cross-entropy, z-loss and the gradients of all factors of a loss that scales the total."""
    hidden, kernel, targets, weights = inputs(row)

    def loss(factors: tuple[jax.Array, jax.Array, jax.Array | None]) -> Any:
        hidden, kernel, bias = factors
        logits = DeferredLogits(hidden, kernel, tied=row.tied, bias=bias, softcap=row.softcap)
        sums = cross_entropy_sums(logits, targets, weights, z_loss=row.z_loss, by=row.by, size=row.size)
        # What is reported carries no gradient.
        return sums.total * 0.37 + sums.cross_entropy + sums.z_loss, (sums.total, sums.cross_entropy, sums.z_loss)

    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))((hidden, kernel, bias_of(row)))
    gradients = jax.tree.leaves(gradients)
    assert {gradient.dtype for gradient in gradients} == {jnp.dtype(row.dtype)}
    return [np.asarray(x, np.float64) for x in (*sums, *gradients)]


def formula(row: Row) -> list[np.ndarray]:
    """The same in float64, of the very same (rounded) factors."""
    hidden, kernel, targets, weights = (np.asarray(x) for x in inputs(row))
    x, w = (np.asarray(a, np.float64) for a in (hidden.reshape(-1, D), kernel.T if row.tied else kernel))
    plain = x @ w + (np.asarray(bias_of(row), np.float64) if row.bias else 0)
    logits = row.softcap * np.tanh(plain / row.softcap) if row.softcap else plain
    top = logits.max(-1, keepdims=True)
    logsumexp = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
    chosen = np.arange(V) == targets.reshape(-1, 1)
    factors, z_loss = weights.reshape(-1, 1), row.z_loss or 0.0
    nats = np.sum(factors * (logsumexp - np.sum(logits, -1, where=chosen, keepdims=True)))
    z = z_loss * np.sum(factors * logsumexp**2)
    slopes = 0.37 * factors * (np.exp(logits - logsumexp) * (1 + 2 * z_loss * logsumexp) - chosen)
    if row.softcap:
        slopes = slopes * (1 - (logits / row.softcap) ** 2)
    of_kernel = x.T @ slopes
    gradients = [(slopes @ w.T).reshape(B, L, D), of_kernel.T if row.tied else of_kernel]
    return [nats + z, nats, z, *gradients, *([slopes.sum(0)] if row.bias else [])]


@pytest.mark.parametrize("name", ROWS)
def test_sums_and_gradients_are_those_of_the_formula(name: str) -> None:
    row = ROWS[name]
    found, wanted = numbers(row), formula(row)
    # Sums of 42 tokens of 300 ids in another order; an offset of 1e4 costs the logits themselves 1e4 x 2^-24.
    close = 1e-3 if row.offset else 2e-6
    np.testing.assert_allclose(found[:3], wanted[:3], rtol=close)
    for gradient, expected in zip(found[3:], wanted[3:], strict=True):
        # The gradient of the logits is rounded to the dtype once, the result once, that of tokens once more.
        rounding = 0.0 if row.dtype == jnp.float32 else 3 * float(jnp.finfo(row.dtype).eps) / 2
        assert np.linalg.norm(gradient - expected) <= (close + rounding) * np.linalg.norm(expected)


CHOICES = {
    "bytes on a CPU": ((4096, 384, 256, 4), "whole", 1),
    "GPT-2, 4 rows": ((4096, 768, 50257, 2), "whole", 1),
    "GPT-2, 16 rows: the kernel's sum is small beside whole logits": ((16384, 768, 50257, 2), "tokens", 8),
    "Llama 8B, 8,192 tokens: it is not": ((8192, 4096, 128256, 2), "vocabulary", 32),
    "Llama 8B, tensor=8": ((8192, 4096, 16032, 2), "whole", 1),
    "a million tokens": ((2**20, 4096, 128256, 2), "tokens", 512),
}


def test_the_cut_follows_from_the_sizes() -> None:
    for name, ((tokens, width, vocabulary, itemsize), by, count) in CHOICES.items():
        blocks = choose_blocks(tokens, width, vocabulary, itemsize=itemsize)
        assert (blocks.by, blocks.count) == (by, count), name
        if by != "whole":
            held = block_bytes(blocks, tokens, width, vocabulary, itemsize=itemsize)
            assert 2 * held <= itemsize * tokens * vocabulary, name


def temporaries(by: Logits | None) -> int:
    """What the CPU's compiler plans for loss and gradients of 8,192 tokens and 128,256 ids, width 1024, fp32."""
    shapes = [
        jax.ShapeDtypeStruct(dims, dtype)
        for dims, dtype in (((1, 8192, 1024), "float32"), ((1024, 128_256), "float32"), ((1, 8192), "int32"))
    ]

    def loss(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> jax.Array:
        weights = jnp.ones(targets.shape, jnp.float32)
        return cross_entropy_sums(DeferredLogits(hidden, kernel), targets, weights, by=by).total

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_of_a_large_vocabulary_falls_at_least_fourfold() -> None:
    whole = temporaries("whole")
    assert whole >= 4 * 8192 * 128_256, "the plain loss must hold all logits, or the comparison says nothing"
    assert temporaries(None) * 4 <= whole


def test_tokens_are_refused_in_fp16() -> None:
    """Gradients that are made in the forward pass would be rounded before the loss scale reaches them."""
    hidden, kernel, targets, weights = inputs(ROWS["vocabulary, fp16"])
    logits = DeferredLogits(hidden, kernel)
    with pytest.raises(ConfigError, match=r"loss\.logits=tokens .* use loss\.logits=vocabulary"):
        cross_entropy_sums(logits, targets, weights, by="tokens")


def test_z_loss_is_reported_and_left_out_of_evaluation() -> None:
    hidden, kernel, targets, _ = inputs(ROWS["whole, tied"])
    task = language_modeling(z_loss=1e-2)

    @jax.jit
    def run(logits: DeferredLogits) -> Any:
        return [function(logits, {"targets": targets}) for function in (task.loss, task.evaluation)]

    (total, weight, metrics), evaluated = run(DeferredLogits(hidden, kernel, tied=True))
    plain = formula(ROWS["whole, tied"])[1]
    np.testing.assert_allclose(metrics["cross_entropy"][0], plain, rtol=1e-6)  # the same sum
    np.testing.assert_allclose(total, plain + metrics["z_loss"][0], rtol=1e-6)  # one addition
    assert float(metrics["z_loss"][0]) > 0
    assert float(weight) == B * L
    np.testing.assert_allclose(evaluated[0], plain, rtol=1e-6)
    assert evaluated[2] == {}
