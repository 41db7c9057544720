"""Learns from UCX itself which transport its reads use.

NIXL does not say it, and its telemetry names only the backend ("UCX"). With UCX_PROTO_INFO=y, UCX
prints a table for each new kind of operation on each new kind of endpoint. We send UCX's log to a
file of our own and read the `ucp_get` tables:

    | D-1 intra-node cfg#1                                             |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | 0..inf | zero-copy          | cma/memory                         |

A second peer on the same kind of endpoint prints no new table. So the name is certain only while
all tables agree; otherwise it is "ucx". UCX reads its environment when it is loaded. `environment`
sets it for that time and restores it afterwards.

UCX chooses the transport for each pair. It asks the kernel whether it may read *that* process
(CMA), whether there is a route to *that* address (TCP), and whether *that* device's memory opens
(cuda_ipc). Tried: without CAP_SYS_PTRACE towards a peer that has it, and from another PID
namespace, reads go by TCP and none fails. But UCX does not report it. So each new table is logged,
and a warning says when CMA is not permitted on one host.
"""

import ctypes
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "ucx"
OWN_SETTINGS = ("UCX_PROTO_INFO", "UCX_LOG_FILE")

_TITLE = re.compile(r"\|\s*remote memory read by ucp_get\S* into (\S+)")
_OWNER = re.compile(r"\|\s*\S+ (self|intra-node|inter-node)\b.* cfg#")
_ROW = re.compile(r"\|\s*\S+\.\.inf\s*\|[^|]*\|([^|]*)\|")
_PATH = re.compile(r"([a-z][a-z0-9_]*)/([^\s|]+)")
_PREFIX = re.compile(r"^\[[^\]]*\] \[[^\]]*\]\s*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadTable:
    """One `ucp_get` table."""

    memory: str  # of the destination: "DRAM" or "VRAM"
    transports: tuple[str, ...]  # of the largest reads, such as ("cma",)
    paths: tuple[str, ...]  # the same with their devices, such as ("tcp/eth0", "tcp/lo")
    same_host: bool  # as UCX sees it

    @property
    def lacks_cma(self) -> bool:
        """True if host memory of this host is read over the network, which is several times
        slower."""
        return self.same_host and self.memory == "DRAM" and self.transports == ("tcp",)


def parse_tables(lines: list[str]) -> tuple[list[ReadTable], list[str]]:
    """Split UCX log lines into the tables of reads from other processes, and the lines that belong
    to no table."""
    tables: list[ReadTable] = []
    rest: list[str] = []
    to_self = False
    same_host = False
    memory = ""
    for line in lines:
        body = _PREFIX.sub("", line)
        if not body.startswith(("|", "+")):
            rest.append(line)
        elif owner := _OWNER.search(body):
            to_self = owner.group(1) == "self"
            same_host = owner.group(1) == "intra-node"
            memory = ""
        elif "ucp_" in body:
            title = _TITLE.search(body)
            memory = ("DRAM" if title.group(1) == "host" else "VRAM") if title else ""
        elif memory and not to_self and (row := _ROW.search(body)):
            found = _PATH.findall(row.group(1))
            transports = tuple(sorted({transport for transport, _ in found}))
            paths = tuple(sorted({f"{transport}/{device}" for transport, device in found}))
            tables.append(ReadTable(memory, transports, paths, same_host))
    return tables, rest


class UcxLog:
    """The log of this process's UCX. There is one per process, because UCX opens one file."""

    def __init__(self) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="pdserve-ucx-", suffix=".log")
        self._file = os.fdopen(descriptor, "r", errors="replace")
        self._lock = threading.Lock()
        self._tail = ""
        self._tables: list[ReadTable] = []
        self._allows_cma = True

    @contextmanager
    def environment(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Set UCX's settings while its context is created, in addition to the user's and those that
        make this log."""
        settings = {**settings, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": self._path}
        self._allows_cma = allows_cma(settings.get("UCX_TLS") or os.environ.get("UCX_TLS", "all"))
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            if os.path.exists(self._path):
                os.unlink(self._path)  # UCX and we keep it open

    def mark(self) -> int:
        """Returns the number of tables printed so far."""
        with self._lock:
            self._read()
            return len(self._tables)

    def transport_since(self, mark: int, memory: str) -> str:
        """The transport of reads into `memory`. It is taken from the tables since `mark` or, if
        there are none, from all tables."""
        with self._lock:
            self._read()
            new = [table for table in self._tables[mark:] if table.memory == memory]
            known = {table.transports for table in new or self._tables if table.memory == memory}
        return "+".join(known.pop()) or UNKNOWN if len(known) == 1 else UNKNOWN

    def _read(self) -> None:
        ctypes.CDLL(None).fflush(None)  # UCX writes through a C stream and never flushes it
        lines = (self._tail + self._file.read()).split("\n")
        self._tail = lines.pop()
        tables, rest = parse_tables(lines)
        self._tables += tables
        for table in tables:
            self._tell(table)
        for line in rest:
            if line.strip():
                logger.warning("UCX: %s", line)

    def _tell(self, table: ReadTable) -> None:
        where = "this host" if table.same_host else "another host"
        logger.info(
            "UCX reads into %s from peers on %s by %s", table.memory, where, " + ".join(table.paths)
        )
        if table.lacks_cma and self._allows_cma:
            logger.warning(
                "KV from a process of this host comes by TCP, because CMA is not permitted (%s): "
                "give both processes the "
                "same user and capabilities (containers: SYS_PTRACE) and one PID namespace",
                why_no_cma(),
            )


def allows_cma(tls: str) -> bool:
    """True if a value of UCX_TLS lets UCX use CMA, which is part of the alias "sm"."""
    names = set(tls.removeprefix("^").split(","))
    listed = bool(names & {"all", "cma", "sm", "shm"})
    return not listed if tls.startswith("^") else listed


def why_no_cma() -> str:
    """Explains why CMA is not permitted, as far as this process can know."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        scope = "0"
    if scope != "0":
        return f"/proc/sys/kernel/yama/ptrace_scope is {scope}"
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_uint64()
    vector = (ctypes.c_uint64 * 2)(ctypes.addressof(word), ctypes.sizeof(word))
    one = ctypes.c_ulong(1)
    none = ctypes.c_ulong(0)
    if libc.process_vm_readv(os.getpid(), vector, one, vector, one, none) < 0:
        return f"process_vm_readv fails even here: {os.strerror(ctypes.get_errno())}"
    return "the kernel refuses it between these two processes"


_process_log: UcxLog | None = None
_process_lock = threading.Lock()


def process_log() -> UcxLog:
    global _process_log
    with _process_lock:
        if _process_log is None:
            _process_log = UcxLog()
        return _process_log
