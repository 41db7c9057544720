"""A worker's engine on paper: prompts and decodes share its steps, which are paced or not.

It knows how long a step takes (constants of one H200 with Llama-3.1-8B in bf16), when each
stream's next token is due, and which prompt is the most urgent. Blocks never run out, and tokens
have no values. Times are in milliseconds. `paper_cluster.PaperCluster` drives it for
`split_rule.py`.

    add (prompt) --> waiting --chunks--> first token --whole--> stream --> done
                                            '--------split--> handed over    join (stream) --> done
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from pdserve.protocol.events import PaceState

# From benchmarks/results/step-profile-h200.jsonl: 2,048 tokens of a prompt take 48.5 ms, of which
# 5.1 are attention, and 8,192 tokens take 232 ms. A decode step with 2,300 tokens per stream takes
# 4.1 ms + 0.056 per stream.
WEIGHTS_MS = 3.9
ROWS_PER_MS = 45.0
CONTEXT_MS = 0.056 / 2300  # per token to which a decode attends
ATTENDED_MS = 1.75e-6  # per token to which a prompt's row attends
MIXED_MS = 0.4  # added to a step with prompts, which is launched without a CUDA graph
STEP_ROWS = 8192
BLOCK = 512  # tokens of a trace's block
CACHED_BLOCKS = 1500  # 100 GB of rows

# pacing follows the rules of pdserve.engine that matter here
MARGIN = 0.95
EFFICIENT_ROWS = 64
MOST_STEPS = 8  # longest step with prompts, as a multiple of the TPOT, if streams have saved enough
YOUNG_TOKENS = 16
LATE_SHARE = 0.2
FLOOR_SHARE = 0.1


@dataclass(slots=True, eq=False)
class Request:
    """A request, and when its tokens came."""

    number: int
    arrived: float
    num_prompt_tokens: int
    num_tokens: int
    blocks: tuple[int, ...] = ()  # names of its prompt's BLOCKs
    first: float = 0.0  # time of the first token
    last: float = 0.0  # time of the last token
    num_made: int = 0
    gap: float = 0.0  # duration of its hand-off


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that waits or is computed."""

    request: Request
    splits: bool  # True: its stream continues at another worker
    done: int
    key: float  # latest start that keeps its promise

    @property
    def left(self) -> int:
        return self.request.num_prompt_tokens - self.done


