"""Starts `lmcache server` as a child process, waits until it serves, and ends it.

    server = PoolServer(config)    # takes 5 to 10 s; the model can be loaded meanwhile
    server.wait_ready()
    server.close()

Workers of one host share a server through a `SharedServer` each.

The child runs this module as a program. It starts a thread that ends it when its parent ends (the
pipe on its standard input closes), and then becomes LMCache's command line. Knows no requests and
no blocks: `lmcache_backend.py` speaks to the server.
"""

import contextlib
import fcntl
import json
import logging
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import pdserve
from pdserve.background.threads import KeptThread
from pdserve.configs.transfer import PoolConfig

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
SHM_PREFIX = "lmcache_l1_pool_"
"""LMCache puts this before the given name."""
WRITE_TTL_S = 30
"""Seconds after which a reservation that was never committed (a store that was given up) can be had
again."""
STOP_TIMEOUT_S = 5.0
UNLINK_EVERY_S = 0.01
LOOK_S = 2.0
"""Seconds between a worker's checks that the server that it shares is there."""
COUNT_S = 10.0
"""Seconds between questions how many chunks the server has evicted."""
EVICTED = "lmcache_mp_l1_evicted_chunks_total"
ANSWER_S = 1.0
LOG_TAIL = 2000
"""Characters of the server's own output that an error shows."""


