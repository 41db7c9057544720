"""Several ranks on CPU, each a process: the tokens of one rank, whatever is asked for; and what
becomes of them when something ends early.

The processes are kept between tests (support/rank_pool.py), but for those of tests that kill them.
"""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.far_ranks import part_files
from support.rank_pool import RankPool
from support.tiny_models import FAMILIES, make_tiny

from pdserve.engine import ranks as ranks_module
from pdserve.engine.llm import LLM, RequestOutput, SamplingParams
from pdserve.engine.memory.kv_cache import layout_of
from pdserve.engine.ranks import RankProcesses
from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.collective.ops import slice_of

pytestmark = [pytest.mark.lengthy, pytest.mark.processes]

TOLERANCE = 1e-4
NEW = 24
REPOSITORY = Path(__file__).parent.parent.parent
# 10 blocks of 16 tokens: preemptions and copies of blocks
TIGHT: dict[str, Any] = {"num_kv_blocks": 12, "max_num_batched_tokens": 48, "max_num_seqs": 6}
ROOMY: dict[str, Any] = {"num_kv_blocks": 80}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    gc.collect()
    pool.close()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def get(family: str, **overrides: Any) -> Path:
        return make_tiny(family, tmp_path_factory.mktemp(family), seed=3, **overrides)

    return get


@pytest.fixture
def make_llm(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LLM]]:
    """An LLM of pooled ranks; all that were made end with the test."""
    monkeypatch.setattr(ranks_module, "RankProcesses", pool.ranks_of)

    def make(folder: Path, tp: int, **engine: Any) -> LLM:
        return LLM(
            str(folder), tokenizer=False, device="cpu", tensor_parallel_size=tp, **ROOMY | engine
        )

    yield make
    gc.collect()


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Everything that a sampler does, and prompts of several lengths, two with a beginning in
    common."""
    chance = random.Random(5)
    common = [chance.randrange(250) for _ in range(32)]
    prompts = [[chance.randrange(250) for _ in range(length)] for length in (5, 70, 16, 33, 40)]
    prompts += [[*common, 7, 9], [*common, 8]]
    params = [
        SamplingParams(temperature=0, logprobs=3, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=0, prompt_logprobs=2, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=1, seed=1, n=3, max_tokens=NEW, ignore_eos=True),
        SamplingParams(
            temperature=0.8,
            seed=2,
            top_p=0.9,
            top_k=40,
            repetition_penalty=1.2,
            max_tokens=NEW,
            ignore_eos=True,
        ),
        SamplingParams(
            temperature=1,
            seed=3,
            frequency_penalty=0.5,
            logit_bias={7: 3.0},
            min_tokens=4,
            stop_token_ids=[7, 8, 9],
            max_tokens=NEW,
        ),
        SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=1, seed=4, min_p=0.05, max_tokens=NEW, ignore_eos=True),
    ]
    return prompts, params


def answers(llm: LLM) -> list[RequestOutput]:
    return llm.generate(*workload(), use_tqdm=False)


def assert_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for mine, other in zip(found, expected, strict=True):
        for choice, want in zip(mine.outputs, other.outputs, strict=True):
            assert choice.token_ids == want.token_ids
            assert (choice.finish_reason, choice.stop_reason) == (
                want.finish_reason,
                want.stop_reason,
            )
            for entry, wanted in zip(choice.logprobs or [], want.logprobs or [], strict=True):
                assert entry.logprob == pytest.approx(wanted.logprob, abs=TOLERANCE)
                assert [i for i, _ in entry.top] == [i for i, _ in wanted.top]
        scored = zip(mine.prompt_logprobs or [], other.prompt_logprobs or [], strict=True)
        for score, wanted_score in scored:
            assert (score is None) == (wanted_score is None)
            if score is not None and wanted_score is not None:
                assert score.logprob == pytest.approx(wanted_score.logprob, abs=TOLERANCE)


# 250 tokens: ranks have unequal parts of the vocabulary
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "tied": ("llama3", {"tie_word_embeddings": True, "vocab_size": 250}),
    "biases": ("llama2", {"attention_bias": True, "mlp_bias": True}),
    "few tokens": ("qwen3", {"vocab_size": 250}),
}
SAMPLE = {("qwen2", 2), ("tied", 4), ("qwen2-moe", 2), ("deepseek-v3", 2)}


@pytest.mark.parametrize(
    ("case", "tp"),
    [
        pytest.param(case, tp, marks=[] if (case, tp) in SAMPLE else [pytest.mark.slow])
        for case in CASES
        for tp in (2, 4)
    ],
)
def test_several_ranks_answer_as_one_does(
    case: str, tp: int, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    """TP4 of two KV heads: two ranks share one."""
    family, overrides = CASES[case]
    folder = folder_of(family, **overrides)
    expected = answers(make_llm(folder, 1))
    llm = make_llm(folder, tp)
    assert_same(answers(llm), expected)
    assert_same(answers(llm), expected)  # from the prefix cache


def test_ranks_that_share_no_files_answer_as_one_does(
    folder_of: Callable[..., Path], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("qwen2")
    expected = answers(make_llm(folder, 1))
    part_files(monkeypatch)
    assert_same(answers(make_llm(folder, 2)), expected)


@pytest.mark.parametrize("mode", ["tight", pytest.param("async", marks=pytest.mark.slow)])
def test_preemptions_and_two_steps_in_flight(
    mode: str, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    folder = folder_of("llama3")
    expected = answers(make_llm(folder, 1))
    llm = make_llm(folder, 2, async_scheduling=mode == "async", **TIGHT)
    assert_same(answers(llm), expected)
    assert llm.engine.scheduler.num_preemptions > 0


def test_an_interruption_in_the_middle_leaves_all_ranks_in_order(
    folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    folder = folder_of("qwen2")
    llm = make_llm(folder, 2)
    expected = answers(make_llm(folder, 1))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for delay in (0.0, 0.003, 0.1):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    answers(llm)
            timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert_same(answers(llm), expected)


def test_an_error_in_a_step_is_the_end_of_the_group(
    folder_of: Callable[..., Path], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(folder_of("qwen2"), 2)
    executor: Any = llm.engine.executor

    def fail(work: Any) -> None:
        raise OSError("no more")

    monkeypatch.setattr(executor._local, "sample", fail)
    for said in ("no more", "of no use any more"):
        with pytest.raises((OSError, RuntimeError), match=said):
            answers(llm)


def test_a_degree_that_does_not_fit_is_refused_before_anything_starts(
    folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ranks_module, "RankProcesses", start)
    folder = folder_of("llama3")
    with pytest.raises(
        ValueError,
        match=r"engine\.tensor_parallel \(3\) does not fit the model: that many ranks cannot share "
        r"its num_attention_heads 4 and intermediate_size 112 and num_key_value_heads 2 "
        r"\(config\.json\) evenly\. Set it to 1 or 2",
    ):
        LLM(str(folder), tokenizer=False, tensor_parallel_size=3)
    with pytest.raises(ValueError, match="tensor_parallel"):
        LLM(str(folder), tokenizer=False, tensor_parallel_size=0)


@pytest.fixture
def own_ranks(monkeypatch: pytest.MonkeyPatch) -> list[RankProcesses]:
    """The processes of each LLM that is made from now on."""
    made: list[RankProcesses] = []

    class Kept(RankProcesses):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(ranks_module, "RankProcesses", Kept)
    return made


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_that_dies_or_stands_still_is_found(
    how: signal.Signals, folder_of: Callable[..., Path], own_ranks: list[RankProcesses]
) -> None:
    llm = LLM(
        str(folder_of("qwen2")),
        tokenizer=False,
        tensor_parallel_size=2,
        step_deadline_s=2.0,
        **ROOMY,
    )
    [ranks] = own_ranks
    child = ranks.children[1]
    assert answers(llm)
    struck = [0.0]

    def strike() -> None:
        struck[0] = time.monotonic()
        child.send_signal(how)

    timer = threading.Timer(0.1, strike)
    timer.start()
    with pytest.raises(RuntimeError) as caught:
        while True:
            answers(llm)
    timer.join()
    taken = time.monotonic() - struck[0]
    assert taken < (1.0 if how == signal.SIGKILL else 4.0), f"{caught.value} after {taken:.1f} s"
    if how == signal.SIGKILL:
        assert "the process of rank 1 has ended" in str(caught.value)
    with pytest.raises(RuntimeError, match="of no use any more"):
        answers(llm)
    del llm, caught
    gc.collect()
    assert child.wait(10) is not None, "it is gone with its engine"


def test_ranks_end_with_their_engine(
    folder_of: Callable[..., Path], own_ranks: list[RankProcesses]
) -> None:
    llm = LLM(str(folder_of("qwen2")), tokenizer=False, tensor_parallel_size=2, **ROOMY)
    child = own_ranks[0].children[1]
    assert child.poll() is None
    del llm
    gc.collect()
    assert child.wait(5) == 0


SCRIPT = """
import os, sys
from pdserve.engine import llm, ranks
from pdserve.engine.ranks import RankProcesses
made = []
class Kept(RankProcesses):
    def __init__(self, *given):
        super().__init__(*given)
        made.append(self)
