"""Two hosts within this one: network namespaces joined by a link that can be cut.

A process that is started with `inside` also has PID and IPC namespaces of its own, so that UCX can
only reach it over the network. This needs root; `available` says if something is missing. This
module knows no engines. Tests and cluster/prefixes.py use it.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = "10.99.0.1", "10.99.0.2"
"""Addresses of the two hosts on the link that joins them."""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def available() -> str:
    """Returns "" if namespaces work here, and otherwise the reason."""
    missing = [tool for tool in ("ip", "unshare", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    probe = f"pdserve-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", probe)
        _run("ip", "netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"
    return ""


class Net:
    """Namespaces `p` and `d`, joined by one link. `rate_mbit` limits the direction from p to d.
    None: there is no limit."""

    def __init__(self, rate_mbit: int | None) -> None:
        self._rate_mbit = rate_mbit
        self._tag = f"pd{os.getpid()}"
        self.p = f"{self._tag}-p"
        self.d = f"{self._tag}-d"
        for namespace in (self.p, self.d):
            _run("ip", "netns", "add", namespace)
        _run(
            "ip",
            "link",
            "add",
            "pdp",
            "netns",
            self.p,
            "type",
            "veth",
            "peer",
            "name",
            "pdd",
            "netns",
            self.d,
        )
        ends = zip((self.p, self.d), ("pdp", "pdd"), ADDRESSES, strict=True)
        for namespace, device, address in ends:
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            for name in ("lo", device):
                _run("ip", "-n", namespace, "link", "set", name, "up")
        if rate_mbit is not None:
            self._limit("add", rate_mbit)

    def _limit(self, how: str, rate_mbit: int) -> None:
        rate = ("rate", f"{rate_mbit}mbit", "burst", "128kb", "latency", "50ms")
        _run("tc", "-n", self.p, "qdisc", how, "dev", "pdp", "root", "tbf", *rate)

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Slows the link to a tenth of its rate, which must have been given."""
        assert self._rate_mbit is not None
        self._limit("replace", self._rate_mbit // 10)
        try:
            yield
        finally:
            self._limit("replace", self._rate_mbit)

    def cut(self) -> None:
        _run("ip", "-n", self.p, "link", "set", "pdp", "down")

    def mend(self) -> None:
        _run("ip", "-n", self.p, "link", "set", "pdp", "up")

    def close(self) -> None:
        for namespace in (self.p, self.d):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", namespace)


def inside(namespace: str) -> list[str]:
    """Returns a command prefix that runs a command in a network namespace, with PID and IPC
    namespaces of its own."""
    own = ["unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    return ["ip", "netns", "exec", namespace, *own]


WITHOUT_PTRACE = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
"""A command prefix. The command may not read the memory of processes with more capabilities, as in
a container."""


@contextlib.contextmanager
def two_hosts(rate_mbit: int | None) -> Iterator[Net]:
    """Makes two namespaces (see Net), which are removed after the context."""
    net = Net(rate_mbit)
    try:
        yield net
    finally:
        net.close()
