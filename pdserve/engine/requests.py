"""The requests of an engine that have unfinished choices, and the sequences made for them.

Knows the scheduler, which runs the sequences; no blocks beyond what finishing a sequence frees, and
no steps. One object an engine; not thread-safe.
"""

import itertools

from pdserve.engine.scheduling.scheduler import Scheduler
from pdserve.engine.scheduling.sequence import Request, Sequence, Status
from pdserve.protocol.commands import Start
from pdserve.protocol.request_key import RequestKey


class Requests:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._arrivals = itertools.count()
        self._requests: dict[RequestKey, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def register(self, request: Request) -> None:
        """Take a new request in, after all that came before it."""
        assert request.key not in self._requests, f"{request.key} was submitted twice"
        assert not request.lacks_grammar, f"{request.key} comes before its grammar is built"
        self._requests[request.key] = request
        request.arrival = next(self._arrivals)

    def new_sequence(self, request: Request, start: Start) -> Sequence:
        """A sequence of the request that goes on after the forced tokens of `start`."""
        tokens = [*request.prompt_token_ids, *start.forced]
        seq = Sequence(request, start.choice, tokens)
        if start.forced and start.first_ms_ago:
            seq.first_token_at = request.submitted_at - start.first_ms_ago / 1e3
        request.sequences.append(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        """End a sequence; with its last one the request is gone."""
        self._scheduler.finish(seq)
        request = seq.request
        if all(s.status is Status.FINISHED for s in request.sequences):
            self._requests.pop(request.key, None)

    def abort(self, key: RequestKey, choices: tuple[int, ...] | None = None) -> bool:
        """Stop a request (or some of its choices) and free their blocks; idempotent. True when the
        request is gone."""
        request = self._requests.get(key)
        if request is None:
            return True
        for seq in list(request.sequences):
            kept = (
                () if choices is None else tuple(c for c in seq.pending_forks if c not in choices)
            )
            if choices is None or (seq.choice in choices and not kept):
                self.finish(seq)
            elif seq.choice in choices:
                # another choice takes the prompt's computation over
                seq.choice = kept[0]
                seq.pending_forks = kept[1:]
            else:
                seq.pending_forks = kept
        return key not in self._requests

    def knows(self, key: RequestKey) -> bool:
        """Whether the request still has unfinished choices."""
        return key in self._requests

    def waits(self, key: RequestKey) -> bool:
        """Whether the request is here and none of its choices is in the running batch."""
        request = self._requests.get(key)
        return request is not None and all(
            seq.status is not Status.RUNNING for seq in request.sequences
        )

    def num_prompt_rows(self, key: RequestKey) -> int:
        """How many of the prompt's rows are computed, by the choice that got furthest; 0 when the
        request is not here."""
        request = self._requests.get(key)
        if request is None:
            return 0
        return min(request.num_prompt_tokens, max(seq.num_computed for seq in request.sequences))

    def block_tables(self) -> list[tuple[int, list[int]]]:
        """The home of each sequence that owns blocks, and these."""
        return [
            (seq.home, seq.owned_blocks)
            for request in self._requests.values()
            for seq in request.sequences
            if seq.block_table
        ]

    def clear(self) -> None:
        self._requests.clear()
