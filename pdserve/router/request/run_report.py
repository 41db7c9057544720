"""Reports on one prompt when it has ended: its timeline, its line in the log, its part of the
call's trace, and whether it met the SLO.

Reads the record, the clock and the timeline; changes none of them, and knows no workers.
`router.request.request_run` keeps one per prompt.
"""

import logging
import time

import msgspec

from pdserve.router.fleet.prefix_index import PromptBlocks
from pdserve.router.request.job import Dispatcher, Job
from pdserve.router.request.record import RequestRecord
from pdserve.router.request.request_clock import RequestClock
from pdserve.router.request.request_log import log_of
from pdserve.router.request.timeline import PromptTimeline, Timeline
from pdserve.router.request.traces.call_trace import PromptEnd
from pdserve.router.times import parts_of_time, rounded

timeline_logger = logging.getLogger("pdserve.timeline")


class RunReport:
    def __init__(
        self,
        dispatcher: Dispatcher,
        job: Job,
        prompt: PromptBlocks,
        record: RequestRecord,
        clock: RequestClock,
        timeline: Timeline,
    ) -> None:
        self._shared = dispatcher
        self._job = job
        self._prompt = prompt
        self._record = record
        self._clock = clock
        self._timeline = timeline

    def timeline(self) -> PromptTimeline:
        """Says where time and bytes went so far."""
        clock = self._clock
        timeline = self._timeline
        total_s = (time.perf_counter() if clock.ended is None else clock.ended) - clock.started
        _, rest = parts_of_time(total_s, 0.0, timeline.times)
        rest = rounded(max(0.0, rest))
        return PromptTimeline(
            request_id=self._job.request_id,
            prompt=self._job.prompt,
            outcome=clock.outcome,
            prompt_tokens=self._prompt.num_tokens,
            cached_tokens=self._record.cached_tokens or 0,
            generated_tokens=self._record.num_tokens,
            admission_s=rounded(self._admission_s),
            first_token_s=None if clock.first_token_s is None else rounded(clock.first_token_s),
            total_s=rounded(total_s),
            transport_s=rest if timeline.complete else None,
            unreported_s=None if timeline.complete else rest,
            failovers=len(timeline.failovers),
            legs=timeline.legs(clock.started),
        )

    def served(self, alone: bool) -> None:
        """Counts the time of an answer whose last byte is out.

        `alone` is True for the call's only prompt; several prompts share their time.
        """
        if self._record.finished:
            timeline = self._timeline
            total_s = time.perf_counter() - self._job.received
            self._shared.metrics.e2e.observe(total_s)
            if alone:
                self._shared.metrics.took(
                    total_s, self._admission_s, timeline.times, timeline.complete
                )

    def judge(self, outcome: str) -> None:
        """Counts whether the run, which has ended, met the SLO."""
        clock = self._clock
        assert clock.ended is not None
        first_s = None if clock.first_token_s is None else self._admission_s + clock.first_token_s
        elapsed_s = clock.ended - self._job.received
        self._shared.goodput.ended(
            outcome, elapsed_s, first_s, clock.worst_tpot_s, self._record.num_tokens
        )

    def tell(self) -> None:
        """Reports the run, which has ended, to the logs that want it and to its trace."""
        level = logging.INFO if self._timeline.is_troubled else logging.DEBUG
        wanted = self._shared.request_log.wanted
        shown = timeline_logger.isEnabledFor(level)
        trace = self._job.trace
        if not wanted and not shown and trace is None:
            return
        request_id = self._job.request_id
        report = self.timeline()
        reasons = [choice.finish_reason for choice in self._record.choices]
        if trace is not None:
            failovers = tuple(self._timeline.failovers)
            trace.prompt_ended(PromptEnd(report, self._clock.started, tuple(reasons), failovers))
        if wanted:
            self._shared.request_log.ended(report, reasons, self._clock.tpot_s)
        if shown:
            text = msgspec.json.encode(report).decode()
            log_of(timeline_logger, level, request_id, "timeline of %s: %s", request_id, text)

    @property
    def _admission_s(self) -> float:
        return self._clock.started - self._job.received
