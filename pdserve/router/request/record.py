"""The request record: the only authority on which tokens a request has.

Every Submit of the request (a leg) has its own number, and messages of a leg that is no longer live
are dropped. The token at a position is the first one accepted for it. Accepted tokens go to the
next leg as forced tokens. A prompt's log-probabilities are kept as they came, as msgpack. Pure
bookkeeping: knows no workers, no text and no time. Owned by `router.request.request_run`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from pdserve.protocol.commands import Start
from pdserve.protocol.events import Delta, Embedded, PackedScores, TokenLogprob
from pdserve.protocol.request_key import FinishReason


class LegError(Exception):
    """A leg has failed: its message contradicts its earlier ones, so one was lost."""


@dataclass(slots=True)
class ChoiceRecord:
    """One choice. `stop_reason` is the stop token's id, or the stop string, that ended it."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Accepted(msgspec.Struct, frozen=True):
    """The new part of a Delta. `logprobs` has one entry per token, or is empty if none were asked
    for."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: int | None


class RequestRecord:
    def __init__(self, n: int, wants_logprobs: bool = False) -> None:
        self.choices = [ChoiceRecord() for _ in range(n)]
        self.cached_tokens: int | None = None
        self.is_scored = False  # all log-probabilities of the prompt are here
        self.num_score_bytes = 0
        self.embedded: bytes | None = None  # the hidden row of a prompt to embed
        self._wants_logprobs = wants_logprobs
        self._num_unfinished = n
        self._live: set[int] = set()
        self._last_leg = -1
        self._scores: list[PackedScores] = []
        self._num_scored = 0  # prompt tokens

    def open_leg(self) -> int:
        """Returns the number of a new leg, never used before."""
        self._last_leg += 1
        self._live.add(self._last_leg)
        return self._last_leg

    def close_leg(self, attempt: int) -> None:
        self._live.discard(attempt)

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def num_tokens_longest(self) -> int:
        """Number of tokens in the longest unfinished choice; 0 if all are finished."""
        return max(
            (len(choice.tokens) for choice in self.choices if choice.finish_reason is None),
            default=0,
        )

    def starts(self) -> tuple[Start, ...]:
        """Returns the unfinished choices, each with its accepted tokens."""
        return tuple(
            Start(i, tuple(c.tokens)) for i, c in enumerate(self.choices) if c.finish_reason is None
        )

    def accept(self, delta: Delta) -> Accepted | None:
        """Takes what is new in a Delta; returns None if it is stale or brings nothing.

        Raises LegError if it contradicts its leg.
        """
        if delta.attempt not in self._live:
            return None
        if not 0 <= delta.choice < len(self.choices):
            raise LegError(f"choice {delta.choice} does not exist")
        choice = self.choices[delta.choice]
        known = len(choice.tokens) - delta.position
        if choice.finish_reason is not None:
            return None
        if known < 0:
            raise LegError(
                f"choice {delta.choice}: position {delta.position} follows {len(choice.tokens)} "
                "tokens"
            )
        if delta.finish_reason is not None and len(delta.token_ids) < known:
            raise LegError(
                f"choice {delta.choice}: finished at an earlier position than its accepted tokens"
            )
        tokens = delta.token_ids[known:]
        if not tokens and delta.finish_reason is None:
            return None
        accepted = Accepted(
            delta.choice,
            tokens,
            self._logprobs_of(delta, known),
            delta.finish_reason,
            delta.stop_reason,
        )
        choice.tokens += tokens
        if delta.finish_reason is not None:
            self._finish(choice, delta.finish_reason, delta.stop_reason)
        return accepted

    def fill(self, choice: int) -> Accepted:
        """Ends an unfinished choice by length, as no worker has room for another token of it."""
        self._finish(self.choices[choice], "length", None)
        return Accepted(choice, (), (), "length", None)

    def stop(self, choice: int, stop_string: str, num_tokens: int) -> None:
        """Ends a choice at a stop string that matched within its first `num_tokens` tokens; later
        tokens are forgotten."""
        record = self.choices[choice]
        del record.tokens[num_tokens:]
        self._finish(record, "stop", stop_string)

    def score(self, scored: PackedScores) -> None:
        """Takes the prompt's log-probabilities, which may come in parts, and its cached tokens.

        Of the cached tokens the first report counts.
        """
        if scored.attempt not in self._live:
            return
        if self.cached_tokens is None:
            self.cached_tokens = scored.cached_tokens
        if not scored.num_tokens or self.is_scored:
            return
        if scored.start == 0:
            self.forget_scores()
            self._num_scored = 0
        if scored.start != self._num_scored:
            raise LegError(
                f"prompt log-probabilities from {scored.start} follow {self._num_scored}"
            )
        self._scores.append(scored)
        self._num_scored += scored.num_tokens
        self.num_score_bytes += scored.num_bytes
        self.is_scored = scored.final

    def embed(self, event: Embedded) -> bool:
        """Takes the prompt's hidden row, which finishes the request. True if it was new."""
        if event.attempt not in self._live or self.finished:
            return False
        self.cached_tokens = event.cached_tokens
        self.embedded = event.values
        self._finish(self.choices[0], "stop", None)
        return True

    def prompt_logprobs(self) -> Iterator[TokenLogprob | None] | None:
        """One log-probability per prompt token (None for the first); None before all are here.

        They are made only as far as somebody iterates; those of an event take a millisecond or two.
        """
        return (
            chain.from_iterable(map(PackedScores.entries, self._scores)) if self.is_scored else None
        )

    def forget_scores(self) -> None:
        """Frees the prompt's log-probabilities, which nobody needs any more."""
        self._scores = []
        self.num_score_bytes = 0

    def _finish(
        self, choice: ChoiceRecord, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        self._num_unfinished -= choice.finish_reason is None
        choice.finish_reason = reason
        choice.stop_reason = stop_reason

    def _logprobs_of(self, delta: Delta, known: int) -> tuple[TokenLogprob, ...]:
        if not self._wants_logprobs:
            return ()
        if delta.logprobs is None or len(delta.logprobs) != len(delta.token_ids):
            raise LegError(
                f"choice {delta.choice}: logprobs were asked for, but not one came per token"
            )
        return delta.logprobs[known:]