class PrefixCache:
    """Keeps the trace's blocks that a worker holds. The least recently used block is dropped
    first."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_tokens(self, blocks: tuple[int, ...]) -> int:
        for index, block in enumerate(blocks):
            if block not in self._blocks:
                return index * BLOCK
        return len(blocks) * BLOCK

    def keep(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > CACHED_BLOCKS:
            self._blocks.popitem(last=False)


def step_ms(num_streams: int, context: float, rows: int = 0, attended: float = 0.0) -> float:
    products = math.hypot(WEIGHTS_MS, (rows + num_streams) / ROWS_PER_MS)
    mixed = MIXED_MS if rows else 0.0
    return products + CONTEXT_MS * context + ATTENDED_MS * attended + mixed


def rows_within(ms: float, num_streams: int, context: float, start: int) -> int:
    """Returns the number of prompt rows after `start` that fit into a step of `ms`."""
    least, most = 0, STEP_ROWS
    while least < most:
        rows = (least + most + 1) // 2
        if step_ms(num_streams, context, rows, rows * (start + rows / 2)) <= ms:
            least = rows
        else:
            most = rows - 1
    return least


@dataclass
class PaperWorker:
    """A worker's engine on paper."""

    name: str
    tpot_ms: float | None  # None: steps are not paced, and prompts are computed first and whole
    ttft_ms: float
    waiting: list[Prompt] = field(default_factory=list)
    streams: list[Request] = field(default_factory=list)
    cache: PrefixCache = field(default_factory=PrefixCache)
    _late_debt_ms: float = 0.0
    _floor_debt_ms: float = 0.0
    _start: float = 0.0  # context before a chunk, as a recent mean

    def add(self, request: Request, splits: bool) -> None:
        cached = min(self.cache.num_tokens(request.blocks), request.num_prompt_tokens - 1)
        own_ms = (request.num_prompt_tokens - cached) / ROWS_PER_MS
        latest = request.arrived + max(self.ttft_ms, 3 * own_ms) - own_ms
        self.waiting.append(Prompt(request, splits, cached, latest))

    def join(self, request: Request, now: float) -> None:
        """Adds a stream that was handed off."""
        request.gap = now - request.first
        self.cache.keep(request.blocks)
        self.streams.append(request)

    @property
    def queue_tokens(self) -> int:
        return sum(prompt.left for prompt in self.waiting)

    @property
    def context(self) -> float:
        return float(sum(r.num_prompt_tokens + r.num_made for r in self.streams))

    def pace(self) -> PaceState | None:
        if self.tpot_ms is None:
            return None
        held = MARGIN * self.tpot_ms
        count = len(self.streams)
        if not count:
            full = 2048 / step_ms(0, 0, 2048, 2048 * self._start)
            return PaceState(self.tpot_ms, 0.0, 1 / ROWS_PER_MS, 1000 * full)
        context = self.context
        base = step_ms(count, context)
        start = round(self._start)
        rows = rows_within(held, count, context, start)
        # a chunk that is large enough waits until there is slack for it
        speed = rows / held
        if rows < 2 * EFFICIENT_ROWS:
            chunk = 2 * EFFICIENT_ROWS
            over = step_ms(count, context, chunk, chunk * start) - held
            speed = chunk / (held + over * held / max(0.05 * held, held - base))
        speed = max(speed, FLOOR_SHARE * ROWS_PER_MS)
        return PaceState(self.tpot_ms, base, CONTEXT_MS * context / count, 1000 * speed)

    def plan(self, now: float) -> tuple[float, list[tuple[Prompt, int]]]:
        """Plans the next step. Returns its milliseconds, and the rows of each prompt in it."""
        chunks = self._chunks(now) if self.waiting else []
        attended = sum(rows * (prompt.done + rows / 2) for prompt, rows in chunks)
        rows = sum(rows for _, rows in chunks)
        return step_ms(len(self.streams), self.context, rows, attended), chunks

    def finish(
        self, now: float, chunks: list[tuple[Prompt, int]]
    ) -> tuple[list[Request], list[Prompt]]:
        """Ends a step. Returns the streams that ended, and the prompts that are computed."""
        for request in self.streams:
            request.num_made += 1
            request.last = now
        ended = [r for r in self.streams if r.num_made >= r.num_tokens]
        if ended:
            self.streams = [r for r in self.streams if r.num_made < r.num_tokens]
        computed = []
        for prompt, rows in chunks:
            self._start += 0.1 * (prompt.done + rows / 2 - self._start)
            prompt.done += rows
            if not prompt.left:
                self.waiting.remove(prompt)
                computed.append(prompt)
                request = prompt.request
                request.first = request.last = now
                request.num_made = 1
                self.cache.keep(request.blocks)
                if request.num_tokens == 1:
                    ended.append(request)
                elif not prompt.splits:
                    self.streams.append(request)
        return ended, computed

    def _chunks(self, now: float) -> list[tuple[Prompt, int]]:
        count = len(self.streams)
        waiting, late_first = self._order(now)
        if not count or self.tpot_ms is None:
            return _fill(waiting, STEP_ROWS)
        context = self.context
        allowed = self._allowed(now)
        rows = rows_within(allowed, count, context, waiting[0].done)
        base = step_ms(count, context)
        total = sum(prompt.left for prompt in waiting)
        if rows < min(EFFICIENT_ROWS, total):
            rows = 0
            if now > waiting[0].key:  # late prompts must not starve
                self._floor_debt_ms += FLOOR_SHARE * base
                chunk = min(2 * EFFICIENT_ROWS, total)
                cost = step_ms(count, context, chunk) - base
                if self._floor_debt_ms >= cost:
                    self._floor_debt_ms -= cost
                    rows = chunk
        chunks = _fill(waiting, min(rows, STEP_ROWS))
        if chunks:
            spent = sum(rows for _, rows in chunks) / ROWS_PER_MS
            self._late_debt_ms += (-1 if late_first else LATE_SHARE) * spent
        return chunks

    def _order(self, now: float) -> tuple[list[Prompt], bool]:
        """Returns the prompts in order. The most urgent one that can still keep its promise comes
        first, unless the share of late prompts is due."""
        if self.tpot_ms is None:
            return self.waiting, False
        good = sorted((p for p in self.waiting if p.key >= now or p.done), key=lambda p: p.key)
        late = [p for p in self.waiting if p.key < now and not p.done]
        if not late or not good:
            self._late_debt_ms = 0.0
            return good + late, False
        is_due = self._late_debt_ms > 0
        return (late + good, True) if is_due else (good + late, False)

    def _allowed(self, now: float) -> float:
        """Returns how long the step may take, by the time that all streams have saved."""
        assert self.tpot_ms is not None
        held = MARGIN * self.tpot_ms
        base = step_ms(len(self.streams), self.context)
        least = MOST_STEPS * held
        for request in self.streams:
            made = request.num_made
            left = request.num_tokens - made
            slack = request.first + held * made - now
            if made < YOUNG_TOKENS:  # the hand-off's gap is made up for over these tokens
                slack += request.gap * (1 - (made - 1) / YOUNG_TOKENS)
            if slack < base and base - slack > left * (held - base):
                continue  # its promise is lost
            least = min(least, slack)
        return least


def _fill(prompts: list[Prompt], rows: int) -> list[tuple[Prompt, int]]:
    chunks = []
    for prompt in prompts:
        if rows <= 0:
            break
        part = min(rows, prompt.left)
        chunks.append((prompt, part))
        rows -= part
    return chunks
