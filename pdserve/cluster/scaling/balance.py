"""Which worker should change its role, when one phase has had too few workers for long: pure
decisions, without fleet or clock.

    one side lacks workers, the other has one to spare, for SUSTAINED_S  -> one worker changes
    a worker changed less than AGAIN_S ago                               -> nothing

The slack of decode workers takes short waves of prompts; this is for what stays. A change leaves
both sides with less demand than would bring the worker back, and roles that an operator set are
never touched. Called by `cluster.scaling.balancer` once a second. docs/design/elasticity.md says
where the numbers come from.
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
    """One worker. is_free: no operator chose its role. changed_s: seconds since this rule changed
    its role; None: it did not. load: who has least changes first."""

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
    """What must be remembered between two moments. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._prefill_lacks: float | None = None
        self._decode_lacks: float | None = None

    def decide(
        self, members: Sequence[Member], prefill_demand: float, decode_demand: float, now: float
    ) -> Change | None:
        """prefill_demand, decode_demand: in workers, by phase: the prompts, or the streams, of all
        workers whatever their roles."""
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
        """What was seen so far does not count: others decide, or numbers change."""
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
    """Whether this side has too few workers while the other would be well off with one fewer."""
    return demand > num_workers and other_demand < SPARE * (num_others - 1)
