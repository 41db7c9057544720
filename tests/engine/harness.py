"""Drives an Engine by hand, and an executor on paper that stands in for model and KV cache.

Instead of KV, `PaperExecutor` keeps for each row of the KV cache the prefix that it was computed
for. On every step it checks that the message fits the sequences, that a sequence reads exactly its
own rows, and that it writes into no block that others own. Rows move only when the engine completes
the step, as on a device that lags as far as it can. Its logits are a function of the whole prefix,
so what a request must generate is known without any batch (`alone`).
"""

import functools
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine.whole_sampler import WholeSampler
from support.paper_rows import PaperRows
from torch import Tensor

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.configs.router import SloConfig
from pdserve.engine.build import build_engine
from pdserve.engine.components import make_components
from pdserve.engine.engine import Engine
from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.sampling.rules.logit_rule import LogitRule
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.sampled_tokens import Sampled, SampledTokens, Scores
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.step_plan import StepPlan
from pdserve.engine.step_result import HomeSize, StepResult
from pdserve.engine.stepping.executor import Padding
from pdserve.engine.stepping.packing import Arrays, unpack
from pdserve.engine.stepping.planner import PlannedStep, sizes_of
from pdserve.engine.stepping.work import ForwardWork, HomeWork, SampleWork
from pdserve.parallel.bring_up import ALONE
from pdserve.protocol.block_digests import ContentPart, Tenant
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.events import Delta, PromptScored, TokenLogprob
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.protocol.start_progress import StartProgress

_names = itertools.count()


def make_engine(folder: Path | str, slo: SloConfig | None = None, **config: Any) -> Engine:
    values = {"device": "cpu", "num_kv_blocks": 64, **config}
    return build_engine(ModelConfig(path=str(folder)), EngineConfig(**values), slo=slo)


def paper_engine(
    folder: Path | str, num_homes: int = 1, slo: SloConfig | None = None, **config: Any
) -> Engine:
    """Make an engine, maybe of several homes. There is one rank, because paper needs no model."""
    engine = (
        make_engine(folder, slo, **config)
        if num_homes == 1
        else _of_homes(folder, num_homes, slo, config)
    )
    put_on_paper(engine)
    return engine


def _of_homes(
    folder: Path | str, num_homes: int, slo: SloConfig | None, config: dict[str, Any]
) -> Engine:
    num_seqs = config.get("max_num_seqs", 256)
    values = {"device": "cpu", "num_kv_blocks": 64, **config}
    values["max_num_seqs"] = num_homes * num_seqs  # for as many slots as all homes have
    model = ModelConfig(path=str(folder))
    parts = make_components(model, EngineConfig(**values), StartProgress(), ALONE)
    changes = {"data_parallel": num_homes, "max_num_seqs": num_seqs}
    most_rows, hidden_size = parts.config.max_num_batched_tokens, parts.spec.hidden_size
    pace = Pace.of(slo, most_rows, hidden_size) if slo is not None else None
    return Engine(replace(parts, config=parts.config.model_copy(update=changes)), pace)


def put_on_paper(engine: Engine) -> None:
    engine.steps.executor = PaperExecutor(engine)


class Place(NamedTuple):
    """Where a sequence stood when a step was planned. It may have ended when the step is sent."""

    slot: int
    num_computed: int


def held_at_random(engine: Engine) -> Engine:
    """Sends every second step, drawn by lot, only when the step before is collected, as an engine
    does whose tokens would have to wait."""
    draw = random.Random(0)

    def holds(step: PlannedStep) -> bool:
        return engine.steps.in_flight[0] is not step and draw.random() < 0.5

    engine.steps.delays_tokens = holds  # type: ignore[method-assign]
    return engine


def paper_of(engine: Engine) -> "PaperExecutor":
    assert isinstance(engine.executor, PaperExecutor)
    return engine.executor


def plan_step(engine: Engine, may_preempt: bool = False) -> PlannedStep:
    """The next step, planned and not forwarded."""
    plan = engine.scheduler.schedule(may_preempt)
    assert plan
    return engine._planner.plan(plan, engine.executor.padding(sizes_of(plan)))


def local(engine: Engine) -> LocalExecutor:
    assert isinstance(engine.executor, LocalExecutor)
    return engine.executor


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
        assert self.engine.homes.num_free_blocks == self.engine.homes.num_usable_blocks


