"""Hypothesis drives two workers over tiny pools through every order of what can happen to a hand-off.

The engines run a model on paper (engine/harness.py): its rows are functions of the tokens before them, move as late as a
device may, and are checked by whoever reads them, so a stale or foreign byte that is accepted fails the step that reads
it. Links and mailboxes are the real ones, with threads of their own; the transport is the in-process one, which can be
slow, frozen and dead. After every event the books are checked on both sides; in the end all must come to rest.
"""

import itertools
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import alone, paper_engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pair import Worker, owned, submit

from pdserve.configs.kv_layout import KVLayout
from pdserve.configs.schema import TransferConfig
from pdserve.engine.engine import Engine
from pdserve.engine.protocol import (
    Cancel,
    ConnectPeer,
    Delta,
    DisconnectPeer,
    Failed,
    Handoff,
    Prepare,
    RequestKey,
    RouterLost,
    SamplingParams,
    Source,
    Start,
    Subscribe,
)
from pdserve.kvtransfer.connector import PoolMemory

EXAMPLES = int(os.environ.get("PDSERVE_MACHINE_EXAMPLES", "25"))
TRANSFER = TransferConfig(connector="local", lease_s=0.4, pull_deadline_s=0.2, max_reserved_fraction=0.7)
REST_S = 20.0
ROUTER = "router"
_names = itertools.count()


class PaperWorker(Worker):
    def make_engine(self, model: Path, **engine: object) -> Engine:
        return paper_engine(model, **engine)

    def memory(self) -> PoolMemory:
        """The paper's rows, 8 bytes each, as a pool."""
        rows: Any = self.engine.runner.rows  # type: ignore[attr-defined]
        layout = KVLayout.uniform(num_layers=1, heads=(0,), head_dim=1, block_size=rows.shape[1], dtype="float32")
        pool = torch.from_numpy(rows).view(torch.float32).view(rows.shape[0], *layout.block_shape)
        return PoolMemory(pool, self.engine.blocks.generations, layout, "paper")

    @property
    def faults(self) -> Any:
        return self.sender._agent.faults


