"""A worker on paper: a real worker loop in virtual time, and a router's link to it.

    asleep --command, letter--> turn --stepped--> busy until its end --> turn ...
                                  |                  '--all the same--> macro step --> turn
                                  '--nothing to do--> asleep
    macro step --command, letter--> cut: done up to the turn in which it arrives

With macro steps, tokens between a choice's first and last reach the router with the last one.

A turn is simulated at once. The clock is set to its end, and messages are sent from there. Then the
clock is set back, so that others can act in the meantime. Messages that arrive during the turn are
handled at its end, as in a process. `scene` makes the workers.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from pdserve.configs.transfer import TransferConfig
from pdserve.engine.engine import Engine
from pdserve.plan.simulation.macro_steps import MacroStep, plan_macro, play
from pdserve.plan.simulation.paper_executor import TOKEN
from pdserve.plan.simulation.paper_transfer import Network, PaperReceiver, PaperSender
from pdserve.plan.simulation.virtual_time import CLOCK
from pdserve.protocol.codec import encode
from pdserve.protocol.commands import Command, RouterLost, Subscribe
from pdserve.protocol.events import Delta, Event, EventBatch, Load
from pdserve.protocol.metric_families import MetricFamily
from pdserve.worker.load_report import PERIOD_S
from pdserve.worker.loop import WorkerLoop
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.outbox import ALL_ROUTERS


class _Metrics(WorkerMetrics):
    """Metrics without families, because nothing scrapes them."""

    def families(self) -> tuple[MetricFamily, ...]:
        return ()


class PaperWorker:
    """A worker on paper. num_messages and num_bytes count what it sent to routers."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        engine: Engine,
        network: Network | None,
        command_s: float,
        message_s: float,
        macro: bool = True,
        hands_over: bool = True,
    ) -> None:
        """Makes a worker that is asleep.

        - network: None for a worker that is alone.
        - macro: False simulates every step by itself, and sends its tokens at once.
        - hands_over: False for a worker that does whole requests.
        """
        self.worker_id = worker_id
        self.role = role
        self.engine = engine
        self.num_messages = self.num_bytes = 0
        self._command_s = command_s
        self._message_s = message_s
        self._takes_macros = macro
        sender: PaperSender | None = None
        receiver: PaperReceiver | None = None
        if network is not None:
            digest = (engine.model_fingerprint, engine.rows_digest)
            sender = PaperSender(
                network, worker_id, engine.homes[0].blocks.num_blocks, digest, self._stir
            )
            receiver = PaperReceiver(network, worker_id, self._stir)
        self.loop = WorkerLoop(
            engine,
            _Metrics(engine),
            TransferConfig(),
            role,
            worker_id,
            1,
            sender,
            receiver,
            self._told,
            hands_over=hands_over,
        )
        self._commands: deque[Command] = deque()
        self._streams: dict[str, asyncio.Queue[bytes]] = {}
        self._last_command = self._last_batch = 0.0
        self._is_asleep = True
        self._next: asyncio.TimerHandle | None = None
        self._macro: MacroStep | None = None
        self._count = 0  # number of turns of the macro step to do
        self._turn_ended = 0.0
        self._held: dict[tuple[str, int, int], int] = {}

    # --- a router's link ---

    async def send(self, command: Command) -> None:
        self._post(command)

    async def events(self, router_id: str, session: int) -> AsyncIterator[bytes]:
        stream = self._streams[f"{router_id}/{session}"] = asyncio.Queue()
        self._post(Subscribe(router_id=router_id, session=session))
        try:
            while True:
                yield await stream.get()
        finally:
            self._streams.pop(f"{router_id}/{session}", None)
            self._post(RouterLost(router_id=router_id, session=session))

    def _post(self, command: Command) -> None:
        """Sends a command to the worker. Commands keep their order."""
        self._last_command = max(CLOCK.now + self._command_s, self._last_command + 1e-9)
        asyncio.get_running_loop().call_at(self._last_command, self._arrive, command)

    def _told(self, target: str, batch: EventBatch) -> None:
        """Delivers a batch that the worker loop sends now."""
        if self._takes_macros:
            events = tuple(event for event in map(self._held_back, batch.events) if event)
            if not events:
                return
            batch = msgspec.structs.replace(batch, events=events)
        data = encode(batch)
        streams = (
            list(self._streams.values())
            if target == ALL_ROUTERS
            else [self._streams[target]] * (target in self._streams)
        )
        # Timers of the same moment have no order, but batches must keep theirs.
        self._last_batch = max(CLOCK.now + self._message_s, self._last_batch + 1e-9)
        for stream in streams:
            self.num_messages += 1
            self.num_bytes += len(data)
            asyncio.get_running_loop().call_at(self._last_batch, stream.put_nowait, data)

    def _held_back(self, event: Event) -> Event | None:
        """Holds a choice's tokens between its first and its last one until the last one, because no
        router acts on them before. Returns the event to send, or None if it is held."""
        if type(event) is not Delta:
            return event
        place = (event.request_id, event.attempt, event.choice)
        held = self._held.get(place, 0)
        if event.finish_reason is None:
            if event.position == 0:
                return event
            self._held[place] = held + len(event.token_ids)
            return None
        if not held:
            return event
        del self._held[place]
        tokens = (TOKEN,) * held + event.token_ids
        return msgspec.structs.replace(event, position=event.position - held, token_ids=tokens)

    # --- turns ---

    def _arrive(self, command: Command) -> None:
        self._commands.append(command)
        self._stir()

    def _stir(self) -> None:
        """Wakes the worker, because something arrived that the next turn handles."""
        if self._macro is not None:
            if CLOCK.now <= self._turn_ended:
                count = 0
            else:
                count = bisect_left(self._macro.turns, CLOCK.now) + 1
            if count < self._count:
                self._count = count
                self._wake_at(self._macro.turns[count - 1] if count else self._turn_ended)
        elif self._is_asleep:
            self._is_asleep = False
            self._wake_at(CLOCK.now)

    def _wake_at(self, at: float) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = asyncio.get_running_loop().call_at(at, self._run)

    def _run(self) -> None:
        began = CLOCK.now
        macro, self._macro = self._macro, None
        if macro is not None and self._count:
            for turn in macro.turns[: self._count]:
                self.loop._status._report.is_due(turn)  # the loop checks this at each turn's end
            self.loop._emit(play(self.engine, macro, self._count))
            self.loop._turn_began = macro.begins(self._count - 1)
        while self._commands:
            self.loop.handle(self._commands.popleft())
        timeout = self.loop.turn()
        self._turn_ended = CLOCK.now
        self._is_asleep = timeout > 0
        wakes_at = CLOCK.now + timeout
        if not timeout and self._takes_macros and not self.loop._cache.has_parts:
            waits = self.loop.decode is not None and self.loop.decode.waits_for_blocks
            self._macro = None if waits else plan_macro(self.engine, self._next_report())
            if self._macro is not None:
                self._count = len(self._macro.turns)
                wakes_at = self._macro.turns[-1]
        CLOCK.now = began
        self._wake_at(wakes_at)

    def _next_report(self) -> float:
        """Returns when this worker reports to routers next if nothing changes until then."""
        due = self.loop._status.due
        report = self.loop._status._report
        load = Load(
            queue_tokens=0, num_running=len(self.engine.scheduler.running), num_waiting=0, pace=None
        )
        return min(due, report._looked_at + PERIOD_S) if report.has_changed(load) else due
