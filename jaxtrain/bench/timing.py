"""Seconds of a call on a device: warm, in rounds long enough for the clock, as a median."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

# A round must be long against a dispatch, which is about 0.1 ms, and against the clock.
_ROUND_SECONDS = 0.02
_ROUNDS = 5


def call_seconds(call: Callable[[], Any], *, budget: float = 1.0) -> float:
    """Median seconds of a call over five rounds, fewer where they would take more than the budget.

    Args:
        call: gives arrays. The device is waited for at the end of a round, so that dispatches overlap; a CPU, which may
            run calls side by side, after each.
        budget: seconds for the rounds, beside the first call, which compiles.
    """
    in_turn = jax.default_backend() == "cpu"
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    once = max(time.perf_counter() - began, 1e-6)
    calls = max(1, round(_ROUND_SECONDS / once))
    rounds: list[float] = []
    while len(rounds) < _ROUNDS and (not rounds or sum(rounds) * calls < budget):
        began = time.perf_counter()
        result = None
        for _ in range(calls):
            # One result at a time: it may be most of the memory, or be donated to the next call.
            result = call()
            if in_turn:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - began) / calls)
    return statistics.median(rounds)
