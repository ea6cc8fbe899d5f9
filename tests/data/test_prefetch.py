"""Prefetching keeps order, raises, and leaves no thread behind."""

import subprocess
import sys
import threading

import pytest

from jaxtrain.data import prefetch


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "jaxtrain-prefetch"]


def number(k):
    return {"k": k}


@pytest.mark.parametrize("depth", [0, 2])
def test_batches_come_in_order(depth):
    assert [batch["k"] for batch in prefetch(number, 3, 9, depth=depth)] == list(range(3, 9))
    assert threads() == []


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exception_is_raised_where_its_batch_is_due(depth):
    def load(k):
        if k == 2:
            raise OSError("disk gone")
        return {"k": k}

    seen = []
    with pytest.raises(OSError, match="disk gone"):
        seen.extend(batch["k"] for batch in prefetch(load, 0, 5, depth=depth))
    assert seen == [0, 1]
    assert threads() == []


def test_closing_stops_the_thread():
    loaded, taken = [], 3
    batches = prefetch(lambda k: loaded.append(k) or {"k": k}, 0, 10**9, depth=2)
    for _ in range(taken):
        next(batches)
    assert len(threads()) == 1
    batches.close()
    assert threads() == []
    # At most `depth` batches beyond those taken, and one that was under way.
    assert len(loaded) <= taken + 3


LEFT_OPEN = """
import jax
import numpy as np

from jaxtrain.data import prefetch

batches = prefetch(lambda k: jax.block_until_ready(jax.device_put(np.ones((1000, 1000)))), 0, 10**9, depth=10**6)
next(batches)
"""


@pytest.mark.long
def test_a_program_may_end_with_an_open_iterator():
    # Otherwise the interpreter ends the thread inside of jax, which aborts the process.
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
