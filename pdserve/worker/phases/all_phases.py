"""All phases of one worker, made for what it has: a connector, a KV pool, a tokenizer.

At any time a request is in one of them or at the engine. Knows no sessions and sends nothing. Made
by worker.loop, its only user.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from pdserve.configs.transfer import TransferConfig
from pdserve.decode.decode_phase import DecodePhase
from pdserve.engine.engine import Engine
from pdserve.engine.grammars.builder import BuildTotals, GrammarBuilder
from pdserve.kvtransfer.connector import KVPool, KVReceiver, KVSender
from pdserve.prefill.prefill_phase import PrefillPhase
from pdserve.protocol.request_key import RequestKey
from pdserve.worker.fetching.fetch_phase import FetchPhase, Links
from pdserve.worker.phases.grammar_metrics import GrammarCollector
from pdserve.worker.phases.grammar_phase import GrammarPhase
from pdserve.worker.pool_phase import PoolPhase


class Phases:
    """The phases of one worker.

    sender, receiver, pool and grammars are None if the worker has none; then the phases that need
    them are None too. See FetchPhase for `speed`. `compute_here` gives a request to the engine,
    after getting what others have of its prompt.
    """

    def __init__(
        self,
        engine: Engine,
        config: TransferConfig,
        sender: KVSender | None,
        receiver: KVReceiver | None,
        pool: KVPool | None,
        grammars: GrammarBuilder | None,
        links: Links,
        speed: Callable[[], float],
        registry: CollectorRegistry,
    ) -> None:
        self._engine = engine
        usable = engine.homes[0].blocks.num_usable  # each home has a budget of its own
        self.grammars = GrammarPhase(grammars)
        totals = grammars.totals if grammars is not None else BuildTotals()
        registry.register(GrammarCollector(engine, totals))
        self.pool = PoolPhase(engine, pool, config.pull_deadline_s) if pool else None
        compute_here = self.pool.compute if self.pool else engine.add
        self.decode = (
            DecodePhase(
                engine,
                receiver,
                int(usable * config.max_reserved_fraction),
                int(usable * config.max_quarantined_fraction),
                config.pull_deadline_s,
                compute_here,
            )
            if receiver
            else None
        )
        self.fetch = (
            FetchPhase(
                engine,
                sender,
                receiver,
                self.decode.pulls,
                links,
                config.pull_deadline_s,
                speed,
                compute_here,
                registry,
            )
            if sender and receiver and self.decode and config.fetch_prefixes
            else None
        )
        self.compute_here = self.fetch.compute if self.fetch else compute_here
        max_pinned = int(usable * config.max_pinned_fraction)
        self.prefill = (
            PrefillPhase(engine, sender, max_pinned, self.compute_here) if sender else None
        )

    @property
    def owned(self) -> list[tuple[int, list[int]]]:
        """The blocks that phases own, as lists with their home."""
        phases = [phase for phase in (self.decode, self.pool) if phase is not None]
        return [owned for phase in phases for owned in phase.owned]

    def waiting_keys(self) -> set[RequestKey]:
        """Returns the requests that wait for something, within deadlines of their own."""
        phases = (self.grammars, self.decode, self.fetch, self.pool)
        return set().union(*(phase.keys() for phase in phases if phase is not None))

    def keys(self) -> set[RequestKey]:
        """Returns the requests that a phase holds."""
        held = self.prefill.keys() if self.prefill is not None else set()
        return self.waiting_keys() | held

    def cancel(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        """Stops a request (or some of its choices), wherever it is. Calling it twice is allowed."""
        if self.grammars.cancel(key, choices):
            self.cancel_import(key, choices)
            return
        if self.pool is not None and self.pool.cancel(key, choices):
            return
        if self.fetch is not None and self.fetch.cancel(key, choices):
            return
        self.cancel_import(key, choices)
        if self._engine.abort(key, choices) and choices is None and self.prefill is not None:
            self.prefill.cancel(key)

    def cancel_import(self, key: RequestKey, choices: tuple[int, ...] | None) -> None:
        """Stops what was begun of a hand-off to this worker."""
        if self.decode is not None:
            self.decode.cancel(key, choices)
