"""Requests whose prompts share prefixes, and the prompt tokens that one ideal cache would leave to
compute.

- trace: A recorded trace, scaled down. 512 of its tokens become one KV block, so equal hash ids
  stay equal blocks, and an answer of 149 tokens becomes one of 5.
- hot: A few long prefixes. Many requests ask for each at the same time, in bursts.

This module is pure arithmetic and knows no server. cluster/prefixes.py uses it.
"""

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.bench.replay.prompts import Prompts
from pdserve.bench.replay.trace_lines import BLOCK_TOKENS, TraceRequest

KV_BLOCK = 16
"""Tokens of a KV block. One block of a trace becomes one KV block."""
SCALE = BLOCK_TOKENS // KV_BLOCK
MAX_BLOCKS = 118
"""Largest number of blocks of a prompt. Longer prompts are cut, because the demo model has 2,048
positions."""
MAX_ANSWER = 128
FIRST_TOKEN, VOCAB = 100, 1500  # ids of plain tokens of the demo model


@dataclass(frozen=True)
class Ask:
    """One request: the ids of its prompt, and the number of tokens of its answer."""

    prompt: list[int]
    num_answer: int


def traced(requests: Sequence[TraceRequest], one_in: int, seed: int) -> list[Ask]:
    """Returns the trace's requests in order, scaled down.

    - one_in: Only conversations whose first hash id is a multiple of it are kept, each of them
      whole.

    Raises ValueError if the trace has no hash ids, or if none of its requests is kept.
    """
    prompts = Prompts(seed, "prefixes", VOCAB)
    asks = []
    for index, request in enumerate(requests):
        if not request.hash_ids:
            raise ValueError(
                f"request {index} of the trace has no hash ids: name a trace in Mooncake's format"
            )
        if request.hash_ids[0] % one_in == 0:
            asks.append(_scaled(prompts.prompt(request, index), request))
    if not asks:
        raise ValueError(f"--one-in {one_in} keeps no request of the trace: lower it")
    return asks


def _scaled(prompt: str | list[int], request: TraceRequest) -> Ask:
    """Keeps the first KV_BLOCK tokens of each whole block, and the same share of the last one."""
    assert not isinstance(prompt, str), "hash ids make token ids"
    length = min(max(2, -(-request.input_length // SCALE)), MAX_BLOCKS * KV_BLOCK)
    starts = range(0, len(prompt), BLOCK_TOKENS)
    tokens = itertools.chain.from_iterable(prompt[at : at + KV_BLOCK] for at in starts)
    answer = min(max(1, request.output_length // SCALE), MAX_ANSWER)
    return Ask(list(tokens)[:length], answer)


def hot(num_prefixes: int, at_once: int, num_rounds: int, seed: int) -> list[list[Ask]]:
    """Returns bursts of requests to send at the same time.

    The first burst asks once for every prefix of 64 blocks. Each later burst is `at_once` requests
    for one prefix. The prefixes take turns, `num_rounds` times. Every prompt ends with two blocks
    of its own, and every answer has 32 tokens.
    """
    rng = random.Random(seed)

    def tokens(num_blocks: int) -> list[int]:
        return rng.choices(range(FIRST_TOKEN, VOCAB), k=num_blocks * KV_BLOCK)

    prefixes = [tokens(64) for _ in range(num_prefixes)]

    def ask(prefix: list[int]) -> Ask:
        return Ask(prefix + tokens(2), 32)

    bursts = [[ask(prefix) for _ in range(at_once)] for prefix in prefixes * num_rounds]
    return [[ask(prefix) for prefix in prefixes], *bursts]


def working_set(asks: Iterable[Ask]) -> int:
    """Returns the number of different whole KV blocks of all prompts. A block is counted together
    with all blocks before it."""
    return len({block for ask in asks for block in _blocks(ask.prompt)})


def ideal_computed(asks: Iterable[Ask], num_blocks: int) -> int:
    """Returns the prompt tokens that one engine computes if it answers the requests one after
    another with an LRU cache of `num_blocks` KV blocks. As in an engine, only whole blocks are
    found, the last token of a prompt is always computed, and a prompt's end is evicted before its
    beginning."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_computed = 0
    for ask in asks:
        blocks = _blocks(ask.prompt)
        findable = blocks[: (len(ask.prompt) - 1) // KV_BLOCK]
        found = len(list(itertools.takewhile(cache.__contains__, findable)))
        num_computed += len(ask.prompt) - found * KV_BLOCK
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_computed


def _blocks(prompt: Sequence[int]) -> list[int]:
    """Returns a name for each whole block together with all blocks before it."""
    names = []
    name = 0
    for end in range(KV_BLOCK, len(prompt) + 1, KV_BLOCK):
        name = hash((name, *prompt[end - KV_BLOCK : end]))
        names.append(name)
    return names
