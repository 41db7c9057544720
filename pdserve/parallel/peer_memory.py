"""Device memory of each rank that all ranks of an engine read and write, on one node. It uses
CUDA's memory handles, sent through the store where the ranks meet.

It works between processes that each see only their own device, as under Ray. Knows bytes, not their
meaning.
"""

import ctypes
from collections.abc import Collection

import torch
from torch import Tensor

from pdserve.kernels.launching.cuda_runtime import check, cudart
from pdserve.parallel.bring_up import RankGroup

LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


class _Array:
    """Bytes of a device as torch takes them in."""

    def __init__(self, address: int | None, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class PeerMemory:
    """Memory of num_bytes zeros on each rank. This rank's memory lives as long as the object.

    near: the ranks on this rank's node.
    own: uint8 `[num_bytes]`, this rank's memory. It is valid while this object lives.
    addresses: int64 `[ranks]` on `device`, the start of each memory as this rank sees it, or 0 if
        it is on another node.

    Every rank must make one, once.
    """

    def __init__(
        self, group: RankGroup, near: Collection[int], num_bytes: int, device: torch.device
    ) -> None:
        self._own = ctypes.c_void_p()
        self._opened: list[ctypes.c_void_p] = []
        torch.cuda.set_device(device)
        torch.cuda.init()
        runtime = self._runtime = cudart()
        runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
        own = self._own
        size = ctypes.c_size_t(max(num_bytes, 1))  # no bytes would have no address
        check("cudaMalloc", runtime.cudaMalloc(ctypes.byref(own), size))
        check("cudaMemset", runtime.cudaMemset(own, 0, size))
        torch.cuda.synchronize(device)
        handle = _Handle()
        check("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(ctypes.byref(handle), own))
        places: list[int | None] = [0] * group.dims.world_size
        said = group.agree("peer memory", bytes(handle).hex())
        for rank in near:
            place = own
            if rank != group.dims.rank:
                theirs = _Handle.from_buffer_copy(bytes.fromhex(said[rank]))
                place = ctypes.c_void_p()
                check(
                    f"cudaIpcOpenMemHandle of rank {rank}",
                    runtime.cudaIpcOpenMemHandle(ctypes.byref(place), theirs, LAZY_PEER_ACCESS),
                )
                self._opened.append(place)
            places[rank] = place.value
        self.own: Tensor = torch.as_tensor(_Array(own.value, size.value), device=device)
        self.addresses: Tensor = torch.tensor(places, dtype=torch.int64, device=device)
        group.agree("peers")

    def __del__(self) -> None:
        for place in self._opened:
            self._runtime.cudaIpcCloseMemHandle(place)
        if self._own.value is not None:
            self._runtime.cudaFree(self._own)  # waits for the kernels that use it
