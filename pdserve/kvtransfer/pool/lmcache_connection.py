"""The connection to an LMCache server. Its thread watches it, begins and ends registrations, and
pays late debts.

Reconnects in the background, whatever process serves at the address. Knows neither chunks nor
operations. Used by `lmcache_backend.LMCacheBackend`.
"""

import logging
import os
import queue
import time
from collections import deque

import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.background.threads import KeptThread
from pdserve.kvtransfer.pool.backend import PoolError
from pdserve.kvtransfer.pool.chunks import Chunks
from pdserve.kvtransfer.pool.lmcache_registration import OPEN_TIMEOUT_S, Registration
from pdserve.kvtransfer.pool.lmcache_talk import Debt

logger = logging.getLogger(__name__)

REOPEN_S = 1.0
"""Seconds between attempts to begin a session with a server that answers wrongly."""
REFRESH_S = 60.0
"""Seconds between renewals. The server ends a registration after an hour of silence; registering
again ends the silence."""
TIDY_MS = 20
"""Milliseconds between looks at late answers, while some are awaited."""
PAY_TIMEOUT_S = 0.1
IDLE_MS = 1000


class ServerConnection:
    """Watches the connection to the server, begins and ends sessions, and pays what late answers
    owe."""

    def __init__(self, address: str, chunks: Chunks, device: torch.device) -> None:
        self._url = f"tcp://{address}"
        self._chunks = chunks
        self._device = device
        self.session: Registration | None = None
        self._owed: queue.SimpleQueue[Debt] = queue.SimpleQueue()
        self._closing = False
        self._context = zmq.Context()
        self._context.linger = 0
        self._watch = self._context.socket(zmq.DEALER)
        self._events = self._watch.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._bell, self._bell_end = os.pipe()
        self._complaint = ""
        self._is_serving = False
        self._next_try = 0.0
        self._next_refresh = 0.0
        self._debts: deque[Debt] = deque()
        self._watch.connect(self._url)
        self._thread = KeptThread("kv pool connection", self._run)

    def owe(self, debt: Debt) -> None:
        """Pay the debt now if the server answers, else when it does."""
        if not debt.pay(time.monotonic() + PAY_TIMEOUT_S):
            self._owed.put(debt)
            os.write(self._bell_end, b"x")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(TIDY_MS if self._debts else IDLE_MS))
            if self._bell in ready:
                os.read(self._bell, 1024)
            while self._events.poll(0):
                self._is_serving = (
                    recv_monitor_message(self._events)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                )
                self._drop()  # a new connection may lead to another server
            now = time.monotonic()
            if self._is_serving and self.session is None and now >= self._next_try:
                self._next_try = now + REOPEN_S
                self._next_refresh = now + REFRESH_S
                self._open()
            if self.session is not None and now >= self._next_refresh:
                self._next_refresh = now + REFRESH_S
                self.session.register()
            while not self._owed.empty():
                self._debts.append(self._owed.get())
            for _ in range(len(self._debts)):
                debt = self._debts.popleft()
                if not debt.pay():
                    self._debts.append(debt)

    def _open(self) -> None:
        try:
            self.session = Registration(self._url, self._context, self._chunks, self._device)
            self._complaint = ""
            logger.info("KV pool: connected to %s", self._url)
        except (PoolError, RuntimeError) as error:  # CUDA raises RuntimeError
            if str(error) != self._complaint:
                logger.warning("KV pool: %s", error)
            self._complaint = str(error)

    def _drop(self) -> None:
        session = self.session
        self.session = None
        if session is not None:
            logger.warning("KV pool: the connection to %s broke", self._url)
            session.end()

    def close(self) -> None:
        self._closing = True
        os.write(self._bell_end, b"x")
        self._thread.finish(OPEN_TIMEOUT_S)
        session = self.session
        self.session = None
        if session is not None:
            session.unregister()
            session.end()
        self._watch.disable_monitor()  # a report to a closed monitor would never end
        self._context.destroy(linger=0)
        os.close(self._bell)
        os.close(self._bell_end)
