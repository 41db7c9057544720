"""The engine: requests in, protocol events out, one `step()` at a time.

Owns scheduler and block manager. The planner turns a plan into messages, the executor carries them
out on the device, and the collector turns the sampled tokens into events. The host plans and sends
a step while the device computes the previous one (docs/design/engine-step.md).

Serves both phases. A prefill-only request ends with its prompt's blocks held for a hand-off. A
reserved request joins with blocks that somebody else filled. Knows no connector, no router, no
text. Driven by `LLM` (in process) or by worker.loop (with hand-off).
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pdserve.engine.components import EngineComponents
from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.memory.block_manager import BlockManager
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.requests import Requests
from pdserve.engine.reservations import Reservation, Reservations
from pdserve.engine.scheduling.home import Home, Homes
from pdserve.engine.scheduling.request_checker import RequestChecker
from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request
from pdserve.engine.step_result import EngineStats, StepResult
from pdserve.engine.stepping.collector import StepCollector
from pdserve.engine.stepping.executor import Executor
from pdserve.engine.stepping.planner import StepPlanner
from pdserve.engine.stepping.step_queue import StepQueue
from pdserve.engine.stepping.step_watch import StepClock
from pdserve.kernels.launching.late_compiles import LateCompiles
from pdserve.protocol.block_digests import BlockHasher
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.request_key import RequestKey

LEAST_SPARE_S = 0.001  # less is not worth a turn of the worker


class Engine:
    """One model on one device; made by `engine.build`. Not thread-safe: one thread makes all calls.

    - step_clock: runs during a step.
    - mask_totals: cost and errors of token masks.
    - expert_load: rows per expert of this rank's layers; None if they have no experts.
    - pace: decides how prompts and decodes share steps; None: prompts first (`LLM`).
    - steps: plans steps, sends them, and has those in flight.
    - late_compiles: kernels compiled after the engine was warm; none is counted before.
    """

    def __init__(self, components: EngineComponents, pace: Pace | None = None) -> None:
        self.pace = pace
        clock = pace.clock if pace is not None else time.monotonic
        self.config = components.config
        self.device = components.device
        self.spec = components.spec
        self.layout = components.layout
        self.model_fingerprint = components.fingerprint
        self.max_model_len = components.max_model_len
        self.rows_digest = components.rows_digest
        self.unrounded = components.unrounded
        self.hasher = BlockHasher(self.rows_digest, self.config.block_size, self.model_fingerprint)
        self.homes = Homes(
            self.config.data_parallel,
            components.num_blocks,
            self.hasher,
            self.config.max_num_seqs,
            self.config.enable_prefix_caching,
            self.spec.longest_window,
        )
        self.scheduler = Scheduler(
            self.homes,
            self.hasher,
            self.config.max_num_batched_tokens,
            self.config.max_num_seqs,
            self.config.pipeline_parallel,
            pace,
        )
        self.max_request_tokens = min(
            self.max_model_len, self.homes[0].blocks.num_usable * self.config.block_size
        )
        self.request_checker = RequestChecker(
            self.spec.vocab_size,
            self.spec.eos_token_ids,
            self.max_request_tokens,
            self.config.max_num_seqs,
            clock,
        )
        self.stats = EngineStats()
        self.mask_totals = components.staging.mask_totals
        self.expert_load = components.expert_load
        self.step_clock = StepClock()
        self._requests = Requests(self.scheduler)
        self._reservations = Reservations(self.hasher, self.layout, self._requests, self.scheduler)
        self._planner = StepPlanner(
            components.staging,
            self.scheduler,
            self.hasher,
            self._requests,
            self.stats,
        )
        self._collector = StepCollector(
            self.hasher, self.layout, self.scheduler, self._requests, self.stats, clock
        )
        self.steps = StepQueue(
            components.executor,
            self._planner,
            self.scheduler,
            self.config.max_steps_in_flight,
            pace,
            clock,
        )
        self.late_compiles = LateCompiles()
        self._is_torn = False  # True during a step, and after one that did not reach its end

    def mark_warm(self) -> None:
        """Clear the statistics so far. From now on no kernel should be compiled."""
        self.stats.clear()
        self.mask_totals.clear()
        self.executor.clear_expert_load()
        self.late_compiles.watch()

    @property
    def executor(self) -> Executor:
        return self.steps.executor

    @property
    def kv_cache(self) -> KVCache:
        return self.executor.kv_cache

    @property
    def blocks(self) -> BlockManager:
        """Block manager of an engine with one home; AssertionError if there are several."""
        assert len(self.homes) == 1, "which home's blocks?"
        return self.homes[0].blocks

    @property
    def has_work(self) -> bool:
        """True if `step` has anything to do, even if only to collect what is in flight."""
        return self.scheduler.has_work or bool(self.steps.in_flight)

    @property
    def is_at_rest(self) -> bool:
        """True if no request, held prompt or step in flight is left."""
        return not (self._requests or self._collector.held or self.steps.in_flight)

    # --- requests in and out ---

    def make_request(self, submit: Submit, grammar: Grammar | None = None) -> Request:
        """Check a Submit against this engine. ValueError names the parameter if it can never run
        here.

        grammar: built by `grammars.builder` from the request's sampling. A request that asks for a
        grammar may be made without it, but must not be added or joined before it has one."""
        return self.request_checker.request(submit, grammar)

    def add(self, request: Request, starts: Iterable[Start]) -> None:
        """Queue a request that computes its prompt here. Fresh choices share the computation of the
        prompt and fork after it.
        """
        self._require_whole()
        starts = tuple(starts)
        fresh = not any(start.forced for start in starts)
        self._requests.register(request)
        for start in starts[:1] if fresh else starts:
            seq = self._requests.new_sequence(request, start)
            if fresh:
                seq.pending_forks = tuple(s.choice for s in starts[1:])
            self.scheduler.add(seq)

    def abort(self, key: RequestKey, choices: tuple[int, ...] | None = None) -> bool:
        """Stop a request (or some of its choices) and free their blocks; idempotent. Returns True
        when no choice of the request is left."""
        return self._requests.abort(key, choices)

    def knows(self, key: RequestKey) -> bool:
        """True if the request still has unfinished choices."""
        return self._requests.knows(key)

    def waits(self, key: RequestKey) -> bool:
        """True if the request is here and none of its choices is in the running batch."""
        return self._requests.waits(key)

    def num_prompt_rows(self, key: RequestKey) -> int:
        """Number of computed prompt rows, in the choice that got furthest; 0 if the request is not
        here."""
        return self._requests.num_prompt_rows(key)

    # --- blocks that others read or fill ---

    def keep_finished_rows(self) -> None:
        """From now on, full blocks of sequences that end stay owned. The reader of
        `StepResult.finished` owns them."""
        self._collector.keeps_finished_rows = True

    def release_held(self, key: RequestKey) -> None:
        """Free the blocks of a held prompt; idempotent."""
        self._collector.release_held(key)

    def reserve(
        self,
        request: Request,
        starts: tuple[Start, ...],
        num_blocks: int | None = None,
        keeps_room: bool = False,
        may_use: Callable[[Home], bool] = lambda home: True,
    ) -> Reservation | None:
        """See `Reservations.reserve`."""
        self._require_whole()
        return self._reservations.reserve(request, starts, num_blocks, keeps_room, may_use)

    def join(self, reservation: Reservation) -> None:
        """Let the choices of a reservation continue after their forced tokens. All its rows must be
        in place."""
        self._require_whole()
        self._reservations.join(reservation)

    def cancel_reservation(
        self, reservation: Reservation, settled: bool, num_filled: int = 0
    ) -> list[int]:
        """Give a reservation back. The first num_filled blocks of its destination hold their rows
        and stay cached. If settled is False, the other blocks go to quarantine and are returned.
        """
        return self._reservations.cancel(reservation, settled, num_filled)

    # --- the step ---

    def step(self, is_patient: bool = True) -> StepResult:
        """Queue steps until enough are in flight, then complete the oldest one. The result is empty
        when nothing can run. If a step raises, the engine is half-advanced: until `reset`, every
        call raises RuntimeError.

        is_patient: False also gives an empty result, with `spare_s`, while a request that comes
        could still be queued behind the step in flight. A patient call would see it only later.
        """
        with self._stepping():
            self.steps.fill()
            if not is_patient and (spare_s := self.steps.spare_s()) > LEAST_SPARE_S:
                return StepResult(spare_s=spare_s)
            oldest = self.steps.take()
            result = self._collector.collect(oldest) if oldest is not None else StepResult()
            self.steps.sample_late()
            if self.pace is not None:
                if result.num_rows:
                    self.pace.collected(result.device_seconds)
                goes_on = result.num_rows and self.scheduler.has_work
                if not self.steps.in_flight and not goes_on:
                    self.pace.in_flight.rested()
            return result

    def send_held(self) -> None:
        """Send a step that the last call of `step` held back, so that its tokens would not wait for
        launches. Call it when the tokens are out; the next `step` does it otherwise."""
        if self.steps.is_held:
            with self._stepping():
                self.steps.send_held()

    def reset(self) -> None:
        """Forget all requests, held prompts and cached content, in whatever state an interruption
        left them. Rows of a step that did not end may never have been written. This call may itself
        be interrupted and repeated. AssertionError while a reservation is out, because a transfer
        may still write into its blocks.
        """
        num_out = self._reservations.num_out
        assert not num_out, f"{num_out} reservations are out: cannot reset"
        self._is_torn = True
        self.homes.withdraw_written()
        self.executor.reset()
        self.steps.clear()
        self._requests.clear()
        self._collector.held.clear()
        self.scheduler.reset()
        if self.pace is not None:
            self.pace.reset()
        for home in self.homes:
            home.blocks.reset()
        self._is_torn = False

    def close(self) -> None:
        """Wait for the device; after that, the KV cache may be unregistered and freed. The engine
        serves nothing from now on.
        """
        self._is_torn = True
        self.executor.close()

    def _require_whole(self) -> None:
        if self._is_torn:
            raise RuntimeError("a step of this engine failed, or it is closed: make another one")

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """An error inside leaves the engine half-advanced."""
        self._require_whole()
        self._is_torn = True
        self.step_clock.start()
        try:
            yield
        finally:
            self.step_clock.stop()
        self._is_torn = False

    def check_integrity(self, others: Iterable[tuple[int, list[int]]] = ()) -> None:
        """AssertionError when blocks, owners and queues disagree. For tests and for idle moments.
        others: the blocks of reservations and of finished rows, each with its home."""
        self.scheduler.check_integrity()
        held = [(held.home, list(held.block_ids)) for held in self._collector.held.values()]
        owners = [*self._requests.block_tables(), *held, *others]
        for home in self.homes:
            home.blocks.check_integrity(
                [blocks for number, blocks in owners if number == home.number]
            )