ranks.RankProcesses = Kept
it = llm.LLM(sys.argv[1], tokenizer=False, tensor_parallel_size=2, num_kv_blocks=8)
if os.fork() == 0:  # it has all of its parent's files open
    os.execvp("sleep", ["sleep", "20"])
print(made[0].children[1].pid, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_a_process_that_is_killed(folder_of: Callable[..., Path]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder_of("qwen2"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5.0
        while Path(f"/proc/{child}/stat").exists():
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z":
                break
            assert time.monotonic() < deadline, "rank 1 lives on without rank 0"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()


def test_a_rank_that_ends_while_the_engine_starts_is_named(
    folder_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Struck(RankProcesses):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.children[1].kill()

    monkeypatch.setattr(ranks_module, "RankProcesses", Struck)
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) ended with status -9"):
        LLM(str(folder_of("qwen2")), tokenizer=False, tensor_parallel_size=2, **ROOMY)


def test_kv_heads_of_a_rank_by_their_global_ids() -> None:
    spec = AttentionSpec(4, 2, 16, 0.25, first_kv_head=6)
    assert layout_of([spec, spec], 16, "float32").groups[0].heads == (6, 7)


@pytest.mark.parametrize("width", [1, 7, 16, 250, 256, 128256, 151936, 50257])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_slices_cover_everything_once(width: int, size: int) -> None:
    numbers = torch.arange(width)
    parts = [slice_of(width, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat([numbers[part] for part in parts]), numbers)
    if width >= 16 * size:
        assert all(part.start % 16 == 0 for part in parts)
        widths = [part.stop - part.start for part in parts]
        assert max(widths) - min(widths) < 32
