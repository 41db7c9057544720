"""Answers the probes of load balancers and Kubernetes: does the router live, are its workers there?

`/health` says whether any worker could finish a request. `/ready` is stricter: it asks for prefill
and decode workers that are connected, or for one worker that does whole requests. A router without
workers still answers what it can and must not be restarted for that, so `/live` asks for none.
Reads the fleet's states and changes nothing. Called by `router.http.app`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdserve.router.fleet.worker_state import WorkerState


@dataclass(frozen=True)
class Readiness:
    """Whether requests are answered in the way that the configuration intends."""

    # Numbers of workers with this role that take new requests.
    prefill: int
    decode: int
    both: int
    # Sentences that say what is missing; none if the router is ready.
    missing: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        return not self.missing

    def body(self) -> dict[str, Any]:
        return {"ready": self.is_ready} | asdict(self)


def readiness(workers: Sequence[WorkerState]) -> Readiness:
    """Judges by all workers that a router sees, including those that leave."""
    staying = [worker for worker in workers if not worker.draining]
    whole = [worker for worker in staying if worker.role == "both"]
    prefills = [worker for worker in staying if worker.role == "prefill"]
    decodes = [worker for worker in staying if worker.role == "decode"]
    missing: tuple[str, ...] = ()
    if not whole:
        missing = tuple(_missing(prefills, decodes))
    return Readiness(len(prefills), len(decodes), len(whole), missing)


def _missing(prefills: Sequence[WorkerState], decodes: Sequence[WorkerState]) -> list[str]:
    """Returns what keeps prefill and decode workers from answering together."""
    absent = [
        f"no {role} worker is running: it is starting, or it has ended (its log says why)"
        for role, workers in (("prefill", prefills), ("decode", decodes))
        if not workers
    ]
    if absent or any(decode.is_connected_to(prefill) for decode in decodes for prefill in prefills):
        return absent
    return [
        "no decode worker is connected to a prefill worker: if this stays so, look at the decode "
        "workers' logs for what the transport says"
    ]
