"""An executor needs nothing but the messages: over a wire, where only bytes pass, an engine says
the same; and a sample may be of several tokens."""

import random
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine.harness import Driver, PaperStep, paper_engine, paper_of

from pdserve.engine.engine import Engine
from pdserve.engine.llm import LLM
from pdserve.engine.memory.kv_cache import KVCache
from pdserve.engine.sampling.sampled_tokens import Sampled
from pdserve.engine.step_result import HomeSize
from pdserve.engine.stepping.executor import Executor, Padding, StepHandle
from pdserve.engine.stepping.work import ForwardWork, SampleWork
from pdserve.protocol.sampling_params import SamplingParams


def encode_array(array: Any) -> Any:
    assert isinstance(array, np.ndarray), f"a message holds a {type(array).__name__}"
    return [array.dtype.str, list(array.shape), array.tobytes()]


def decode_array(kind: type, value: Any) -> Any:
    assert kind is np.ndarray
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def over_wire(work: Any) -> Any:
    data = msgspec.msgpack.encode(work, enc_hook=encode_array)
    return msgspec.msgpack.decode(data, type=type(work), dec_hook=decode_array)


class WireExecutor:
    """Passes each message on as bytes."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.kv_cache: KVCache = executor.kv_cache
        self.num_messages = 0

    def padding(self, homes: Sequence[HomeSize]) -> list[Padding]:
        return self._executor.padding(homes)

    def forward(self, work: ForwardWork) -> StepHandle:
        self.num_messages += 1
        return self._executor.forward(over_wire(work))

    def sample(self, work: SampleWork) -> None:
        self._executor.sample(over_wire(work))

    def warm_prefill(self, num_rows: int) -> None:
        self._executor.warm_prefill(num_rows)

    def expert_load(self) -> dict[int, np.ndarray]:
        return self._executor.expert_load()

    def clear_expert_load(self) -> None:
        self._executor.clear_expert_load()

    def reset(self) -> None:
        self._executor.reset()

    def close(self) -> None:
        self._executor.close()


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(4)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 70))] for _ in range(8)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            n=rng.choice([1, 3]),
            seed=i,
            max_tokens=rng.randint(2, 20),
            min_tokens=1,
            stop_token_ids=[1, 2, 3],
            logit_bias={7: 2.0},
            presence_penalty=rng.choice([0.0, 0.7]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, 1]),
        )
        for i in range(8)
    ]
    return prompts, params


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_messages_are_all_that_an_executor_needs(tiny_llama: Path, is_async: bool) -> None:
    """Chunks, forks, copies, preemptions, scores, every parameter: token for token."""
    answers = []
    for is_wired in (False, True):
        llm = LLM(
            str(tiny_llama),
            tokenizer=False,
            device="cpu",
            num_kv_blocks=22,
            max_num_batched_tokens=40,
            async_scheduling=is_async,
        )
        if is_wired:
            wire = WireExecutor(llm.engine.executor)
            llm.engine.steps.executor = wire
        outputs = llm.generate(*workload(), use_tqdm=False)
        answers.append([(o.outputs, o.prompt_logprobs) for o in outputs])
    assert answers[0] == answers[1]
    assert wire.num_messages > 20


def arrays_of(value: Any) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    if is_dataclass(value):
        return arrays_of([getattr(value, f.name) for f in fields(value)])
    if isinstance(value, dict):
        return arrays_of(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [array for part in value for array in arrays_of(part)]
    return []


def test_messages_are_flat_arrays_of_their_own(tiny_llama: Path) -> None:
    """A row of a matrix sent as a view would reach a kernel at an address that is not aligned."""
    engine = paper_engine(tiny_llama, num_kv_blocks=22, max_num_batched_tokens=40)
    executor = paper_of(engine)
    seen: list[Any] = []
    forward, sample = executor.forward, executor.sample

    def note_forward(work: ForwardWork) -> PaperStep:
        seen.append(work)
        return forward(work)

    def note_sample(work: SampleWork) -> None:
        seen.append(work)
        sample(work)

    executor.forward = note_forward  # type: ignore[method-assign]
    executor.sample = note_sample  # type: ignore[method-assign]
    driver = Driver(engine)
    prompts, params = workload()
    for prompt, sampling in zip(prompts, params, strict=True):
        driver.add(prompt, sampling)
    driver.run()
    arrays = arrays_of(seen)
    assert len(arrays) > 100
    assert all(array.flags.c_contiguous and array.dtype.itemsize in (4, 8) for array in arrays)
    assert {type(work) for work in seen} == {ForwardWork, SampleWork}


class TwoAtOnce(PaperStep):
    """Each sample is of its token and of the one after it: nothing in flight, greedy."""

    def samples(self) -> list[Sampled]:
        found = super().samples()
        return [Sampled((s.token_ids[0], s.token_ids[0] ^ 1), None) for s in found]


def test_a_sample_may_be_of_several_tokens(tiny_llama: Path) -> None:
    """As of a draft that was accepted: what comes after the end of a choice is dropped, and the
    rows that the next step lacks are planned."""
    engine: Engine = paper_engine(tiny_llama, async_scheduling=False)
    executor = paper_of(engine)
    forward = executor.forward

    def doubled(work: ForwardWork) -> PaperStep:
        step = forward(work)
        step.__class__ = TwoAtOnce
        return step

    executor.forward = doubled  # type: ignore[method-assign]
    driver = Driver(engine)
    ends = driver.add(range(1, 20), SamplingParams(temperature=0, seed=0, max_tokens=5))
    first = driver.add(range(1, 20), SamplingParams(temperature=0, seed=0, max_tokens=1))
    driver.run()
    driver.assert_empty()
    tokens = driver.tokens[ends, 0]
    assert len(tokens) == 5 and [t ^ 1 for t in tokens[0:4:2]] == tokens[1:4:2]
    assert driver.tokens[first, 0] == tokens[:1]
    assert {tuple(plan.values()) for plan in executor.plans[1:]} == {(2,)}
