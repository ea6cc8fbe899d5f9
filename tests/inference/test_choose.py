"""The next token of rows that are sampled each in its own way: rules, ties, penalties, and what it may depend on."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.inference.sampling import choose_rows, log_probabilities_of, row_sampling

TIES = [1.0, 3.0, 3.0, 3.0, -2.0]
RISING = [0.0, 1.0, 2.0, 3.0, 4.0]
chosen_of = jax.jit(choose_rows)


def no_counts(logits_SV: Any) -> dict[str, Any]:
    """Of rows without penalties."""
    zeros_SV = jnp.zeros(logits_SV.shape, jnp.int32)
    return dict(prompt_counts_SV=zeros_SV, output_counts_SV=zeros_SV)


def draws(logits: list[float], count: int = 100, **sampling: Any) -> set[int]:
    """What rows of the same logits get, each with its own seed."""
    rows = row_sampling([jt.Sampling(**sampling)] * count, range(count))
    logits_SV = jnp.tile(jnp.array(logits), (count, 1))
    return set(chosen_of(logits_SV, rows, jnp.zeros(count, jnp.int32), **no_counts(logits_SV)).tolist())


# Probabilities of RISING are .012, .032, .086, .234 and .636.
RULES = {
    "greedy takes the first of equals": (TIES, dict(temperature=0), {1}),
    "top_k of 1": (TIES, dict(temperature=1.0, top_k=1), {1}),
    "top_k among equals": (TIES, dict(temperature=1.0, top_k=2), {1, 2}),
    "top_p among equals": (TIES, dict(temperature=1.0, top_p=0.5), {1, 2}),
    "3 / 1.2e-38 is more than float32 holds": (TIES, dict(temperature=1.2e-38), {1, 2, 3}),
    "a top_k beyond the vocabulary": ([0.0] * 4, dict(temperature=1.0, top_k=9, top_p=1.0), {0, 1, 2, 3}),
    "top_p just below two tokens": (RISING, dict(temperature=1.0, top_p=0.63), {4}),
    "top_p just above one token": (RISING, dict(temperature=1.0, top_p=0.64), {3, 4}),
    "top_p of what top_k left": (RISING, dict(temperature=1.0, top_k=2, top_p=0.72), {4}),
    "min_p": (RISING, dict(temperature=1.0, min_p=0.3), {3, 4}),
}


@pytest.mark.parametrize(("logits", "sampling", "wanted"), RULES.values(), ids=RULES)
def test_what_each_rule_leaves(logits, sampling, wanted):
    assert draws(logits, **sampling) == wanted


def test_the_draws_follow_the_probabilities():
    count = 4000
    rows = row_sampling([jt.Sampling(temperature=2.0)] * count, range(count))
    logits_SV = jnp.tile(jnp.array(RISING), (count, 1))
    found = chosen_of(logits_SV, rows, jnp.zeros(count, jnp.int32), **no_counts(logits_SV))
    wanted = np.exp(np.array(RISING) / 2) / np.exp(np.array(RISING) / 2).sum()
    # Four standard deviations of a share of 4,000 draws.
    np.testing.assert_allclose(np.bincount(found, minlength=5) / count, wanted, atol=4 * math.sqrt(0.25 / count))


def test_a_row_depends_on_neither_slot_nor_neighbours():
    kinds = [jt.Sampling(0.9), jt.Sampling(0), jt.Sampling(1.1, 3), jt.Sampling(1.0, None, 0.8), jt.Sampling(min_p=0.1)]
    logits = jax.random.normal(jax.random.key(0), (5, 300)) * 3
    positions = jnp.arange(5, dtype=jnp.int32) + 7
    together = chosen_of(logits, row_sampling(kinds, range(5)), positions, **no_counts(logits))
    order = np.array([3, 0, 4, 2, 1])
    rows = row_sampling([kinds[i] for i in order], order.tolist())
    moved = chosen_of(logits[order], rows, positions[order], **no_counts(logits))
    np.testing.assert_array_equal(together[order], moved)
    alone = chosen_of(logits[2:3], row_sampling(kinds[2:3], [2]), positions[2:3], **no_counts(logits[2:3]))
    assert alone[0] == together[2]


PENALTIES = {
    "repetition of a positive logit": (dict(repetition_penalty=2.0), [4.0, 3.0, 1.0], 1),
    "repetition of negative logits": (dict(repetition_penalty=2.0), [-1.0, -1.5, -3.0], 1),
    "presence of what the output has": (dict(presence_penalty=2.0), [1.0, 2.0, 2.5], 1),
    "frequency counts": (dict(frequency_penalty=0.5), [1.0, 2.0, 3.2], 1),
    "a negative frequency": (dict(frequency_penalty=-2.0), [9.0, 2.0, 6.0], 2),
}


@pytest.mark.parametrize(("sampling", "logits", "wanted"), PENALTIES.values(), ids=PENALTIES)
def test_penalties_change_the_greedy_choice(sampling, logits, wanted):
    """The prompt has token 0, the output token 2, three times."""
    one = jt.Sampling(temperature=0, **sampling)
    found = chosen_of(
        jnp.array([logits]),
        row_sampling([one], [0]),
        jnp.zeros(1, jnp.int32),
        prompt_counts_SV=jnp.array([[1, 0, 0]]),
        output_counts_SV=jnp.array([[0, 0, 3]]),
    )
    assert found.tolist() == [wanted]


def test_log_probabilities_are_of_the_raw_logits():
    logits = jax.random.normal(jax.random.key(0), (2, 50))
    wanted = jax.nn.log_softmax(logits)
    found, ids, values = log_probabilities_of(logits, jnp.array([3, 49]), 4)
    # float32: two roundings of numbers of about 5.
    np.testing.assert_allclose(found, [wanted[0, 3], wanted[1, 49]], atol=2e-6)
    np.testing.assert_array_equal(ids, jnp.argsort(-wanted)[:, :4])
    np.testing.assert_allclose(values, jnp.sort(wanted)[:, ::-1][:, :4], atol=2e-6)
    assert log_probabilities_of(logits, jnp.array([3, 49]), 0)[1].shape == (2, 0)
