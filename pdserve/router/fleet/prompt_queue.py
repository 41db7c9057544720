"""Estimates how much work of prompts waits at a worker between two of its reports. Owned by
`router.fleet.worker_state`."""

from collections import deque

# What was sent this short before a worker read its commands may have been on its way. Through
# Serve, commands take 4 to 5 ms.
UNSEEN_S = 0.005
MAX_SENT = 4096  # sends that are remembered; a queue of which nobody reports forgets older ones


class PromptQueue:
    """Work of the prompts that wait at one worker (protocol.prompt_work), in tokens.

    Since the last report it is a bucket: what this router sends fills it, and it drains at the
    worker's speed. Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at = 0.0
        self._sent: deque[tuple[float, float]] = deque(maxlen=MAX_SENT)

    def reported(self, num_tokens: float, now: float, unread_s: float = 0.0) -> None:
        """Takes in a report. `unread_s`: seconds since the worker had read its commands."""
        self._forget_seen(now - unread_s)
        self._tokens = num_tokens + sum(tokens for _, tokens in self._sent)
        self._at = now

    def sent(self, num_tokens: float, now: float, tokens_per_s: float) -> None:
        self._tokens = self.left(now, tokens_per_s) + num_tokens
        self._at = now
        self._sent.append((now, num_tokens))

    def left(self, now: float, tokens_per_s: float) -> float:
        """Returns the number of tokens that still wait."""
        return max(0.0, self._tokens - (now - self._at) * tokens_per_s)

    def _forget_seen(self, read_at: float) -> None:
        while self._sent and self._sent[0][0] < read_at - UNSEEN_S:
            self._sent.popleft()
