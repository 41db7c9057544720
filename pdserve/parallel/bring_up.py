"""Brings the ranks of one engine up together, phase by phase. Each rank waits until all are through
a phase, and an error of one is an error of all.

The ranks meet at a store that rank 0 hosts, and exchange JSON there; nothing is pickled. Knows no
model and no device. Used by `engine.ranks` and by the makers of an engine's components.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import PrefixStore, Store, TCPStore

from pdserve.parallel.dims import ParallelDims

PHASE_DEADLINE_S = 600.0
LAST_LOOK_S = 1.0  # seconds a failed rank looks for an earlier failure of another
LOOK_S = 0.005  # seconds between two looks at the store
FAILED = "failed"
LOOPBACK = "127.0.0.1"


Watch = Callable[[], None]
"""See RankGroup."""


class RankFailed(RuntimeError):
    """Another rank of the engine could not come up."""


class RankGroup:
    """This process's place among the ranks of an engine. is_alone: there is no other rank, and
    nothing here waits.

    - device_index: index of this rank's device, among the devices that the process sees.
    - watch: called while this rank waits. It raises what it has learnt of another rank, for example
      that its process has ended.
    """

    def __init__(
        self,
        dims: ParallelDims,
        store: Store | None = None,
        address: str = "",
        device_index: int = 0,
        watch: Watch = lambda: None,
    ) -> None:
        assert store is not None or dims.world_size == 1, "several ranks meet at a store"
        self.dims = dims
        self.address = address
        self.device_index = device_index
        self._watch = watch
        self._store = store

    @property
    def is_alone(self) -> bool:
        return self.dims.world_size == 1

    @property
    def rank0_host(self) -> str:
        """The address of rank 0, without the port."""
        return self.address.rpartition(":")[0]

    @property
    def own_host(self) -> str:
        """The address at which other ranks reach this one: the local one of its way to rank 0."""
        host, _, port = self.address.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, int(port)))  # sends nothing
            return str(way.getsockname()[0])

    @classmethod
    def host(
        cls, dims: ParallelDims, address: str = LOOPBACK, watch: Watch = lambda: None
    ) -> "RankGroup":
        """Make rank 0's group, with a store at a free port of `address`. Waits for nobody."""
        listening = socket.create_server((address, 0), backlog=dims.world_size)
        port = listening.getsockname()[1]
        store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=PHASE_DEADLINE_S),
            master_listen_fd=listening.detach(),
        )
        return cls(dims, store, f"{address}:{port}", watch=watch)

    @classmethod
    def join(cls, dims: ParallelDims, address: str, device_index: int = 0) -> "RankGroup":
        """Make another rank's group. address: that of rank 0's group."""
        host, _, port = address.rpartition(":")
        return cls(dims, _client(host, int(port)), address, device_index)

    def store_for(self, name: str) -> Store:
        """A part of the store for a caller that may wait there. It has its own connection, because
        waiting on a connection blocks its other users."""
        host, _, port = self.address.rpartition(":")
        return PrefixStore(name, _client(host, int(port)))

    def agree(
        self, phase: str, value: Any = None, deadline_s: float = PHASE_DEADLINE_S
    ) -> list[Any]:
        """Report that this rank is through `phase`, which no rank begins twice. Returns the value
        of each rank when all are through.

        RankFailed names the first rank that failed, or one that is not through in time. If the
        failure was a ValueError, ValueError is raised instead."""
        if self._store is None:
            return [value]
        rank = self.dims.rank
        self._store.set(f"{phase}/{rank}", _text(value))
        missing = set(range(self.dims.world_size))
        deadline = time.monotonic() + deadline_s
        while missing:
            missing -= {other for other in missing if self._store.check([f"{phase}/{other}"])}
            self.check()
            if missing and time.monotonic() > deadline:
                raise RankFailed(
                    f"rank {min(missing)} was not through the phase {phase!r} within "
                    f"{deadline_s:g} s of rank {rank}"
                )
            if missing:
                time.sleep(LOOK_S)
        return [
            msgspec.json.decode(self._store.get(f"{phase}/{other}"))
            for other in range(self.dims.world_size)
        ]

    @contextmanager
    def shared_fate(self) -> Iterator[None]:
        """Raise what fails inside, on any rank, on all ranks at their next `agree`."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            if isinstance(error, Exception) and not isinstance(error, (ValueError, RankFailed)):
                self._look_back(error)
            raise

    def _look_back(self, error: Exception) -> None:
        """Look for an earlier failure of another rank, which may have caused this one."""
        until = time.monotonic() + LAST_LOOK_S
        while not self.is_alone and time.monotonic() < until:
            try:
                self.check()
            except (ValueError, RankFailed) as cause:
                raise cause from error
            time.sleep(LOOK_S)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one cannot continue. Only the first failure is reported."""
        if self._store is None:
            return
        is_value = isinstance(error, ValueError)
        what = str(error) if is_value else f"{type(error).__name__}: {error}"
        told = {"rank": self.dims.rank, "is_value": is_value, "what": what}
        if self._store.add(f"{FAILED}/count", 1) == 1:
            self._store.set(FAILED, _text(told))

    def check(self) -> None:
        """Raise the failure of another rank, if there is one."""
        if self._store is not None and self._store.check([FAILED]):
            told = msgspec.json.decode(self._store.get(FAILED))
            if told["rank"] != self.dims.rank:
                kind = ValueError if told["is_value"] else RankFailed
                raise kind(f"rank {told['rank']}: {told['what']}")
        self._watch()


def _client(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PHASE_DEADLINE_S))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


ALONE = RankGroup(ParallelDims())
