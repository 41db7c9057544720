"""The processes that the soak kills, freezes, thaws and restarts, and the chaos that does so. Knows
no requests.
"""

import asyncio
import os
import random
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Protocol

from support.hosts import Host
from support.routers import RouterProcess

from pdserve.configs.transfer import PoolConfig
from pdserve.kvtransfer.pool.lmcache_server import PoolServer

LONGEST_FREEZE_S = 6.0
PAUSE_S = (0.2, 3.0)
NUM_STRIKERS = 2


class Process(Protocol):
    """The parts of a victim's process that are used."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...


class Victim(ABC):
    """One process that comes back after every death under the same `kind` and number."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.spared = False  # it is frozen at most
        self._killed = False

    @property
    @abstractmethod
    def process(self) -> Process: ...

    @abstractmethod
    async def restart(self) -> None:
        """Start a successor of the dead process; returns when it serves."""

    def kill(self) -> None:
        self._killed = True
        self._signal(signal.SIGKILL)
        self.process.join(10)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        self.check()
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    async def revive(self) -> None:
        await self.restart()
        self._killed = False

    def check(self) -> None:
        """AssertionError when the process died although nobody killed it."""
        code = self.process.exitcode
        by_us = self._killed and code == -signal.SIGKILL
        assert code is None or by_us, (
            f"{self.kind} {self.process.name} died by itself, exit code {code}"
        )


class WorkerVictim(Victim):
    """A worker as a victim. `hosts` is the list of all running hosts.

    A successor takes its predecessor's place in the list, at `index`.
    """

    def __init__(self, hosts: list[Host], index: int) -> None:
        super().__init__({"P": "prefill", "D": "decode"}[hosts[index].worker_id[0]])
        self._hosts = hosts
        self._index = index

    @property
    def process(self) -> Process:
        return self._hosts[self._index].process

    async def restart(self) -> None:
        dead = self._hosts[self._index]
        assert dead.shell is not None
        dead.close()
        name = dead.worker_id.split("-")[0]
        self._hosts[self._index] = Host(dead.config, f"{name}-{time.time_ns()}", dead.shell.parent)
        await asyncio.to_thread(self._hosts[self._index].wait)


class RouterVictim(Victim):
    def __init__(self, router: RouterProcess) -> None:
        super().__init__("router")
        self._router = router

    @property
    def process(self) -> Process:
        return self._router.process

    def kill(self) -> None:
        self._router.num_kills += 1  # before any client can notice
        super().kill()

    async def restart(self) -> None:
        self._router.start()
        await asyncio.to_thread(self._router.wait)


class _Child:
    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self.name = "kv pool"
        self.pid = popen.pid

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def join(self, timeout: float | None = None) -> None:
        self._popen.wait(timeout)


class PoolVictim(Victim):
    """The KV pool's server, which comes back empty at the same address."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__("pool")
        assert config.address is not None, "its successor has the same"
        self._config = config
        self.address = config.address
        self._server = PoolServer(config)
        self._server.wait_ready()

    @property
    def process(self) -> Process:
        return _Child(self._server.process)

    async def restart(self) -> None:
        self._server.close()
        self._server = PoolServer(self._config)
        await asyncio.to_thread(self._server.wait_ready)

    def close(self) -> None:
        self._server.close()


class Chaos:
    """Several strikers at a time. Each waits, picks a victim that is well, freezes it for a while,
    kills it, or both, and stays until it serves again."""

    def __init__(self, victims: list[Victim], rng: random.Random) -> None:
        self.struck: Counter[str] = Counter()
        self._well = list(victims)
        self._rng = rng
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """`run` ends soon, with everybody alive and thawed."""
        self._stopping.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as strikers:
            for _ in range(NUM_STRIKERS):
                strikers.create_task(self._strike_on())

    async def _strike_on(self) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(self._rng.uniform(*PAUSE_S)):
                    await self._stopping.wait()
            except TimeoutError:
                victim = self._well.pop(self._rng.randrange(len(self._well)))
                await self._strike(
                    victim, self._rng.random(), self._rng.uniform(0.2, LONGEST_FREEZE_S)
                )
                self._well.append(victim)

    async def _strike(self, victim: Victim, dice: float, freeze_s: float) -> None:
        freezes = dice < 0.55 or victim.spared
        kills = dice > 0.45 and not victim.spared
        self.struck[f"{victim.kind} {'frozen ' * freezes}{'killed' * kills}".strip()] += 1
        if freezes:
            victim.freeze()
            await asyncio.sleep(freeze_s)
        if kills:
            victim.kill()
            await victim.revive()
        else:
            victim.thaw()
