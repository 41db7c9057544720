"""A request whose rows come from another worker, and the event that reports how its prompt came.

This is plain state, without engine or receiver: `decode_phase.DecodePhase` moves it on, and
`pulls.Pulls` keeps blocks for it.
"""

import time
from dataclasses import dataclass

from pdserve.engine.scheduling.sequence import Request
from pdserve.kvtransfer.connector import PullDone
from pdserve.protocol.commands import Start
from pdserve.protocol.events import Arrived
from pdserve.protocol.handoff import Source, Ticket
from pdserve.protocol.request_key import RequestKey


@dataclass(eq=False)
class KVImport:
    """A request whose rows are to be pulled."""

    request: Request
    starts: tuple[Start, ...]
    source: Source
    started: float  # When its Submit or Prepare came, in monotonic seconds.
    ticket: Ticket | None = None  # None until its Submit.
    began: float | None = None  # When the newest pull began; None: there was none yet.
    pull_id: int | None = None  # Set while a pull is under way.
    is_hint: bool = False  # The pull began before the Submit.
    is_revoked: bool = False  # The pull was ended because others need its blocks.

    @property
    def key(self) -> RequestKey:
        return self.request.key

    def spent(self) -> tuple[float, float]:
        """Returns the seconds since the Submit, and how many of them it waited for blocks."""
        now = time.monotonic()
        return now - self.started, max(
            0.0, (now if self.began is None else self.began) - self.started
        )

    def arrived(self, source: str, done: PullDone | None) -> Arrived:
        """Returns the event of an import that joined.

        `source` is "cache", or "p2p" with the end of its pull in `done`.
        """
        assert self.ticket is not None
        seconds, wait_s = self.spent()
        return Arrived(
            request_id=self.key.request_id,
            attempt=self.key.attempt,
            source=source,
            num_bytes=done.num_bytes if done else 0,
            num_early_bytes=done.num_early_bytes if done else 0,
            num_descriptors=done.num_descriptors if done else 0,
            transport=done.transport if done else "",
            seconds=seconds,
            wait_s=wait_s,
            read_s=done.read_s if done else 0.0,
            lag_s=done.ended_at - self.ticket.written_at if done else 0.0,
            cached_tokens=self.request.cached_tokens,
        )


def arrived_by_recompute(
    key: RequestKey, reason: str, detail: str, spent: tuple[float, float]
) -> Arrived:
    """Returns the event of a request whose prompt is computed here after all.

    `spent` is as in `KVImport.spent`.
    """
    return Arrived(
        request_id=key.request_id,
        attempt=key.attempt,
        source="recompute",
        seconds=spent[0],
        wait_s=spent[1],
        reason=reason,
        detail=detail,
    )


def source_of(ticket: Ticket) -> Source:
    """Returns where the ticket's rows are."""
    return Source(ticket.engine_id, ticket.incarnation, ticket.key)