@dataclass(eq=False)
class Asked:
    """One request as the router sees it. tokens: accepted, by choice. given_up: by its client, or with a worker."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    session: int
    p_key: RequestKey
    d_key: RequestKey
    p: PaperWorker
    d: PaperWorker
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: set[int] = field(default_factory=set)
    handoff: Handoff | None = None
    is_prepared: bool = False
    is_handed_over: bool = False
    given_up: bool = False

    @property
    def is_over(self) -> bool:
        return self.given_up or len(self.finished) == self.sampling.n


class HandOver(RuleBasedStateMachine):
    model: Path

    @initialize(
        seed=st.integers(0, 1 << 30), p_blocks=st.integers(14, 30), d_blocks=st.integers(14, 30), two=st.booleans()
    )
    def begin(self, seed: int, p_blocks: int, d_blocks: int, two: bool) -> None:
        self.rng = random.Random(seed)
        self.session = 1
        self.common = {"device": "cpu", "block_size": 16, "async_scheduling": two, "max_num_seqs": 8}
        self.sizes = {"P": p_blocks, "D": d_blocks}
        self.asked: list[Asked] = []
        self.retired: list[PaperWorker] = []
        self.prefixes = [[self.rng.randrange(256) for _ in range(96)] for _ in range(3)]
        self.p, self.d = self._start("P"), self._start("D")
        self._connect()

    def _start(self, name: str) -> PaperWorker:
        budget = 40 if name == "P" else 64
        worker = PaperWorker(
            self.model,
            f"{name}-{id(self)}",
            "prefill" if name == "P" else "decode",
            TRANSFER,
            num_kv_blocks=self.sizes[name],
            max_num_batched_tokens=budget,
            **self.common,
        )
        worker.command(Subscribe(router_id=ROUTER, session=self.session))
        return worker

    def _connect(self) -> None:
        self.d.command(ConnectPeer(meta=self.p.sender.meta()))

    # --- what users, routers and time do ---

    @rule(length=st.integers(1, 150), prefix=st.integers(0, 2), n=st.sampled_from([1, 1, 2]), prepared=st.booleans())
    def ask(self, length: int, prefix: int, n: int, prepared: bool) -> None:
        if sum(not each.is_over for each in self.asked) >= 8:
            return
        shared = self.prefixes[prefix][: self.rng.randrange(96)]
        prompt = (shared + [self.rng.randrange(256) for _ in range(length)])[:150]
        name = f"r{next(_names)}"
        sampling = SamplingParams(
            n=n, temperature=0.9, seed=self.rng.randrange(1000), max_tokens=self.rng.randrange(1, 12), ignore_eos=True
        )
        p_key, d_key = (RequestKey(ROUTER, self.session, name, attempt) for attempt in (1, 2))
        asked = Asked(name, prompt, sampling, self.session, p_key, d_key, self.p, self.d)
        self.asked.append(asked)
        self.p.command(submit(p_key, "prefill", prompt, sampling, overlap=prepared))
        if prepared:
            self._prepare(asked)

    def _prepare(self, asked: Asked) -> None:
        meta = asked.p.sender.meta()
        wanted = submit(asked.d_key, "decode", asked.prompt, asked.sampling)
        asked.d.command(Prepare(submit=wanted, source=Source(meta.engine_id, meta.incarnation, asked.p_key)))
        asked.is_prepared = True

    def _open(self, condition: Callable[[Asked], bool] = lambda _: True) -> list[Asked]:
        return [each for each in self.asked if not each.is_over and condition(each)]

    @rule()
    def prepare_late(self) -> None:
        for asked in self._open(lambda each: not each.is_prepared)[:1]:
            self._prepare(asked)

    @rule(last=st.booleans())
    def hand_over(self, last: bool) -> None:
        ready = self._open(lambda each: each.handoff is not None and not each.is_handed_over)
        if ready:
            self._hand_over(ready[-1 if last else 0])

    def _hand_over(self, asked: Asked) -> None:
        assert asked.handoff is not None
        asked.is_handed_over = True
        starts = tuple(
            Start(choice, tuple(asked.tokens[choice]))
            for choice in range(asked.sampling.n)
            if choice not in asked.finished
        )
        asked.d.command(
            submit(asked.d_key, "decode", asked.prompt, asked.sampling, starts=starts, ticket=asked.handoff.ticket)
        )

    @rule(which=st.integers(0, 7), order=st.booleans())
    def give_up(self, which: int, order: bool) -> None:
        for asked in self._open()[which : which + 1]:
            self._give_up(asked, order)

    def _give_up(self, asked: Asked, order: bool) -> None:
        asked.given_up = True
        for worker, key in sorted(
            [(asked.p, asked.p_key), (asked.d, asked.d_key)], key=lambda each: order, reverse=order
        ):
            worker.command(Cancel(key=key))

    @rule(turns=st.integers(1, 6))
    def both_work(self, turns: int) -> None:
        for _ in range(turns):
            self._turn(self.p)
            self._turn(self.d)

    @rule(turns=st.integers(1, 8))
    def p_works(self, turns: int) -> None:
        for _ in range(turns):
            self._turn(self.p)

    @rule(turns=st.integers(1, 8))
    def d_works(self, turns: int) -> None:
        for _ in range(turns):
            self._turn(self.d)

    @rule(milliseconds=st.sampled_from([1, 5, 30, 150]))
    def time_passes(self, milliseconds: int) -> None:
        time.sleep(milliseconds / 1000)

    @rule(length=st.integers(20, 200), at_p=st.booleans())
    def another_takes_blocks(self, length: int, at_p: bool) -> None:
        """A whole request in one of the engines: pushes others out, and reuses what was freed."""
        worker = self.p if at_p else self.d
        key = RequestKey(ROUTER, self.session, f"whole{next(_names)}", 1)
        prompt = [self.rng.randrange(256) for _ in range(min(length, 13 * 16 - 8))]
        worker.command(submit(key, "full", prompt, SamplingParams(temperature=0, max_tokens=4, seed=1), priority=-1))
        for _ in range(3):
            self._turn(worker)

    @rule(at_p=st.booleans())
    def one_is_preempted(self, at_p: bool) -> None:
        engine = (self.p if at_p else self.d).engine
        if engine.scheduler.running and not engine._in_flight:
            engine.scheduler._preempt(engine.scheduler.running[-1])

    # --- what goes wrong ---

    @rule(delay=st.sampled_from([0.0, 0.0, 0.01, 0.1]))
    def reads_take_long(self, delay: float) -> None:
        self.p.faults.delay_s = delay

    @rule(frozen=st.booleans())
    def p_freezes_or_thaws(self, frozen: bool) -> None:
        self.p.faults.frozen = frozen

    @rule(fate=st.sampled_from(["lost", "twice", "old", "kept"]))
    def letters(self, fate: str) -> None:
        for worker in (self.p, self.d):
            mailbox = worker.sender._mailbox
            send = type(mailbox).send.__get__(mailbox)
            past: list[Any] = []

            def misdelivered(to: Any, notice: Any, send: Any = send, past: list[Any] = past) -> None:
                past.append((to, notice))
                for letter in {"lost": [], "twice": past[-1:] * 2, "old": past[-3:-1], "kept": past[-1:]}[fate]:
                    send(*letter)

            mailbox.send = misdelivered  # type: ignore[method-assign]

    @precondition(lambda self: self.rng.random() < 0.3)
    @rule()
    def p_dies_and_comes_back(self) -> None:
        self.p.faults.dead = True
        self._lose(self.p)
        self.p = self._start("P")
        self._connect()

    @precondition(lambda self: self.rng.random() < 0.3)
    @rule()
    def d_dies_and_comes_back(self) -> None:
        self._lose(self.d)
        self.d = self._start("D")
        self._connect()

    def _lose(self, worker: PaperWorker) -> None:
        """The router notices: what ran there has failed, and is cancelled at the other."""
        for asked in self._open(lambda each: worker in (each.p, each.d)):
            self_recovers = worker is asked.p and asked.is_handed_over
            if not self_recovers:
                self._give_up(asked, True)
        worker.close()
        self.retired.append(worker)

    @precondition(lambda self: self.rng.random() < 0.3)
    @rule()
    def the_router_dies(self) -> None:
        for asked in self._open():
            asked.given_up = True
        for worker in (self.p, self.d):
            worker.command(RouterLost(router_id=ROUTER, session=self.session))
        self.session += 1
        for worker in (self.p, self.d):
            worker.command(Subscribe(router_id=ROUTER, session=self.session))

    @precondition(lambda self: self.rng.random() < 0.3)
    @rule()
    def the_pair_is_disconnected(self) -> None:
        meta = self.p.sender.meta()
        self.d.command(DisconnectPeer(engine_id=meta.engine_id, incarnation=meta.incarnation))
        self._connect()

    # --- looking on ---

    def _turn(self, worker: PaperWorker) -> None:
        worker.loop.turn()
        for asked in self.asked:
            if not asked.given_up:
                self._read(asked)

    def _read(self, asked: Asked) -> None:
        for worker, key in ((asked.p, asked.p_key), (asked.d, asked.d_key)):
            for event in [e for e in worker.events if getattr(e, "request_id", None) == asked.name]:
                worker.events.remove(event)
                assert not isinstance(event, Failed), event
                if event.attempt != key.attempt:
                    continue
                if isinstance(event, Handoff):
                    asked.handoff = event
                elif isinstance(event, Delta):
                    assert event.position == len(asked.tokens[event.choice])
                    asked.tokens[event.choice] += event.token_ids
                    if event.finish_reason:
                        asked.finished.add(event.choice)
        if len(asked.finished) == asked.sampling.n:
            for choice in range(asked.sampling.n):
                want = alone(self.p.engine, asked.prompt, asked.sampling, choice)
                assert asked.tokens[choice] == want, "another prompt's answer"
            if asked.is_prepared and not asked.is_handed_over:
                asked.d.command(Cancel(key=asked.d_key))  # as the router ends the leg

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "p"):
            return
        for worker in (self.p, self.d):
            worker.loop.check_integrity()
        self._nothing_else_in_the_way_of_reads()

    def _nothing_else_in_the_way_of_reads(self) -> None:
        """Blocks that reads may still write are a pull's, or in quarantine."""
        decode, blocks = self.d.loop.decode, self.d.engine.blocks
        assert decode is not None
        reserved = {block for pull in decode._pulls.values() for block in pull.reservation.destination}
        for link in list(self.d.receiver._ranks[0]._links.values()):
            for pull in list(link._pulls.values()):
                for piece in list(pull.pieces):
                    if piece.reads:
                        written = pull.local_blocks[piece.first - pull.skip : piece.last - pull.skip]
                        bad = [b for b in written if b not in reserved and b not in blocks._quarantined]
                        assert not (bad and piece.reads), f"blocks {bad} are not kept for the read that fills them"

    def teardown(self) -> None:
        if not hasattr(self, "p"):
            return
        try:
            self._come_to_rest()
        finally:
            for worker in (self.p, self.d):
                worker.faults.frozen = False
                worker.close()

    def _come_to_rest(self) -> None:
        """No command but hand-overs comes any more; the peers live: everything ends, and every block is free."""
        self.letters("kept")
        self.p.faults.frozen, self.p.faults.delay_s = False, 0.0
        limit = time.monotonic() + REST_S
        decode, sender = self.d.loop.decode, self.p.sender
        assert decode is not None
        while True:
            self.both_work(2)
            for asked in self._open(lambda each: each.handoff is not None and not each.is_handed_over):
                self._hand_over(asked)
            rests = not any(w.engine.has_work or owned(w) for w in (self.p, self.d))
            if rests and not self._open() and not decode._imports and not sender._prompts:
                break
            assert time.monotonic() < limit, (
                self._open(),
                decode._imports,
                sender._prompts,
                owned(self.p),
                owned(self.d),
            )
            time.sleep(0.001)
        self.books_add_up()


def test_every_order_of_events(tiny_llama: Path) -> None:
    HandOver.model = tiny_llama
    run_state_machine_as_test(
        HandOver,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.slow
def test_many_orders_of_events(tiny_llama: Path) -> None:
    HandOver.model = tiny_llama
    run_state_machine_as_test(
        HandOver,
        settings=settings(
            max_examples=40 * EXAMPLES, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
