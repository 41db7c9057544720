"""Decides which worker should change its role when one phase has had too few workers for long: pure
decisions, without fleet or clock.

    one side lacks workers, the other has one to spare, for SUSTAINED_S  -> one worker changes
    a worker changed less than AGAIN_S ago                               -> nothing

The slack of decode workers absorbs short waves of prompts; this is for load that stays. A change
leaves both sides with less demand than would bring the worker back. Roles that an operator set are
never changed. `cluster.scaling.balancer` calls this once per second. docs/design/elasticity.md
explains the numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdserve.cluster.scaling.demand import SPARE, holds_since, lasts

SUSTAINED_S = 60.0
AGAIN_S = 300.0
WorkingRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Member:
    """One worker.

    - `is_free`: True if no operator chose its role.
    - `changed_s`: seconds since this rule changed its role; None if it did not.
    - `load`: the worker with the least load changes first.
    """

    worker: str
    role: str
    is_free: bool = True
    changed_s: float | None = None
    load: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    worker: str
    role: WorkingRole


class Balance:
    """Remembers since when a side has lacked workers. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._prefill_lacks: float | None = None
        self._decode_lacks: float | None = None

    def decide(
        self, members: Sequence[Member], prefill_demand: float, decode_demand: float, now: float
    ) -> Change | None:
        """Returns the change to make now, or None.

        The two demands are in workers. Each counts one phase over all workers, whatever their
        roles: prompts in `prefill_demand`, streams in `decode_demand`.
        """
        num_prefill = sum(member.role == "prefill" for member in members)
        num_decode = sum(member.role in ("decode", "both") for member in members)
        self._prefill_lacks = holds_since(
            lacks(prefill_demand, num_prefill, decode_demand, num_decode),
            self._prefill_lacks,
            now,
        )
        self._decode_lacks = holds_since(
            lacks(decode_demand, num_decode, prefill_demand, num_prefill), self._decode_lacks, now
        )
        if any(m.changed_s is not None and m.changed_s < AGAIN_S for m in members):
            return None
        if lasts(self._prefill_lacks, SUSTAINED_S, now):
            return self._move(members, "decode", "prefill")
        if lasts(self._decode_lacks, SUSTAINED_S, now):
            return self._move(members, "prefill", "decode")
        return None

    def forget(self) -> None:
        """Starts anew, because another router decides or counts are changing."""
        self._prefill_lacks = self._decode_lacks = None

    def _move(
        self, members: Sequence[Member], giver: WorkingRole, taker: WorkingRole
    ) -> Change | None:
        free = [member for member in members if member.role == giver and member.is_free]
        if not free:
            return None
        self.forget()
        return Change(min(free, key=lambda m: (m.load, m.worker)).worker, taker)


def lacks(demand: float, num_workers: int, other_demand: float, num_others: int) -> bool:
    """True if this side has too few workers, and the other would still have enough with one
    fewer."""
    return demand > num_workers and other_demand < SPARE * (num_others - 1)
