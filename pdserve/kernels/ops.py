"""Ops: the functions with which models, the runner and the sampler compute, in groups. This file
also chooses who implements them.

Each group is a room with its interface (`ops.py`), plain torch (`reference.py`) and Triton
(`triton_ops.py`) side by side. On CPU the reference is what serves: its results are batch-invariant
bit for bit. Outputs are new tensors unless said otherwise. On CUDA no op waits for the device. This
file knows nothing of models. The code that builds the engine calls it once per process.
"""

from dataclasses import dataclass

import torch

from pdserve.kernels.attention import reference as attention
from pdserve.kernels.attention.ops import AttentionOps
from pdserve.kernels.batch import reference as batch
from pdserve.kernels.batch.ops import BatchOps
from pdserve.kernels.collective.ops import ALONE, IDENTITY, Collective, Exchange
from pdserve.kernels.experts import reference as experts
from pdserve.kernels.experts.ops import ExpertOps
from pdserve.kernels.kv import reference as kv
from pdserve.kernels.kv.ops import KVOps
from pdserve.kernels.latents import reference as latents
from pdserve.kernels.latents.ops import LatentOps
from pdserve.kernels.norm import reference as norm
from pdserve.kernels.norm.ops import NormOps
from pdserve.kernels.sampling import reference as sampling
from pdserve.kernels.sampling.ops import SamplingOps


@dataclass(frozen=True)
class Ops:
    """All ops on one device, except for products, which belong to a weight's scheme
    (`linear/schemes`).

    collective: joins the ranks that share a home's rows.
    exchange: joins all ranks of a stage.
    """

    attention: AttentionOps
    kv: KVOps
    norm: NormOps
    batch: BatchOps
    sampling: SamplingOps
    experts: ExpertOps
    latents: LatentOps
    collective: Collective = IDENTITY
    exchange: Exchange = ALONE


TORCH = Ops(attention, kv, norm, batch, sampling, experts, latents)


def ops_for(device: torch.device) -> Ops:
    """Returns the ops for tensors on `device`: plain torch on "cpu", Triton on "cuda". Raises
    ValueError for anything else."""
    if device.type == "cpu":
        return TORCH
    if device.type == "cuda":
        return triton_ops()
    raise ValueError(f"device must be cpu or cuda, not {device.type!r}: set engine.device")


def triton_ops() -> Ops:
    """Returns the ops in Triton, which is imported only here. On CPU it runs in its interpreter,
    and only tests use it."""
    from pdserve.kernels.attention import triton_ops as attention
    from pdserve.kernels.batch import triton_ops as batch
    from pdserve.kernels.experts import triton_ops as experts
    from pdserve.kernels.kv import triton_ops as kv
    from pdserve.kernels.latents import triton_ops as latents
    from pdserve.kernels.norm import triton_ops as norm
    from pdserve.kernels.sampling import triton_ops as sampling

    return Ops(attention, kv, norm, batch, sampling, experts, latents)
