"""NCCL between two ranks, as far as a pipe between nodes needs it, by ctypes.

It is the library that torch has loaded. torch's own groups of NCCL are not used, because their
watchdog ends the process if a call fails or is late, and nobody learns from them that a call was
ended from outside. Knows bytes, not their meaning.
"""

import ctypes
import sys
import threading
from functools import cache

import torch
from torch import Tensor

UNIQUE_ID_BYTES = 128
BYTES = 1  # ncclUint8
IN_PROGRESS = 7  # ncclInProgress
UNSET = -(2**31)  # NCCL_CONFIG_UNDEF_INT
MAX_BLOCKS = 4  # thread blocks of a transfer; each takes its place from the model's kernels


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18, which later versions take too."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_blocks", ctypes.c_int),
        ("max_blocks", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]

    @classmethod
    def of(cls, max_blocks: int) -> "_Config":
        size = ctypes.sizeof(cls)
        return cls(size, 0xCAFEBEEF, 21800, UNSET, UNSET, UNSET, max_blocks, None, UNSET)


@cache
def library() -> ctypes.CDLL:
    """Loads NCCL by its soname, so that no second one is loaded. ValueError if there is none."""
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise ValueError(
            "pipeline_parallel over several nodes needs NCCL, which this torch does not have: "
            "install a build of torch for CUDA, or put all stages on one node"
        ) from error
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    nccl.ncclGetLastError.argtypes = [pointer]
    nccl.ncclCommInitRankConfig.argtypes = [pointer, integer, _UniqueId, integer, pointer]
    nccl.ncclSend.argtypes = [pointer, size, integer, integer, pointer, pointer]
    nccl.ncclRecv.argtypes = nccl.ncclSend.argtypes
    nccl.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    nccl.ncclCommAbort.argtypes = [pointer]
    return nccl


def unique_id() -> bytes:
    """Makes a name under which two ranks meet. It also says where."""
    made = _UniqueId()
    _check("ncclGetUniqueId", library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def _check(call: str, error: int) -> None:
    """Raises RuntimeError if a call failed."""
    if error not in (0, IN_PROGRESS):
        nccl = library()
        why = nccl.ncclGetErrorString(error).decode()
        detail = (nccl.ncclGetLastError(None) or b"").decode().strip()
        raise RuntimeError(f"{call} failed: {why}{f' ({detail})' if detail else ''}")


class NcclPair:
    """Rows between this rank and one other, on the current device. The rank that receives has place
    0, and the one that sends has place 1. Waits for the other."""

    def __init__(self, name: bytes, place: int) -> None:
        self._comm = ctypes.c_void_p()
        self._lock = threading.Lock()  # a call and the end of all calls do not meet
        self._is_off = False
        self._nccl = library()
        self._other = 1 - place
        _check(
            "ncclCommInitRank",
            self._nccl.ncclCommInitRankConfig(
                ctypes.byref(self._comm),
                2,
                _UniqueId.from_buffer_copy(name),
                place,
                ctypes.byref(_Config.of(MAX_BLOCKS)),
            ),
        )

    def send(self, rows: Tensor, stream: torch.cuda.Stream) -> None:
        """Queues contiguous rows on the stream. RuntimeError if the pair has been called off."""
        self._queue("ncclSend", self._nccl.ncclSend, rows, stream)

    def recv(self, rows: Tensor, stream: torch.cuda.Stream) -> None:
        """Queues the receipt of contiguous rows. Raises like `send`."""
        self._queue("ncclRecv", self._nccl.ncclRecv, rows, stream)

    def check(self) -> None:
        """RuntimeError if the pair has been called off, or if NCCL has lost the other rank. Then
        what was received last is not valid."""
        with self._lock:
            self._must_be_on()
            error = ctypes.c_int()
            asked = self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(error))
        _check("ncclCommGetAsyncError", asked)
        _check("a transfer of rows between stages", error.value)

    def call_off(self) -> None:
        """Ends what waits on the device for the other rank. Returns at once, because NCCL waits for
        all kernels of the device, which may wait for somebody else."""
        with self._lock:
            if self._is_off:
                return
            self._is_off = True
        threading.Thread(
            target=self._nccl.ncclCommAbort, args=(self._comm,), name="nccl abort", daemon=True
        ).start()

    def _queue(
        self, name: str, call: "ctypes._NamedFuncPointer", rows: Tensor, stream: torch.cuda.Stream
    ) -> None:
        with self._lock:
            self._must_be_on()
            error = call(
                rows.data_ptr(), rows.nbytes, BYTES, self._other, self._comm, stream.cuda_stream
            )
        _check(name, error)

    def _must_be_on(self) -> None:
        if self._is_off:
            raise RuntimeError("the transfer of rows between stages was called off")

    def __del__(self) -> None:
        if self._comm and not sys.is_finalizing():  # a thread that is started then waits for ever
            self.call_off()
