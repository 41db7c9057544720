"""Freed memory stays with the process: rounds of large pieces touch far fewer new pages."""

import platform
import subprocess
import sys

import pytest

PROBE = """
import resource, sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    from pdserve.engine.cpu_memory import keep_freed_memory
    assert keep_freed_memory()
def faults():
    pieces = [torch.ones(4 << 20) for _ in range(3)]  # of 16 MiB
    del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
for _ in range(10):
    faults()
print(faults() - before)
"""


def page_faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROBE, mode], capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_kept() -> None:
    assert page_faults("keep") < page_faults("default") / 3
