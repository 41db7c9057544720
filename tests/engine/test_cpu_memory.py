"""Freed memory stays with the process: a second round of large pieces touches no new pages."""

import platform
import resource
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
    torch.ones(2 << 20).add(1)  # 8 MiB, twice
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
faults()
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
    pages_a_round = 2 * (8 << 20) // resource.getpagesize()
    assert page_faults("default") > 5 * pages_a_round
    assert page_faults("keep") < pages_a_round