class PoolServer:
    """One server process. address, http_address: in the form "host:port"."""

    def __init__(self, config: PoolConfig) -> None:
        """Start the process. ValueError if this host cannot hold it, or its address is taken."""
        _check_room(config)
        _check_address(config)
        self._config = config
        self._spawned = time.monotonic()
        self.address = config.address or f"127.0.0.1:{_free_port()}"
        self.http_address = f"127.0.0.1:{_free_port()}"
        self._shm_name = f"pdserve-{os.getpid()}-{self.address.rpartition(':')[2]}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the server)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pdserve.kvtransfer.pool.lmcache_server",
                str(self._memory),
                *self._arguments(config),
            ],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=_environment(),
        )
        logger.info("KV pool server: pid %d at %s", self.process.pid, self.address)

    def _arguments(self, config: PoolConfig) -> list[str]:
        host, _, port = self.address.rpartition(":")
        arguments = {
            "--host": host,
            "--port": port,
            "--http-port": self.http_address.rpartition(":")[2],
            "--chunk-size": str(config.chunk_tokens),
            "--l1-size-gb": str(config.l1_gib),
            "--shm-name": self._shm_name,
            "--supported-transfer-mode": "engine_driven",
            "--eviction-policy": "LRU",
            "--l1-write-ttl-seconds": str(WRITE_TTL_S),
            "--l2-prefetch-policy": "retain",
            "--max-cpu-workers": "4",
            "--max-gpu-workers": "4",
        }
        flat = [word for pair in arguments.items() for word in pair]
        if config.disk_folder is not None:
            folder = Path(config.disk_folder).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            flat += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder)})]
        return [*flat, "--no-l1-use-lazy", "--disable-logging", "--disable-grpc-metrics"]

    @property
    def _memory(self) -> Path:
        return SHARED_MEMORY / f"{SHM_PREFIX}{self._shm_name}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> None:
        """Wait until the server answers. RuntimeError, with the server's last words, if it ends or
        does not serve within config.start_deadline_s of its start. Then it is closed."""
        deadline_s = self._config.start_deadline_s
        deadline = self._spawned + deadline_s
        while self.alive and time.monotonic() < deadline:
            if _answers(self.address):
                return
            time.sleep(0.05)
        how = (
            f"was not ready after {deadline_s:g} s"
            if self.alive
            else f"ended with {self.process.returncode}"
        )
        last_words = self._last_words()
        self.close()
        raise RuntimeError(
            f"lmcache server at {self.address} {how}; raise pool.start_deadline_s, or set "
            "pool.mode to off to do without "
            f"it. Its last words:\n{last_words}"
        )

    def evicted_chunks(self) -> int:
        """The number of chunks that the server has evicted from its memory. OSError if it does not
        answer."""
        url = f"http://{self.http_address}/metrics"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        return sum(int(sample.value) for sample in samples if sample.name == EVICTED)

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-LOG_TAIL:]

    def close(self) -> None:
        """End the process and remove its shared memory, which a killed server leaves behind.
        Idempotent."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._log.close()
        self._memory.unlink(missing_ok=True)


class SharedServer:
    """The server that the workers of one host share; each worker has a SharedServer. The first one
    starts the server at config.address. When that dies, alone or with its worker, the first one to
    notice starts the next. Without an address each worker has its own server.

    evicted_chunks: what the server that this one has started has evicted, as it said last; 0 if
        this one has started none.
    """

    def __init__(self, config: PoolConfig) -> None:
        """Begin to start or find a server. An error is raised by `wait_ready`."""
        self._config = config
        self._own: PoolServer | None = None
        self._error: Exception | None = None
        self.evicted_chunks = 0
        self._counted = time.monotonic()
        self._ready = threading.Event()
        self._closing = threading.Event()
        self._thread = KeptThread("kv pool server", self._keep)

    def wait_ready(self) -> str:
        """Returns the address when a server answers there. Raises the errors of PoolServer."""
        self._ready.wait()
        if self._error is not None:
            raise self._error
        address = self._own.address if self._own is not None else self._config.address
        assert address is not None
        return address

    def close(self) -> None:
        self._closing.set()
        self._thread.finish()
        if self._own is not None:
            self._own.close()

    def _keep(self) -> None:
        if not self._ready.is_set():
            try:
                self._serve_or_join()
            except Exception as error:  # `wait_ready` raises it
                self._error = error
            self._ready.set()
        while self._error is None and not self._closing.wait(LOOK_S):
            try:
                self._serve_or_join()
            except (ValueError, RuntimeError) as error:
                logger.warning("no KV pool server could be started: %s", error)
            self._count()

    def _count(self) -> None:
        if self._own is not None and time.monotonic() >= self._counted + COUNT_S:
            self._counted = time.monotonic()
            with contextlib.suppress(OSError):  # it may be about to end
                self.evicted_chunks = self._own.evicted_chunks()

    def _serve_or_join(self) -> None:
        address = self._config.address
        if address is None:
            if self._own is None:
                self._own = PoolServer(self._config)
                self._own.wait_ready()
            return
        if _answers(address):
            return
        with (Path(tempfile.gettempdir()) / f"pdserve-pool-{address.replace(':', '-')}.lock").open(
            "w"
        ) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _answers(address):
                return
            if self._own is not None:
                self._own.close()
            self._own = PoolServer(self._config)
            self._own.wait_ready()


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1.0):
            return True
    except OSError:
        return False


def _check_room(config: PoolConfig) -> None:
    free = shutil.disk_usage(SHARED_MEMORY).free / 2**30
    if config.l1_gib > free:
        raise ValueError(
            f"pool.l1_gib is {config.l1_gib:g}, but {SHARED_MEMORY} has {free:.1f} GiB free: lower "
            f"it, or enlarge {SHARED_MEMORY} (in a container: --shm-size)"
        )


def _check_address(config: PoolConfig) -> None:
    if config.address is None:
        return
    host, _, port = config.address.rpartition(":")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise ValueError(
                f"pool.address {config.address} cannot be served here ({error}): use the server "
                "that runs there (pool.mode: connect), or another address"
            ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment() -> dict[str, str]:
    root = str(Path(pdserve.__file__).parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
        "LMCACHE_DISABLE_BANNER": "1",
    }
    ours["PYTHONWARNINGS"] = "ignore"  # its cloud libraries print long ones
    return os.environ | ours | {"PYTHONPATH": os.pathsep.join(paths)}


def _end_with_parent(memory: Path) -> None:
    """Wait until the parent is gone. Then end this process, by force if needed, and remove the
    memory, as the parent would have. The server may still make it while it ends."""
    os.read(sys.stdin.fileno(), 1)
    try:
        memory.unlink(missing_ok=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(UNLINK_EVERY_S)
            with contextlib.suppress(OSError):  # mostly it is not there
                memory.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    memory, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with_parent, args=(Path(memory),), daemon=True).start()
    sys.argv = ["lmcache", "server", *arguments]
    runpy.run_module("lmcache.cli.main", run_name="__main__")


if __name__ == "__main__":
    main()
