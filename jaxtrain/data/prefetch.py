"""Loads batches on a background thread while a step runs."""

import atexit
import math
import threading
from collections.abc import Callable, Generator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import jax

from jaxtrain.config.arguments import check_whole, refusal
from jaxtrain.data.batches import Batch
from jaxtrain.errors import ConfigError, DataError

_DEPTHS = (2, 16)
_BYTES = 64 * 2**20
# A load that takes longer than this is left to itself when the iterator is closed: it may never end.
_CLOSING_SECONDS = 2.0
# How often a consumer that waits looks whether the thread still lives.
_LOOK_SECONDS = 1.0


def queue_depth(spec: Mapping[str, Any]) -> int:
    """Returns how many batches to prepare ahead: more of small ones, so that a pause of the thread costs no time.

    Args:
        spec: Shapes and dtypes of a batch, from `Batches.spec()`.

    Returns:
        16, or fewer so that the batches take at most 64 MiB, but at least 2.
    """
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))
    return max(_DEPTHS[0], min(_DEPTHS[1], _BYTES // max(size, 1)))


def prefetch(load: Callable[[int], Batch], start: int, stop: int, *, depth: int = 2) -> Generator[Batch, None, None]:
    """Yields batches start to stop - 1 in order; a thread loads the next ones meanwhile.

    Closing the iterator stops the thread after the load that is under way; it waits at most two seconds for that.

    Args:
        load: Returns batch k; called on one background thread, in order.
        start: First batch.
        stop: One past the last batch.
        depth: Largest number of batches that are prepared ahead; 0 loads in the consumer, without a thread.

    Yields:
        Batch `start`, `start + 1`, ..., `stop - 1`, as `load` returns them.

    Raises:
        ConfigError: `load` is no function, or a number is no whole number from 0.
        DataError: There was no memory for a batch, the thread ended without one, or `load` raised what would end or
            stop the program without a word (SystemExit, StopIteration, on the thread KeyboardInterrupt).
        Exception: Whatever else `load` raised, when its batch would be next.

    Example:
        >>> for batch in jt.prefetch(step.loader(batches), int(state.step), 3):
        ...     state, metrics = step(state, batch)
        >>> int(state.step)
        3
    """
    # Checked here and not at the first batch: the body of a generator runs only then.
    if not callable(load):
        raise ConfigError(
            refusal("prefetch", "a function k -> batch k", load, "prefetch(step.loader(batches), start, stop)")
        )
    example = "prefetch(load, 0, 100)"
    start = check_whole(start, what="prefetch: start", least=0, write=example)
    stop = check_whole(stop, what="prefetch: stop", least=0, write=example)
    depth = check_whole(depth, what="prefetch: depth", least=0, write="depth=2")
    return _load_ahead(load, start, stop, depth)


def _load_ahead(load: Callable[[int], Batch], start: int, stop: int, depth: int) -> Generator[Batch, None, None]:
    if depth == 0:
        for k in range(start, stop):
            yield _loaded(load, k)
        return

    free = threading.Semaphore(depth)
    ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        for k in range(start, stop):
            free.acquire()
            if stopped.is_set():
                return
            try:
                ready.put((_loaded(load, k, on_thread=True), None))
            except BaseException as error:  # Raised again in the consumer.
                ready.put((None, error))
                return

    # A daemon, so that a consumer that dies without closing the iterator does not keep the process alive.
    thread = threading.Thread(target=work, name="jaxtrain-prefetch", daemon=True)

    def end() -> None:
        stopped.set()
        free.release()
        thread.join(_CLOSING_SECONDS)

    # First: where no thread can be started, there is none to wait for.
    thread.start()
    # An interpreter that ends while the thread is inside of jax would abort.
    atexit.register(end)
    is_waited_for = True
    try:
        for _ in range(start, stop):
            try:
                batch, error = _next_ready(ready, thread)
            except BaseException:  # raised by a signal: the batch that is waited for may never come
                is_waited_for = False
                raise
            if error is not None:
                raise error
            free.release()
            yield batch
            # Released before the wait for the next one: a batch may be gigabytes of device memory.
            del batch
    finally:
        atexit.unregister(end)
        if is_waited_for:
            end()
        else:
            stopped.set()
            free.release()


def _loaded(load: Callable[[int], Batch], k: int, *, on_thread: bool = False) -> Batch:
    """Returns batch k; what is raised for other ends than an error becomes an error."""
    try:
        return load(k)
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        raise DataError(
            f"batch {k} does not fit into the memory of this machine{reason}; set train.global_batch_size, "
            "train.prefetch or train.workers lower"
        ) from error
    except (SystemExit, StopIteration, GeneratorExit) as error:
        raise _odd(k, error) from error
    except KeyboardInterrupt as error:
        # Ctrl-C reaches the main thread alone, so on another thread the function itself raised it.
        if not on_thread:
            raise
        raise _odd(k, error) from error


def _odd(k: int, error: BaseException) -> DataError:
    return DataError(f"reading batch {k} raised {error!r}; let the function of the data raise an Exception instead")


def _next_ready(ready: "SimpleQueue[tuple[Any, BaseException | None]]", thread: threading.Thread) -> Any:
    """Returns what the thread puts next.

    Raises:
        DataError: The thread ended and has put nothing, as it does where there is no memory for that.
    """
    while True:
        was_alive = thread.is_alive()
        try:
            return ready.get(timeout=_LOOK_SECONDS)
        except Empty:
            if not was_alive:
                raise DataError("the thread that loads batches ended without one; run again to go on") from None