Work = Callable[[PaperRows], None]
"""Reads and writes the rows of the KV cache that it is given."""


class PaperStep:
    """A step of the paper model: its rows are read and written when somebody waits for it, as late
    as a device may. logits, slots: of its samples."""

    def __init__(self, rows: PaperRows) -> None:
        self.logits = torch.empty(0)
        self.slots: list[int] = []
        self.work: list[Work] | None = []
        self.sampled: SampledTokens | None = None
        self.scored: list[Scores] = []
        self.last_rows: list[int] = []  # digests
        self._rows = rows

    def add(self, work: Work) -> None:
        """To be done after what was added before."""
        assert self.work is not None
        self.work.append(work)

    def ready(self) -> bool:
        return self.work is None

    def wait(self) -> None:
        self.play(self._rows)
        self.work = None

    def play(self, rows: PaperRows) -> None:
        """Do what is left to do, on these rows."""
        for work in self.work or ():
            work(rows)

    def seconds(self) -> float:
        return 0.0

    def samples(self) -> list[Sampled]:
        assert self.sampled is not None or not self.slots, "collected, but never sampled"
        return self.sampled.fetch() if self.sampled is not None else []

    def scores(self) -> list[list[TokenLogprob]]:
        return [scores.fetch() for scores in self.scored]

    def hidden(self) -> np.ndarray:
        """A row's digest stands for its hidden state."""
        return np.array(self.last_rows, dtype=np.float64)[:, None].astype(np.float32)


