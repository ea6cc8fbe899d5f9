"""Free memory of the heap, given back to the system. No jax here.

Reading weights and compiling allocate and free hundreds of megabytes before the first step. Malloc keeps them, in
pieces that the temporaries of a step, which XLA allocates as one block, do not fit into. Kept, they would count beside
that block for the whole run: 424 MiB of a peak of 4,083 (SmolLM2-135M fine-tuned on CPU in float32 with the settings
of `runtime/allocator.py`, jax 0.10.2).
"""

import ctypes
import platform


def give_back_free_memory() -> None:
    """Gives free pages of the heap back to the system, where the C library is glibc; elsewhere it does nothing."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
