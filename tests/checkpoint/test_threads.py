"""Checkpointers in several threads of one process, as where a program trains two runs at once."""

import logging
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import Checkpointer, failures
from jaxtrain.errors import CheckpointError


def test_saves_and_reads_of_several_threads_are_their_own(tmp_path):
    num_threads, steps = 3, range(1, 5)
    together = threading.Barrier(num_threads, timeout=60)

    def train(thread):
        found = []
        with Checkpointer(tmp_path / str(thread), keep_last=9, report=found.append) as checkpointer:
            for step in steps:
                together.wait()  # each thread verifies its step before beside the saves of the others
                checkpointer.save(step, {"x": jnp.full((8, 4), 10.0 * thread + step)}, metadata={})
        with Checkpointer(tmp_path / str(thread)) as checkpointer:
            together.wait()
            read = [checkpointer.restore({"x": jnp.zeros((8, 4))}, step=step)["x"] for step in steps]
        return [float(array[0, 0]) for array in read], found

    with ThreadPoolExecutor(num_threads) as pool:
        found = list(pool.map(train, range(num_threads)))
    assert found == [([10.0 * thread + step for step in steps], []) for thread in range(num_threads)]


def test_failed_reads_of_several_threads_leave_the_process_as_it_was():
    """What holds back the reports of Orbax is put back by the last thread, whichever began first."""
    hook, filters, logger = sys.unraisablehook, list(warnings.filters), logging.getLogger("asyncio")
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first():
        with failures._reports_held_back():
            first_is_in.set()
            second_is_in.wait(20)
        first_is_out.set()

    thread = threading.Thread(target=first)
    thread.start()
    first_is_in.wait(20)
    with failures._reports_held_back():
        second_is_in.set()
        first_is_out.wait(20)
        assert sys.unraisablehook is not hook
    thread.join(20)
    assert (sys.unraisablehook, list(warnings.filters), logger.disabled) == (hook, filters, False)


def test_a_save_after_close_is_refused_in_one_line(tmp_path):
    """It would be lost where the process ends before it is complete; who enters the block again saves again."""
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2):
        with checkpointer:
            assert checkpointer.save(step, {"x": jnp.ones(4)}, metadata={})
        with pytest.raises(CheckpointError, match=r"^the Checkpointer of [^\n]* is closed: [^\n]*$"):
            checkpointer.save(9, {"x": jnp.ones(4)}, metadata={})
    assert checkpointer.steps() == [1, 2]