class PaperExecutor:
    """An executor on paper. rows: of all homes; a block's number counts those of earlier homes."""

    def __init__(self, engine: Engine) -> None:
        self._real = local(engine)
        self.sampler = self._real.sampler
        self.kv_cache = engine.kv_cache
        self.homes = engine.homes
        self.num_blocks = engine.homes[0].blocks.num_blocks  # of a home
        self.block_size = engine.config.block_size
        self.vocab_size = engine.spec.vocab_size
        self.rows = PaperRows(len(engine.homes) * self.num_blocks, self.block_size)
        self.plans: list[dict[Sequence, int]] = []
        self.num_copies = 0
        self.num_late = 0
        self.window: int | None = None  # as of a model all of whose layers have one
        # by slot, from the changes a step sends
        self.tables: dict[int, list[int]] = defaultdict(list)
        self.last_token: dict[int, int] = {}
        self.steps: list[PaperStep] = []  # that nobody waited for yet
        self._open: tuple[int, PaperStep] | None = None
        self._planned: dict[int, tuple[dict[Sequence, int], dict[Sequence, Place]]] = {}
        self._plan = engine._planner.plan
        engine._planner.plan = self._noted  # type: ignore[method-assign]

    def _noted(self, plan: StepPlan, padding: SequenceOf[Padding]) -> PlannedStep:
        """Note what a step's message is about, for the checks only."""
        chunks = {seq: chunk.num_rows for seq, chunk in plan}
        step = self._plan(plan, padding)
        self._check_owners(chunks, step)
        self._planned[step.forward.number] = (
            chunks,
            {seq: Place(seq.slot, seq.num_computed) for seq in chunks},
        )
        return step

    def padding(self, homes: SequenceOf[HomeSize]) -> list[Padding]:
        return self._real.padding(homes)

    def expert_load(self) -> dict[int, np.ndarray]:
        return {}

    def clear_expert_load(self) -> None: ...

    def forward(self, work: ForwardWork) -> PaperStep:
        assert self._open is None, "the step before lacks its samples"
        chunks, places = self._planned.pop(work.number)
        self.plans.append(chunks)
        step = PaperStep(self.rows)
        for number, part in enumerate(work.homes):
            own = {seq: count for seq, count in chunks.items() if seq.home == number}
            self._forward_home(number, part, own, places, step)
        assert len(step.slots) == work.num_samples
        self.num_late += work.is_late
        self.steps = [*(s for s in self.steps if not s.ready()), step]
        if work.num_samples:
            self._open = work.number, step
        return step

    def _forward_home(
        self,
        number: int,
        part: HomeWork,
        chunks: dict[Sequence, int],
        places: dict[Sequence, Place],
        step: PaperStep,
    ) -> None:
        """Do one home's part of the step. places: of the sequences when the step was planned."""
        first_block = number * self.num_blocks
        arrays = unpack(torch.from_numpy(part.packed), part.lengths)
        for copies in part.copies:
            pairs = [
                (first_block + source, first_block + target)
                for source, target in zip(
                    copies.sources.tolist(), copies.targets.tolist(), strict=True
                )
            ]
            self.num_copies += len(pairs)
            step.add(functools.partial(self._copy, pairs))
        self._update_tables(part, first_block)
        digests = torch.tensor(self._forward(chunks, places, arrays, step), dtype=torch.int64)
        assert part.logit_rows is not None, "no graph here, so the message says what samples"
        rows = part.logit_rows.rows.tolist()
        logits = self.logits(digests, rows)
        step.logits = torch.cat([step.logits.view(-1, self.vocab_size), logits])
        step.slots += part.logit_rows.slots.tolist()
        for scored in part.scores:
            rows = list(range(scored.first_row, scored.first_row + len(scored.targets)))
            logits = self.logits(digests, rows)
            step.scored.append(self.sampler.score(logits, scored.targets, scored.num_top))
        if part.hidden_rows is not None:
            step.last_rows += digests[torch.from_numpy(part.hidden_rows).long()].tolist()

    def sample(self, work: SampleWork) -> None:
        assert self._open is not None and self._open[0] == work.number
        step = self._open[1]
        self._open = None
        step.sampled = self.sampler.sample(step.logits, work.rows)
        tokens = step.sampled.token_ids.tolist()
        self.last_token.update(zip(step.slots, tokens, strict=True))

    def warm_prefill(self, num_rows: int) -> None: ...

    def close(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Everything that was queued moves now, in order."""
        self._open = None
        self._planned.clear()
        for step in self.steps:
            step.wait()

    def rows_when_done(self) -> PaperRows:
        """The KV cache as it will be when everything that is queued has been done."""
        rows = self.rows.copy()
        for step in self.steps:
            step.play(rows)
        return rows

    def fill(
        self, blocks: SequenceOf[int], prompt: SequenceOf[int], first_block: int = 0, home: int = 0
    ) -> None:
        """Write the prompt's rows as another engine would."""
        for position, digest in enumerate(prefix_digests(prompt)):
            index = position // self.block_size - first_block
            if index >= 0:
                block = home * self.num_blocks + blocks[index]
                self.rows.write(block, position % self.block_size, digest)

    def logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        if not rows:
            return torch.empty(0, self.vocab_size)
        return torch.stack(
            [prefix_logits(digest, self.vocab_size) for digest in hidden[rows].tolist()]
        )

    def _forward(
        self,
        chunks: dict[Sequence, int],
        places: dict[Sequence, Place],
        arrays: Arrays[Tensor],
        step: PaperStep,
    ) -> list[int]:
        """The digest behind each row, in the message's order: decodes first."""
        hidden: list[int] = []
        for seq, count in sorted(chunks.items(), key=lambda item: item[1] > 1):
            slot, num_computed = places[seq]
            known = seq.token_ids[:num_computed]
            tokens = known if num_computed == len(known) else [*known, self.last_token[slot]]
            rows = slice(len(hidden), len(hidden) + count)
            first = num_computed - count
            ids = [self.last_token[slot] if i < 0 else i for i in arrays.ids[rows].tolist()]
            assert ids == tokens[first:], "the message has other tokens"
            assert arrays.positions[rows].tolist() == list(range(first, num_computed))
            assert arrays.slots[rows].tolist() == [slot] * count
            digests = prefix_digests(tokens)
            hidden += digests[-count:]
            table = list(self.tables[slot])
            step.add(functools.partial(self._compute, table, digests, count))
        return hidden

    def _update_tables(self, part: HomeWork, first_block: int) -> None:
        for slot, index, block in (
            part.table_changes.T.tolist() if part.table_changes is not None else ()
        ):
            table = self.tables[slot]
            table[index : index + 1] = [first_block + block]
            assert table[index] == first_block + block, "a table has a hole"
            if index == 0:
                del table[1:]

    def _check_owners(self, chunks: dict[Sequence, int], planned: PlannedStep) -> None:
        # choices that fork off here share the blocks
        widths = {members[0]: len(members) for members in planned.siblings}
        for seq, count in chunks.items():
            for position in range(seq.num_computed - count, seq.num_computed):
                block = seq.block_table[position // self.block_size]
                assert self.homes[seq.home].blocks.num_owners(block) == widths.get(seq, 1), (
                    "writes a block that is not its own"
                )

    def _is_free(self, block: int) -> bool:
        home, own = divmod(block, self.num_blocks)
        return self.homes[home].blocks.is_free(own)

    def _copy(self, copies: list[tuple[int, int]], rows: PaperRows) -> None:
        for source, target in copies:
            assert not self._is_free(target), "copies into a block that is free meanwhile"
            rows.copy_block(source, target)

    def _compute(self, table: list[int], digests: list[int], count: int, rows: PaperRows) -> None:
        """A sequence reads the rows before its chunk, and writes those of the chunk, through the
        table it was given."""
        for position in range(len(digests) - count, len(digests)):
            block = table[position // self.block_size]
            assert not self._is_free(block), "writes a block that is free meanwhile"
            rows.write(block, position % self.block_size, digests[position])
        first = 0
        if self.window is not None:
            first = max(0, len(digests) - count - self.window + 1)
        read = rows[table].reshape(-1)[first : len(digests)].tolist()
        assert read == digests[first:], "reads foreign rows"


class KnownContent:
    """The rows that each digest of a block stands for, noted when the engine's hasher makes the
    digest."""

    def __init__(self, engine: Engine) -> None:
        self._runner = paper_of(engine)
        self._homes = engine.homes
        self._rows: dict[bytes, list[int]] = {}
        self._size = engine.hasher.block_size
        self._extend = engine.hasher.extend
        engine.hasher.extend = self._noted  # type: ignore[method-assign]

    def check(self) -> None:
        """AssertionError when a block holds other rows than those it can be found by, once all that
        is queued is done.
        """
        rows = self._runner.rows_when_done()
        for home in self._homes:
            first = home.number * home.blocks.num_blocks
            for digest, block in home.blocks._block_of.items():
                assert rows[first + block].tolist() == self._rows[digest], (
                    f"block {block} of home {home.number} is cached as what it does not hold"
                )

    def _noted(
        self,
        hashes: list[bytes],
        tokens: SequenceOf[int],
        tenant: Tenant,
        parts: SequenceOf[ContentPart] = (),
    ) -> None:
        first = len(hashes)
        self._extend(hashes, tokens, tenant, parts)
        if len(hashes) > first:
            rows = prefix_digests(tokens[: len(hashes) * self._size])
            for index in range(first, len(hashes)):
                self._rows[hashes[index]] = rows[index * self._size : (index + 1) * self._size]


def prefix_digests(tokens: SequenceOf[int]) -> list[int]:
    return list(itertools.accumulate(tokens, _extend, initial=1))[1:]


NO_NAN = 0xFEFE_FEFE_FEFE_FEFE  # no byte is a NaN of e4m3, so PaperRows can hold it as numbers


def _extend(digest: int, token: int) -> int:
    extended = (digest * 6364136223846793005 + token * 1442695040888963407 + 7) % (1 << 61)
    return extended & NO_NAN


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
    use: LogitRule[Any] | None = None,
) -> list[int]:
    """Generate the paper model's answer for one choice, without engine, batch or blocks. use: a
    rule in addition to those that every engine has."""
    tokens = [*prompt, *forced]
    digest = prefix_digests(tokens)[-1]
    request = engine.make_request(submit_of(prompt, sampling))
    num_eos = len(engine.spec.eos_token_ids)
    more = (use,) if use is not None else ()
    sampler = WholeSampler(engine.spec.vocab_size, 1, num_eos=num_eos, more=more)
    while True:
        known = list(tokens)
        position = len(tokens) - len(prompt)
        row = SampleRow(sampling, choice, 1, known, len(prompt), request.stop_token_ids, position)
        logits = prefix_logits(digest, engine.spec.vocab_size)[None]
        [token] = sampler.sample(logits, [row]).fetch()[0].token_ids
        tokens.append(token)
        digest = _extend(digest, token)
        generated = len(tokens) - len(prompt)
        stops = token in request.stop_token_ids and generated > sampling.min_tokens
        if stops or generated >= request.max_tokens:
            return tokens[len(prompt) :]


def logprob_of(entry: TokenLogprob | None) -> float:
    assert entry is not None
    return entry.logprob
