"""Estimates how much work of prompts waits at a worker between two of its reports. Owned by
`router.fleet.worker_state`."""

from pdserve.protocol.request_key import LegName

# A prompt counts as read if the worker has read commands so much later than it was sent, whatever
# became of it.
UNREAD_S = 5.0
MAX_UNREAD = 4096  # prompts of which the worker has told nothing; older ones are forgotten


class PromptQueue:
    """Work of the prompts that wait at one worker (protocol.prompt_work), in tokens.

    Since the last report it is a bucket: what this router sends fills it, and it drains at the
    worker's speed. A report counts the prompts that the worker has read. Those that it has not read
    are added, so each counts once. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at = 0.0
        self._unread: dict[LegName, tuple[float, float]] = {}

    def reported(self, num_tokens: float, now: float, unread_s: float = 0.0) -> None:
        """Takes in a report. `unread_s`: seconds since the worker had read its commands."""
        self._forget(now - unread_s - UNREAD_S)
        self._tokens = num_tokens + sum(tokens for _, tokens in self._unread.values())
        self._at = now

    def add(self, num_tokens: float, now: float, tokens_per_s: float) -> None:
        """Adds work of which no report tells."""
        self._tokens = self.left(now, tokens_per_s) + num_tokens
        self._at = now

    def sent(self, leg: LegName, num_tokens: float, now: float, tokens_per_s: float) -> None:
        """Adds a leg's prompt, which the worker has not read yet."""
        self.add(num_tokens, now, tokens_per_s)
        self._unread[leg] = now, num_tokens
        if len(self._unread) > MAX_UNREAD:
            del self._unread[next(iter(self._unread))]

    def read(self, leg: LegName) -> None:
        """Notes that the worker has read the leg's prompt. Called for every event of a leg."""
        self._unread.pop(leg, None)

    def ended(self, leg: LegName) -> None:
        """Takes out the leg's prompt if the worker has not read it: then it never computes it."""
        _, num_tokens = self._unread.pop(leg, (0.0, 0.0))
        self._tokens = max(0.0, self._tokens - num_tokens)

    def left(self, now: float, tokens_per_s: float) -> float:
        """Returns the number of tokens that still wait."""
        return max(0.0, self._tokens - (now - self._at) * tokens_per_s)

    def _forget(self, sent_before: float) -> None:
        for leg, (at, _) in list(self._unread.items()):
            if at >= sent_before:
                return
            del self._unread[leg]
