"""Drives an Engine by hand, and a runner on paper that stands in for model and KV cache.

`PaperRunner` keeps, instead of KV, which prefix each row of the KV cache was computed for, and
checks on every step that a sequence reads exactly its own rows and writes into no block that others
own. Rows move only when the engine completes the step: a device that lags as far as it can. Its
logits are a function of the whole prefix, so what a request must generate is known without any
batch (`alone`).
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.build import build_engine
from pdserve.engine.engine import Engine
from pdserve.engine.execution.model_runner import StepOutput
from pdserve.engine.execution.step_inputs import table_changes
from pdserve.engine.sampling.sample_rows import SampleRow
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.engine.step_result import StepResult
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta, PromptScored, TokenLogprob
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

_names = itertools.count()


def make_engine(folder: Path | str, **config: Any) -> Engine:
    values = {"device": "cpu", "num_kv_blocks": 64, **config}
    return build_engine(ModelConfig(path=str(folder)), EngineConfig(**values))


def paper_engine(folder: Path | str, **config: Any) -> Engine:
    engine = make_engine(folder, **config)
    put_on_paper(engine)
    return engine


def put_on_paper(engine: Engine) -> None:
    engine.runner = PaperRunner(engine)  # type: ignore[assignment]  # all that an engine calls, and no more


def paper_of(engine: Engine) -> "PaperRunner":
    assert isinstance(engine.runner, PaperRunner)
    return engine.runner


def submit_of(prompt: SequenceOf[int], sampling: SamplingParams, **more: Any) -> Submit:
    more.setdefault("starts", tuple(Start(choice) for choice in range(sampling.n)))
    more.setdefault("phase", "full")
    key = RequestKey("test", 0, str(next(_names)))
    return Submit(key=key, prompt_token_ids=tuple(prompt), sampling=sampling, **more)


class Driver:
    """Submits requests and gathers what the engine says about them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[tuple[RequestKey, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[RequestKey, int], str] = {}
        self.scored: dict[RequestKey, list[PromptScored]] = defaultdict(list)
        self.held: list[Any] = []

    def add(self, prompt: SequenceOf[int], sampling: SamplingParams, **more: Any) -> RequestKey:
        submit = submit_of(prompt, sampling, **more)
        for start in submit.starts:
            self.tokens[submit.key, start.choice] += start.forced
        self.engine.add(self.engine.make_request(submit), submit.starts)
        return submit.key

    def step(self) -> StepResult:
        result = self.engine.step()
        for key, event in result.events:
            if isinstance(event, PromptScored):
                self.scored[key].append(event)
            elif isinstance(event, Delta):
                self._take(key, event)
        self.held += result.held
        return result

    def _take(self, key: RequestKey, delta: Delta) -> None:
        tokens = self.tokens[key, delta.choice]
        assert delta.position == len(tokens), "a token was lost or came twice"
        assert (key, delta.choice) not in self.reasons, "a token behind the end"
        tokens += delta.token_ids
        if delta.finish_reason:
            self.reasons[key, delta.choice] = delta.finish_reason

    def run(self, max_steps: int = 5000, check: bool = True) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
            if check:
                self.engine.check_integrity()
        raise AssertionError(f"still busy after {max_steps} steps")

    def assert_empty(self) -> None:
        self.engine.check_integrity()
        assert not self.engine.has_work
        assert self.engine.blocks.num_free == self.engine.blocks.num_usable


Work = Callable[[np.ndarray], None]
"""Reads and writes the rows of the KV cache that it is given, `[blocks, block_size]`."""


class PaperFence:
    """A step of the paper model: its rows are read and written when somebody waits for it, as late
    as a device may."""

    def __init__(self, work: list[Work], rows: np.ndarray) -> None:
        self._work: list[Work] | None = work
        self._rows = rows

    def ready(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        self.play(self._rows)
        self._work = None

    def play(self, rows: np.ndarray) -> None:
        """Do what is left to do, on these rows."""
        for work in self._work or ():
            work(rows)

    def seconds_since(self, earlier: "PaperFence") -> float:
        return 0.0


class PaperRunner:
    def __init__(self, engine: Engine) -> None:
        self.blocks = engine.blocks
        self.block_size = engine.config.block_size
        self.vocab_size = engine.spec.vocab_size
        self.ops = engine.runner.ops
        self.kv_cache = engine.kv_cache
        self.rows = np.full((engine.blocks.num_blocks, self.block_size), -1, dtype=np.int64)
        self.plans: list[dict[Sequence, int]] = []
        self.num_copies = 0
        # by slot, from the changes a step sends
        self.tables: dict[int, list[int]] = defaultdict(list)
        self.last_token: dict[int, int] = {}
        self._queue: list[Work] = []
        self._fences: list[PaperFence] = []

    def execute(self, plan: StepPlan, siblings: SequenceOf[SequenceOf[Sequence]]) -> StepOutput:
        self.plans.append(dict(plan.num_tokens))
        self.num_copies += len(plan.copies)
        self._queue.append(functools.partial(self._copy, list(plan.copies)))
        self._sync(plan, siblings)
        hidden: list[int] = []
        first_row = {}
        for seq, count in plan.num_tokens.items():
            tokens = seq.token_ids[: seq.num_computed]
            if seq.num_computed > len(tokens):
                tokens = [*tokens, self.last_token[seq.slot]]
            digests = prefix_digests(tokens)
            first_row[seq] = len(hidden)
            hidden += digests[-count:]
            self._queue.append(
                functools.partial(self._compute, list(self.tables[seq.slot]), digests, count)
            )
        last = [
            first_row[members[0]] + plan.num_tokens[members[0]] - 1
            for members in siblings
            for _ in members
        ]
        slots = [member.slot for members in siblings for member in members]
        states = torch.tensor(hidden, dtype=torch.int64)
        return StepOutput(
            states, first_row, self.logits(states, last), torch.tensor(slots, dtype=torch.int32)
        )

    def feed_back(self, output: StepOutput, token_ids: Tensor) -> None:
        self.last_token.update(zip(output.sample_slots.tolist(), token_ids.tolist(), strict=True))

    def fence(self) -> PaperFence:
        queue = self._queue
        self._queue = []
        fence = PaperFence(queue, self.rows)
        self._fences = [*(f for f in self._fences if not f.ready()), fence]
        return fence

    def synchronize(self) -> None:
        """Everything that was queued moves now, in order."""
        self.fence()
        for fence in self._fences:
            fence.wait()

    def rows_when_done(self) -> np.ndarray:
        """The KV cache as it will be when everything that is queued has been done."""
        rows = self.rows.copy()
        for fence in self._fences:
            fence.play(rows)
        return rows

    def fill(self, blocks: SequenceOf[int], prompt: SequenceOf[int], first_block: int = 0) -> None:
        """Write the prompt's rows as another engine would."""
        for position, digest in enumerate(prefix_digests(prompt)):
            index = position // self.block_size - first_block
            if index >= 0:
                self.rows[blocks[index], position % self.block_size] = digest

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        if not rows:
            return torch.empty(0, self.vocab_size)
        return torch.stack(
            [prefix_logits(digest, self.vocab_size) for digest in hidden[rows].tolist()]
        )

    def _sync(self, plan: StepPlan, siblings: SequenceOf[SequenceOf[Sequence]]) -> None:
        changes = table_changes(
            [*plan.num_tokens, *(seq for members in siblings for seq in members)]
        )
        for slot, index, block in changes.T.tolist() if changes is not None else ():
            table = self.tables[slot]
            table[index : index + 1] = [block]
            assert table[index] == block, "a table has a hole"
            if index == 0:
                del table[1:]
        # choices that fork off here share the blocks
        widths = {members[0]: len(members) for members in siblings}
        for seq, count in plan.num_tokens.items():
            for position in range(seq.num_computed - count, seq.num_computed):
                block = seq.block_table[position // self.block_size]
                assert self.blocks.num_owners(block) == widths.get(seq, 1), (
                    "writes a block that is not its own"
                )

    def _copy(self, copies: list[tuple[int, int]], rows: np.ndarray) -> None:
        for source, target in copies:
            assert not self.blocks.is_free(target), "copies into a block that is free meanwhile"
            rows[target] = rows[source]

    def _compute(self, table: list[int], digests: list[int], count: int, rows: np.ndarray) -> None:
        """A sequence reads the rows before its chunk, and writes those of the chunk, through the
        table it was given."""
        for position in range(len(digests) - count, len(digests)):
            block = table[position // self.block_size]
            assert not self.blocks.is_free(block), "writes a block that is free meanwhile"
            rows[block, position % self.block_size] = digests[position]
        assert rows[table].reshape(-1)[: len(digests)].tolist() == digests, "reads foreign rows"


class KnownContent:
    """The rows that each digest of a block stands for, noted when the engine's hasher makes the
    digest."""

    def __init__(self, engine: Engine) -> None:
        self._runner = paper_of(engine)
        self._blocks = engine.blocks
        self._rows: dict[bytes, list[int]] = {}
        self._size = engine.hasher.block_size
        self._extend = engine.hasher.extend
        engine.hasher.extend = self._noted  # type: ignore[method-assign]

    def check(self) -> None:
        """AssertionError when a block holds other rows than those it can be found by, once all that
        is queued is done.
        """
        rows = self._runner.rows_when_done()
        for digest, block in self._blocks._block_of.items():
            assert rows[block].tolist() == self._rows[digest], (
                f"block {block} is cached as what it does not hold"
            )

    def _noted(self, hashes: list[bytes], tokens: SequenceOf[int], salt: str) -> None:
        first = len(hashes)
        self._extend(hashes, tokens, salt)
        if len(hashes) > first:
            rows = prefix_digests(tokens[: len(hashes) * self._size])
            for index in range(first, len(hashes)):
                self._rows[hashes[index]] = rows[index * self._size : (index + 1) * self._size]


def prefix_digests(tokens: SequenceOf[int]) -> list[int]:
    return list(itertools.accumulate(tokens, _extend, initial=1))[1:]


def _extend(digest: int, token: int) -> int:
    return (digest * 6364136223846793005 + token * 1442695040888963407 + 7) % (1 << 61)


@functools.lru_cache(maxsize=20_000)
def prefix_logits(digest: int, vocab_size: int) -> Tensor:
    return (
        torch.from_numpy(
            np.random.default_rng(digest).standard_normal(vocab_size, dtype=np.float32)
        )
        * 4
    )


def alone(
    engine: Engine,
    prompt: SequenceOf[int],
    sampling: SamplingParams,
    choice: int = 0,
    forced: SequenceOf[int] = (),
) -> list[int]:
    """What the paper model generates for one choice, computed without engine, batch or blocks."""
    tokens = [*prompt, *forced]
    digest = prefix_digests(tokens)[-1]
    request = engine.make_request(submit_of(prompt, sampling))
    vocab = engine.spec.vocab_size
    sampler = Sampler(engine.runner.ops, vocab, 1, vocab, torch.device("cpu"))
    while True:
        row = SampleRow(
            sampling,
            choice,
            1,
            len(tokens) - len(prompt),
            tokens,
            len(prompt),
            request.stop_token_ids,
        )
        sampler.release(1)
        [sampled] = sampler.sample(
            prefix_logits(digest, engine.spec.vocab_size)[None], [row]
        ).fetch()
        tokens.append(sampled.token_id)
        digest = _extend(digest, sampled.token_id)
        generated = len(tokens) - len(prompt)
        stops = sampled.token_id in request.stop_token_ids and generated > sampling.min_tokens
        if stops or generated >= request.max_tokens:
            return tokens[len(prompt) :]


def logprob_of(entry: TokenLogprob | None) -> float:
    assert entry is not None
    return entry.logprob
