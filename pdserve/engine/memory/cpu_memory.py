"""Keeps the C library from giving freed memory back to the system between steps (Linux with glibc;
a no-op elsewhere).

On CPU every step allocates and frees the same few megabytes. By default glibc maps and unmaps each
large piece, and the page faults cost more than the arithmetic: a prefill of 2,048 rows took 130 ms
with them and 93 ms without. Called once by an engine on CPU.
"""

import ctypes

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def keep_freed_memory() -> bool:
    """Pieces up to 32 MiB (glibc's limit) stay with the process, up to 1 GiB in all. False where it
    cannot be set."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Other threads' arenas are made of small mapped heaps: with one arena they share the main one,
    # which grows.
    settings = {
        M_ARENA_MAX: 1,
        M_MMAP_THRESHOLD: 32 << 20,
        M_TRIM_THRESHOLD: 1 << 30,
        M_TOP_PAD: 64 << 20,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
