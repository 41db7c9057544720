"""Receives the letters of an engine process and sends letters to others, by zmq: one socket in, and
one socket out per peer.

Letters between two processes keep their order while both live. A letter to a process that is gone
is lost, and nobody waits for it. A letter itself says who wrote it, because the network is trusted,
as it is by NIXL. Any thread may send. Handlers run on the mailbox's own thread and must be short.
Knows no tickets. A process has one mailbox, shared by its sender and its receiver; `build.py` makes
it.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from pdserve.background.threads import KeptThread
from pdserve.kvtransfer.p2p.letters import Letter, Notice, Party, decode_letter, encode_letter

logger = logging.getLogger(__name__)

QUEUED_LETTERS = 10_000  # to one peer; takes many minutes, so a peer with more does not read them
# An outbox that is unused for this long is closed. Its peer may be gone, and zmq would try to reach
# it for ever.
UNUSED_S = 600.0
_in_process = itertools.count()

Handler = Callable[[Party, Any], None]


class Mailbox:
    """Letters in and out. host: the address of this machine that peers reach; None if all peers are
    in this process."""

    def __init__(self, engine_id: str, incarnation: int, host: str | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        if host is None:
            address = f"inproc://pdserve-mailbox-{next(_in_process)}"
            self._inbox.bind(address)
        else:
            address = f"tcp://{host}:{self._inbox.bind_to_random_port(f'tcp://{host}')}"
        self.party = Party(engine_id, incarnation, address)
        self._handlers: dict[type[Notice], Handler] = {}
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._used: dict[str, float] = {}
        self._waker = self._open(address)
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._thread = KeptThread("kv mailbox", self._read)

    def on(self, kind: type[Notice], handler: Handler) -> None:
        """Call handler(sender, notice) for every notice of this kind from now on. Earlier ones are
        dropped."""
        self._handlers[kind] = handler

    def send(self, to: Party, notice: Notice) -> None:
        """Send a letter; best effort, never waits."""
        self._write(
            to.mailbox, encode_letter(Letter((to.engine_id, to.incarnation), self.party, notice))
        )

    def forget(self, to: Party) -> None:
        """Close the way to a peer that is gone. A later letter opens it again."""
        with self._lock:
            self._close(to.mailbox)

    def attach(self) -> None:
        with self._lock:
            self._users += 1

    def detach(self) -> None:
        """Remove a user. The last one to leave closes the mailbox."""
        with self._lock:
            self._users -= 1
            if self._users or self._closed:
                return
            self._closed = True
        self._waker.send(b"")
        self._thread.finish()
        for outbox in [*self._outboxes.values(), self._waker]:
            outbox.close(linger=100)  # a last "done" may still be on its way
        self._inbox.close(linger=0)

    def _write(self, address: str, message: bytes) -> None:
        with self._lock:  # a zmq socket may move between threads, but only one may use it at a time
            if self._closed:
                return
            try:
                if address not in self._outboxes:
                    self._close_unused()
                    self._outboxes[address] = self._open(address)
                self._used[address] = time.monotonic()
                self._outboxes[address].send(message, zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("%s does not read its letters: one is dropped", address)
            except zmq.ZMQError as error:
                logger.warning("no letter can be sent to %s: %s", address, error)

    def _close_unused(self) -> None:
        limit = time.monotonic() - UNUSED_S
        for address in [address for address, used in self._used.items() if used < limit]:
            self._close(address)

    def _close(self, address: str) -> None:
        self._used.pop(address, None)
        outbox = self._outboxes.pop(address, None)
        if outbox is not None:
            outbox.close(linger=0)

    def _open(self, address: str) -> "zmq.Socket[bytes]":
        outbox = self._context.socket(zmq.PUSH)
        outbox.set_hwm(QUEUED_LETTERS)
        outbox.connect(address)
        return outbox

    def _read(self) -> None:
        me = (self.party.engine_id, self.party.incarnation)
        while True:
            message = self._inbox.recv()
            if self._closed:
                return
            try:
                letter = decode_letter(message)
            # ValueError is raised for text that is not UTF-8
            except (msgspec.MsgspecError, ValueError) as error:
                logger.warning("dropped a message that is not a letter: %s", error)
                continue
            handler = self._handlers.get(type(letter.notice))
            if letter.to != me or handler is None:
                continue
            try:
                handler(letter.sender, letter.notice)
            except Exception:  # one bad letter must not end the mailbox
                logger.exception(
                    "a %s of %s failed", type(letter.notice).__name__, letter.sender.engine_id
                )
