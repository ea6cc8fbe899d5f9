"""Timing of a call on a device: the median over rounds that are long enough for the clock, after a warm-up."""

import statistics
import time
from collections.abc import Callable

import jax

# A round must be much longer than a dispatch, about 0.1 ms, and than the resolution of the clock.
_ROUND_SECONDS = 0.02
_ROUNDS = 5


def call_seconds(call: Callable[[], object], *, budget: float = 1.0) -> float:
    """Measure the median seconds of a call over five rounds, or fewer where these would exceed the budget.

    Args:
        call: returns arrays. On accelerators the end of a round waits for the device, so that dispatches overlap; on a
            CPU, which may run several calls at once, each call is waited for.
        budget: seconds for the rounds, besides the first call, which compiles.
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
            # One result at a time, because it may fill most of the memory, or be donated to the next call.
            result = call()
            if in_turn:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        rounds.append((time.perf_counter() - began) / calls)
    return statistics.median(rounds)
