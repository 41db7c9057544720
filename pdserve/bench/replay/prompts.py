"""Makes the prompts of a trace as token ids: equal hash ids become equal blocks, so that prefixes
are really shared.

The tokens of a block follow from (seed, window, hash id) alone, and are the same on every machine:
they are drawn from SHAKE-128 of these three. Another window has other blocks, so that a server's
caches are cold at its start. Knows no server. Called by send.py.
"""

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np

from pdserve.bench.replay.trace_lines import BLOCK_TOKENS, TraceRequest
from pdserve.bench.replay.window import Window


class Prompts:
    """Makes the prompts of the window with this name, of token ids below vocab_size.

    Prompts that the trace itself holds do not depend on the window.
    """

    def __init__(self, seed: int, window: str, vocab_size: int) -> None:
        self._key = f"{seed}/{window}"
        self._vocab_size = vocab_size

    def prompt(self, request: TraceRequest, index: int) -> str | list[int]:
        """Returns the prompt to send: text if the trace has text, else request.input_length token
        ids.

        `index` is the request's place in the trace. Prompts without hash ids share nothing, and the
        index makes them different.
        """
        if isinstance(request.prompt, str):
            return request.prompt
        if request.prompt is not None:
            return list(request.prompt)
        if request.hash_ids is None:
            return self._tokens(f"request {index}", request.input_length)
        tokens: list[int] = []
        for hash_id in request.hash_ids:
            length = min(BLOCK_TOKENS, request.input_length - len(tokens))
            tokens += self._tokens(f"block {hash_id}", length)
        return tokens

    def _tokens(self, what: str, length: int) -> list[int]:
        """Returns the first `length` tokens of the endless row that belongs to `what`."""
        drawn = hashlib.shake_128(f"{self._key}/{what}".encode()).digest(8 * length)
        return (np.frombuffer(drawn, dtype="<u8") % self._vocab_size).tolist()


def shareable_tokens(window: Window) -> int | None:
    """Returns the prompt tokens that an endless cache would already hold, if it is empty at the
    start.

    Each request is taken to come after the previous ones have ended. Returns None if the trace
    itself holds prompts.
    """
    if any(request.prompt is not None for request in window.requests):
        return None
    seen: dict[Hashable, int] = {}
    return sum(_seen_tokens(request, seen) for request in window.requests)


def _seen_tokens(request: TraceRequest, seen: dict[Hashable, int]) -> int:
    """Counts the request's leading tokens in `seen`, and adds the request to it.

    `seen` maps each prefix to the tokens of its last block.
    """
    count = 0
    goes_on = True
    for key, length in _prefixes(request):
        if goes_on:
            count += min(length, seen.get(key, 0))
            goes_on = seen.get(key, 0) == length == BLOCK_TOKENS
        seen[key] = max(length, seen.get(key, 0))
    return count


def _prefixes(request: TraceRequest) -> Sequence[tuple[Hashable, int]]:
    """Returns a key for each block and everything before it, with the block's tokens."""
    if request.hash_ids is None:
        return []
    prefix = 0
    keys: list[tuple[Hashable, int]] = []
    for at, hash_id in enumerate(request.hash_ids):
        length = min(BLOCK_TOKENS, request.input_length - at * BLOCK_TOKENS)
        prefix = hash((prefix, hash_id))
        keys.append((prefix, length))
    return keys
