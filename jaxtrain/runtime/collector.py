"""Python's garbage collector, off while a training process starts.

Imports and tracing create a million objects that are never freed. Scanning them repeatedly takes 0.5 of the 2.9 s of a
warm start of `quickstart` (2 cores; docs/benchmarks.md). The objects left after the first step are scanned once.
"""

import gc

_paused = False


def pause() -> None:
    """Stops the collector until `resume`; does nothing where other code has already stopped it."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume() -> None:
    """Collects once, exempts all remaining objects and restarts the collector; does nothing without `pause`."""
    global _paused
    if _paused:
        gc.collect()
        gc.freeze()
        gc.enable()
        _paused = False
