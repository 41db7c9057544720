# mypy: allow-untyped-defs
"""Programmatic dependent launch (from Hopper on): a kernel starts while the kernel before it still
runs. It waits only where it first touches memory that the earlier kernel wrote or read.

A kernel launched with `launch_options` must keep this contract. It calls `begin` first. Before
`wait` it writes nothing, and reads nothing but weights and the step's lengths and block tables,
which are in place before the step's first kernel. Every program of such a kernel waits, so a
program that has waited sees the results of all earlier kernels. Memory that is read early must not
be written by the launches right before. This file knows no kernel. The launchers of a decode step's
kernels call it.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from pdserve.kernels.launching.launch import is_hopper


@lru_cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """Returns keyword arguments of a launch on `device`: the kernel's constant PDL, and Triton's
    option if PDL is true."""
    return {"PDL": True, "launch_pdl": True} if is_hopper(device) else {"PDL": False}


@triton.jit
def begin(PDL: tl.constexpr):
    """Lets the next kernel start as soon as all programs of this one have started."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Returns after the kernels before this one are done and their writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()
