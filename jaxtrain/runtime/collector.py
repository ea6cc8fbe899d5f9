"""Python's garbage collector, off while a training process starts.

Imports and tracing make a million objects that stay; looking through them again and again takes 0.5 of the 2.9 s
of a warm start of `quickstart` (2 cores; docs/benchmarks.md). What is left after the first step is looked through once.
"""

import gc

_paused = False


def pause() -> None:
    """Stop collecting until `resume`; nothing where somebody stopped it before."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume() -> None:
    """Collect, leave what remains out of later collections, and collect again by itself; nothing without `pause`."""
    global _paused
    if _paused:
        gc.collect()
        gc.freeze()
        gc.enable()
        _paused = False
