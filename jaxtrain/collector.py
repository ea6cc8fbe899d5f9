"""Python's garbage collector, off while a training process starts.

Imports and tracing make a million objects that stay; looking through them again and again takes 0.4 of the 3.9 s of a
start of `quickstart` (2 cores; docs/benchmarks.md). What is there when training begins is frozen: nobody looks again.
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
    """Collect again, but for what is there already; nothing without `pause`."""
    global _paused
    if _paused:
        gc.freeze()
        gc.enable()
        _paused = False
