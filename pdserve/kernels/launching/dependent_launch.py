# mypy: allow-untyped-defs
"""Programmatic dependent launch (from Hopper on): a kernel starts while the one before it still
runs, and waits for it only where it first touches what that one wrote or read.

Contract of a kernel launched with `launch_options`: it calls `begin` first, and before `wait` it
reads nothing but weights and the step's lengths and block tables, which are in place before the
step's first kernel, and writes nothing. Every program of such a kernel waits, so one that has
waited sees the results of all before it. What is read early must not be written by the launches
right before. Knows no kernel. Called by the launchers of a decode step's kernels.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from pdserve.kernels.launching.launch import is_hopper


@lru_cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch on `device`: the kernel's constant PDL, and Triton's option
    where it is true."""
    return {"PDL": True, "launch_pdl": True} if is_hopper(device) else {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):
    """Lets the next kernel start as soon as all programs of this one have."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Returns when the kernels before this one are done and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()
