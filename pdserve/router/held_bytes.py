"""Counts the bytes that a router holds for clients: data that waits for slow readers, answers in
the making, and scores of prompts.

Each request has an account. While all accounts together hold too much, the one that holds most is
cut off. Sizes are estimates of Python's objects. Knows no requests. Data counts from a worker's
event (`router.fleet.inbox`) until its bytes are sent (`router.http.answers`). What a request keeps
beside it counts too (`router.request.request_run`, `router.request.generation`,
`router.http.openai.responder`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.protocol.events import TokenLogprob

EVENT_BYTES = 300  # an event or a chunk without tokens
TOKEN_BYTES = 40
LOGPROB_BYTES = 110  # each token's log-probability, and each of its alternatives
LET_GO_AT_ONCE = 64  # unwanted items freed in one turn; freeing 100 MB takes 100 ms


def size_of(num_tokens: int, logprobs: Sequence[TokenLogprob | None] | None) -> int:
    """Estimates the bytes of tokens that are held together."""
    size = EVENT_BYTES + TOKEN_BYTES * num_tokens
    return (
        size + LOGPROB_BYTES * sum(1 + len(each.top) for each in logprobs if each is not None)
        if logprobs
        else size
    )


def let_go(items: deque[Any]) -> None:
    """Frees the items, a few in each turn of the event loop."""
    for _ in range(min(LET_GO_AT_ONCE, len(items))):
        items.pop()
    if items:
        asyncio.get_running_loop().call_soon(let_go, items)


class Held:
    """All accounts of a router. Use it from one event loop.

    `count` is called with 1 for each account that is cut off.
    """

    def __init__(self, max_bytes: int, count: Callable[[float], None]) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._count = count
        self._holders: set[Account] = set()

    def account(self) -> "Account":
        return Account(self)

    def changed(self, account: "Account", num_bytes: int) -> None:
        """Adds bytes that the account holds, or removes them if `num_bytes` is negative."""
        self.num_bytes += num_bytes
        if account.num_bytes:
            self._holders.add(account)
        else:
            self._holders.discard(account)
        while self.num_bytes > self.max_bytes:
            self._count(1)
            max(self._holders, key=lambda each: each.num_bytes).cut()


class Account:
    """The bytes held for one request. `on_cut` is called once, when the account is cut off."""

    __slots__ = ("_held", "_is_closed", "num_bytes", "on_cut")

    def __init__(self, held: Held) -> None:
        self._held = held
        self._is_closed = False
        self.num_bytes = 0
        self.on_cut: Callable[[], None] = _nothing

    def add(self, num_bytes: int) -> None:
        """Adds held bytes, or removes them if negative. A closed account counts nothing."""
        if not self._is_closed and num_bytes:
            self.num_bytes += num_bytes
            self._held.changed(self, num_bytes)

    def close(self) -> None:
        """Lets go of everything the account holds."""
        self.add(-self.num_bytes)
        self._is_closed = True
        self.on_cut = _nothing  # the old callback refers to this account

    def cut(self) -> None:
        on_cut = self.on_cut
        self.close()
        on_cut()


def _nothing() -> None:
    return None
