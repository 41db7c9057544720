"""The requests of an engine that have unfinished choices, and the sequences made for them.

Knows the scheduler, which runs the sequences. Knows no steps, and no blocks beyond those that a
finished sequence frees. An engine has one object of it; not thread-safe.
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
        """Take in a new request, after all that came before it."""
        assert request.key not in self._requests, f"{request.key} was submitted twice"
        assert not request.lacks_grammar, f"{request.key} comes before its grammar is built"
        self._requests[request.key] = request
        request.arrival = next(self._arrivals)

    def new_sequence(self, request: Request, start: Start) -> Sequence:
        """Make a sequence of the request that continues after the forced tokens of `start`."""
        tokens = [*request.prompt_token_ids, *start.forced]
        seq = Sequence(request, start.choice, tokens)
        if start.forced and start.first_ms_ago:
            seq.first_token_at = request.submitted_at - start.first_ms_ago / 1e3
        request.sequences.append(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        """End a sequence. The request ends with its last sequence."""
        self._scheduler.finish(seq)
        request = seq.request
        if all(s.status is Status.FINISHED for s in request.sequences):
            self._requests.pop(request.key, None)

    def abort(self, key: RequestKey, choices: tuple[int, ...] | None = None) -> bool:
        """Stop a request (or some of its choices) and free their blocks; idempotent. Returns True
        when no choice of the request is left."""
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
                # another choice takes over the prompt's computation
                seq.choice = kept[0]
                seq.pending_forks = kept[1:]
            else:
                seq.pending_forks = kept
        return key not in self._requests

    def knows(self, key: RequestKey) -> bool:
        """True if the request still has unfinished choices."""
        return key in self._requests

    def waits(self, key: RequestKey) -> bool:
        """True if the request is here and none of its choices is in the running batch."""
        request = self._requests.get(key)
        return request is not None and all(
            seq.status is not Status.RUNNING for seq in request.sequences
        )

    def num_prompt_rows(self, key: RequestKey) -> int:
        """Number of computed prompt rows, in the choice that got furthest; 0 if the request is not
        here."""
        request = self._requests.get(key)
        if request is None:
            return 0
        return min(request.num_prompt_tokens, max(seq.num_computed for seq in request.sequences))

    def block_tables(self) -> list[tuple[int, list[int]]]:
        """The home and the owned blocks of each sequence that owns some."""
        return [
            (seq.home, seq.owned_blocks)
            for request in self._requests.values()
            for seq in request.sequences
            if seq.block_table
        ]

    def clear(self) -> None:
        self._requests.clear()
