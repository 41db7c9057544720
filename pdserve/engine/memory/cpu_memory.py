"""Stops the C library from returning freed memory to the system between steps (Linux with glibc; a
no-op elsewhere).

On CPU every step allocates and frees the same few megabytes. By default glibc maps and unmaps each
large piece, and the page faults cost more than the arithmetic. A prefill of 2,048 rows took 130 ms
that way, and takes 93 ms with this setting. Called once by an engine on CPU.
"""

import ctypes

# <malloc.h>
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8


def keep_freed_memory() -> bool:
    """Keep freed pieces of up to 32 MiB (glibc's limit) in the process, up to 1 GiB in all. Returns
    False where this cannot be set."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Arenas of other threads consist of small mapped heaps. With one arena they share the main one,
    # which grows.
    settings = {
        M_ARENA_MAX: 1,
        M_MMAP_THRESHOLD: 32 << 20,
        M_TRIM_THRESHOLD: 1 << 30,
        M_TOP_PAD: 64 << 20,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
