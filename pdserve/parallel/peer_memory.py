"""Device memory of each rank that all ranks of an engine read and write, on one node. It uses
CUDA's memory handles, sent through the store where the ranks meet.

It works between processes that each see only their own device, as under Ray. Knows bytes, not their
meaning.
"""

import ctypes

import torch
from torch import Tensor

from pdserve.kernels.launching.cuda_runtime import check, cudart
from pdserve.parallel.bring_up import RankGroup

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class PeerMemory:
    """Memory of num_bytes zeros on each rank. This rank's memory lives as long as the object.
    addresses: int64 `[ranks]` on `device`, the start of each memory as this rank sees it. Every
    rank must make one, once."""

    def __init__(self, group: RankGroup, num_bytes: int, device: torch.device) -> None:
        self._own = ctypes.c_void_p()
        self._opened: list[ctypes.c_void_p] = []
        torch.cuda.set_device(device)
        torch.cuda.init()
        runtime = self._runtime = cudart()
        runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        own = self._own
        check("cudaMalloc", runtime.cudaMalloc(ctypes.byref(own), ctypes.c_size_t(num_bytes)))
        check("cudaMemset", runtime.cudaMemset(own, 0, ctypes.c_size_t(num_bytes)))
        torch.cuda.synchronize(device)
        handle = _Handle()
        check("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(ctypes.byref(handle), own))
        places = []
        for rank, said in enumerate(group.agree("peer memory", bytes(handle).hex())):
            place = own
            if rank != group.dims.rank:
                theirs = _Handle.from_buffer_copy(bytes.fromhex(said))
                place = ctypes.c_void_p()
                check(
                    f"cudaIpcOpenMemHandle of rank {rank}",
                    runtime.cudaIpcOpenMemHandle(ctypes.byref(place), theirs, LAZY_PEER_ACCESS),
                )
                self._opened.append(place)
            places.append(place.value)
        self.addresses: Tensor = torch.tensor(places, dtype=torch.int64, device=device)
        group.agree("peers")

    def __del__(self) -> None:
        for place in self._opened:
            self._runtime.cudaIpcCloseMemHandle(place)
        if self._own.value is not None:
            self._runtime.cudaFree(self._own)  # waits for the kernels that use it
