"""What a forked child must not keep of this process: signal handlers, locks and connections. No jax here.

Data code forks workers (`multiprocessing.Pool`, loaders of other libraries). A child has copies of every descriptor and
handler: a lock that outlives its holder, a connection that never closes, a signal that ends the worker alone and is
reported as one of the run. Where another program is started (exec), none of this is passed on.
"""

import contextlib
import os
from collections.abc import Callable

_dropped: list[Callable[[], object]] = []
_is_registered = False


def drop_in_children(drop: Callable[[], object]) -> Callable[[], None]:
    """Has something dropped in every child that is forked from here on, what came last first.

    Args:
        drop: Called in the child, on its only thread, before any other code of it; what it raises is ignored.

    Returns:
        A function that takes it back; a second call does nothing.
    """
    global _is_registered
    if not _is_registered:
        # Once, because Python has no way to take it back.
        os.register_at_fork(after_in_child=_drop_all)
        _is_registered = True
    _dropped.append(drop)

    def take_back() -> None:
        with contextlib.suppress(ValueError):
            _dropped.remove(drop)

    return take_back


def _drop_all() -> None:
    while _dropped:
        with contextlib.suppress(Exception):
            _dropped.pop()()
