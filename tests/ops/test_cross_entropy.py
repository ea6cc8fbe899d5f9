"""Cross-entropy in blocks against the plain one: sums, gradients, memory.

Shapes: B batch, L sequence, D embed, V vocabulary.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import load_config
from jaxtrain.errors import ConfigError
from jaxtrain.models.tasks import build_task, language_modeling
from jaxtrain.ops.loss.blocks import Logits, block_bytes, choose_blocks
from jaxtrain.ops.loss.cross_entropy import DeferredLogits, compute_logits, cross_entropy_sums

B, L, D, V = 2, 21, 16, 300


@dataclass(frozen=True)
class Row:
    """How logits are cut, and what else differs from the plainest case."""

    by: Logits
    size: int
    dtype: Any = jnp.float32
    tied: bool = False
    weights: bool = False
    z_loss: float | None = None
    offset: float = 0.0
    bias: bool = False
    softcap: float | None = None


ROWS = {
    "vocabulary": Row("vocabulary", 100),
    "vocabulary that blocks do not divide": Row("vocabulary", 64, weights=True, z_loss=1e-2),
    "vocabulary in one block": Row("vocabulary", 1000, z_loss=1e-2),
    "vocabulary, tied": Row("vocabulary", 128, tied=True, weights=True),
    "vocabulary, bf16": Row("vocabulary", 128, dtype=jnp.bfloat16, tied=True, weights=True, z_loss=1e-2),
    "vocabulary, fp16": Row("vocabulary", 128, dtype=jnp.float16),
    "vocabulary, logits far from zero": Row("vocabulary", 64, offset=1e4),
    "tokens": Row("tokens", 14),
    "tokens that blocks do not divide": Row("tokens", 16, weights=True, z_loss=1e-2),
    "tokens in one block": Row("tokens", 1000, tied=True),
    "tokens, tied, bf16": Row("tokens", 8, dtype=jnp.bfloat16, tied=True, weights=True, z_loss=1e-2),
    "tokens, logits far from zero": Row("tokens", 16, offset=1e4),
    "vocabulary, bias": Row("vocabulary", 64, bias=True, weights=True, z_loss=1e-2),
    "vocabulary, tied, bias, bf16": Row("vocabulary", 64, dtype=jnp.bfloat16, tied=True, bias=True),
    "vocabulary, softcap": Row("vocabulary", 64, softcap=3.0, weights=True, z_loss=1e-2),
    "vocabulary, bias, softcap, fp16": Row("vocabulary", 128, dtype=jnp.float16, bias=True, softcap=3.0),
    "tokens, bias": Row("tokens", 16, bias=True, weights=True, z_loss=1e-2),
    "tokens, tied, bias, softcap, bf16": Row("tokens", 16, dtype=jnp.bfloat16, tied=True, bias=True, softcap=3.0),
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


def numbers(row: Row, by: Logits, dtype: Any) -> list[np.ndarray]:
    """Total, cross-entropy, z-loss and the gradients of all factors of a loss that scales the total."""
    hidden, kernel, targets, weights = inputs(row)
    factors = jax.tree.map(lambda factor: factor.astype(dtype), (hidden, kernel, bias_of(row)))

    def loss(factors: tuple[jax.Array, jax.Array, jax.Array | None]) -> Any:
        hidden, kernel, bias = factors
        logits = DeferredLogits(hidden, kernel, tied=row.tied, bias=bias, softcap=row.softcap)
        size = None if by == "whole" else row.size
        sums = cross_entropy_sums(logits, targets, weights, z_loss=row.z_loss, by=by, size=size)
        return sums.total * 0.37, (sums.cross_entropy, sums.z_loss)

    (total, more), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(factors)
    gradients = jax.tree.leaves(gradients)
    assert {gradient.dtype for gradient in gradients} == {jnp.dtype(dtype)}
    return [np.asarray(x, np.float64) for x in (total, *more, *gradients)]


@pytest.mark.parametrize("name", ROWS)
def test_blocks_give_the_numbers_of_whole_logits(name: str) -> None:
    row = ROWS[name]
    total, nats, z, *gradients = numbers(row, row.by, row.dtype)
    # The plain loss in float32 of the very same (rounded) factors.
    plain_total, plain_nats, plain_z, *plain = numbers(row, "whole", jnp.float32)
    # Sums of 42 tokens of 300 ids in another order; an offset of 1e4 costs the logits themselves 1e4 x 2^-24.
    close = 1e-3 if row.offset else 1e-6
    np.testing.assert_allclose([total, nats], [plain_total, plain_nats], rtol=close)
    np.testing.assert_allclose(z, plain_z, rtol=close)
    assert (row.z_loss is None) == (z == 0)
    for found, wanted in zip(gradients, plain, strict=True):
        # The gradient of the logits is rounded to the dtype once, the result once, that of tokens once more.
        rounding = 0.0 if row.dtype == jnp.float32 else 3 * float(jnp.finfo(row.dtype).eps) / 2
        assert np.linalg.norm(found - wanted) <= (close + rounding) * np.linalg.norm(wanted)


@pytest.mark.parametrize("tied", [False, True], ids=["kernel", "table"])
def test_logits_with_bias_and_softcap_follow_their_formula(tied: bool) -> None:
    row = Row("vocabulary", 100, tied=tied, bias=True, softcap=3.0)
    hidden, kernel, *_ = inputs(row)
    bias = bias_of(row)
    assert bias is not None
    found = DeferredLogits(hidden, kernel, tied=tied, bias=bias, softcap=3.0).logits()
    wanted = 3 * np.tanh((np.asarray(hidden) @ np.asarray(kernel.T if tied else kernel) + np.asarray(bias)) / 3)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)  # 16 products
    assert np.abs(wanted).max() > 2.9, "no logit reaches the cap, so that it is not tested"


def test_reports_carry_no_gradient() -> None:
    hidden, kernel, targets, weights = inputs(ROWS["vocabulary"])

    def reported(hidden: jax.Array) -> jax.Array:
        sums = cross_entropy_sums(DeferredLogits(hidden, kernel), targets, weights, by="vocabulary", size=100)
        return sums.cross_entropy + sums.z_loss

    assert not np.any(jax.grad(reported)(hidden))


def test_deferred_logits_are_computed_wherever_they_stand() -> None:
    hidden, kernel, *_ = inputs(ROWS["vocabulary"])
    found = compute_logits({"logits": DeferredLogits(hidden, kernel), "load": jnp.ones(3)})
    np.testing.assert_allclose(found["logits"], hidden @ kernel, rtol=1e-5, atol=1e-5)  # 16 products
    assert found["load"].shape == (3,)


CHOICES = {
    "bytes on a CPU": ((4096, 384, 256, 4), "whole", 1),
    "GPT-2, 4 rows": ((4096, 768, 50257, 2), "whole", 1),
    "GPT-2, 16 rows: the kernel's sum is small beside whole logits": ((16384, 768, 50257, 2), "tokens", 8),
    "Llama 8B, 8,192 tokens: it is not": ((8192, 4096, 128256, 2), "vocabulary", 32),
    "Llama 8B, tensor=8": ((8192, 4096, 16032, 2), "whole", 1),
    "a million tokens": ((2**20, 4096, 128256, 2), "tokens", 512),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_cut_follows_from_the_sizes(name: str) -> None:
    (tokens, width, vocabulary, itemsize), by, count = CHOICES[name]
    blocks = choose_blocks(tokens, width, vocabulary, itemsize=itemsize)
    assert (blocks.by, blocks.count) == (by, count)
    if by != "whole":
        held = block_bytes(blocks, tokens, width, vocabulary, itemsize=itemsize)
        assert 2 * held <= itemsize * tokens * vocabulary


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


REFUSED = {
    "a block of whole logits": (["loss.block=64"], "loss.block=64"),
    "z-loss of classes": (["loss.z_loss=1e-4", "task=classification"], "task=classification"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_mean_nothing_are_refused(name: str) -> None:
    overrides, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        build_task(load_config("quickstart", overrides=overrides).config)


def test_a_block_of_whole_logits_is_refused_in_python_too() -> None:
    with pytest.raises(ConfigError, match=r"loss\.block=64 has no effect with loss\.logits=whole"):
        language_modeling(logits="whole", block=64)


def test_a_loss_put_in_the_place_of_the_task_s_own_is_that_of_evaluation_too_and_gets_logits() -> None:
    task = dataclasses.replace(language_modeling(), loss=lambda outputs, batch: (jnp.sum(outputs), jnp.float32(1), {}))
    assert task.evaluation is task.loss
    assert not task.takes_deferred_logits


def test_tokens_are_refused_in_fp16() -> None:
    """Gradients that are made in the forward pass would be rounded before the loss scale reaches them."""
    hidden, kernel, targets, weights = inputs(ROWS["vocabulary, fp16"])
    logits = DeferredLogits(hidden, kernel)
    weights = jnp.ones(targets.shape) if weights is None else weights
    with pytest.raises(ConfigError, match=r"loss\.logits=tokens .* use loss\.logits=vocabulary"):
        cross_entropy_sums(logits, targets, weights, by="tokens")


def test_z_loss_is_reported_and_left_out_of_evaluation() -> None:
    hidden, kernel, targets, _ = inputs(ROWS["vocabulary"])
    logits, batch = DeferredLogits(hidden, kernel), {"targets": targets}
    plain = language_modeling().loss(logits, batch)[0]
    task = language_modeling(z_loss=1e-2)
    total, weight, metrics = task.loss(logits, batch)
    np.testing.assert_allclose(metrics["cross_entropy"][0], plain, rtol=1e-6)  # the same sum
    np.testing.assert_allclose(total, plain + metrics["z_loss"][0], rtol=1e-6)  # one addition
    assert float(metrics["z_loss"][0]) > 0
    assert float(weight) == B * L
    evaluated = task.evaluation(logits, batch)
    np.testing.assert_allclose(evaluated[0], plain, rtol=1e-6)
    assert evaluated[2] == {}
