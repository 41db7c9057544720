"""Large pieces come from memory that the process keeps, not from mappings that end with them."""

import platform
import subprocess
import sys

import pytest

PROBE = """
import ctypes, sys

class MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = MallInfo
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    from pdserve.engine.memory.cpu_memory import keep_freed_memory
    assert keep_freed_memory()
before = libc.mallinfo2().hblkhd
assert libc.malloc(16 << 20)
print(libc.mallinfo2().hblkhd - before)
"""


def mapped_bytes(mode: str) -> int:
    """Bytes that a piece of 16 MiB adds to glibc's mappings, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, mode], capture_output=True, text=True, check=True, timeout=600
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.processes
def test_large_pieces_are_not_mapped() -> None:
    assert mapped_bytes("default") >= 16 << 20
    assert mapped_bytes("keep") == 0
