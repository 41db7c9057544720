"""Several ranks on CPU, each a process: the tokens of one rank, whatever is asked for; and what
becomes of them when something ends early.

Most processes are kept between tests (conftest.py), but not those of tests that kill them.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.several_ranks import (
    CASES,
    ROOMY,
    TIGHT,
    answers,
    assert_nearer,
    assert_same,
    prompt_logprobs,
)
from safetensors.torch import load_file, save_file
from support.far_ranks import part_files
from support.quantised import write_kv_scales

from demo.storing import WAYS as STORED
from demo.storing import write_quantised
from pdserve.engine import ranks as ranks_module
from pdserve.engine.llm import LLM
from pdserve.engine.memory.kv_cache import layout_of
from pdserve.engine.ranks import RankProcesses
from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.collective.ops import slice_of
from pdserve.parallel.dims import stage_layers

pytestmark = [pytest.mark.lengthy, pytest.mark.processes]

REPOSITORY = Path(__file__).parent.parent.parent
DEADLINE_S = 4.0  # of a step: three processes may share a busy core
FOUND_S = 3.0  # of a death, which a hang-up tells at once: less than the deadline


SAMPLE = {("qwen2", 2), ("tied", 4), ("qwen2-moe", 2), ("deepseek-v3", 2), ("gpt-oss", 2)}
SAMPLE |= {("olmo2", 4)}  # two ranks have one KV head, whose squares count once


@pytest.mark.sampled(3)
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


SIZES = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32, "intermediate_size": 256}


@pytest.mark.parametrize("stored", ["awq", pytest.param("gptq", marks=pytest.mark.slow)])
def test_int4_weights(
    stored: str, tmp_path: Path, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    folder = write_quantised(folder_of("llama3", **SIZES), tmp_path, STORED[stored])
    assert_same(answers(make_llm(folder, 2)), answers(make_llm(folder, 1)))


def test_int4_weights_with_activations_in_fp8(
    tmp_path: Path, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    """Each rank rounds its own part of an activation's row, and scales its own columns."""
    plain = folder_of("llama3", **SIZES)
    folder = write_quantised(plain, tmp_path, STORED["ct-int4-fp8"])
    one, two = (prompt_logprobs(make_llm(folder, tp)) for tp in (1, 2))
    whole = prompt_logprobs(make_llm(plain, 1))
    assert 0 < (two - one).abs().mean() < (whole - one).abs().mean() / 2


@pytest.mark.parametrize("family", ["llama3", "qwen3-moe"])
def test_fp8_weights_and_rows(
    family: str, tmp_path: Path, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    """A rank has its own heads' scales. Sums over ranks differ in their last bits, and so may what
    e4m3 makes of them: logprobs are near, where those of other rows are not."""
    experts = {"moe_intermediate_size": 256} if family == "qwen3-moe" else {}
    plain = folder_of(family, **SIZES, **experts)
    folder = write_quantised(plain, tmp_path, STORED["fp8-blocks"])
    write_kv_scales(folder)
    want = prompt_logprobs(make_llm(folder, 1, kv_cache_dtype="fp8"))
    fp8, auto = (
        prompt_logprobs(make_llm(folder, 2, kv_cache_dtype=dtype)) for dtype in ("fp8", "auto")
    )
    assert_nearer(fp8, auto, want)


LATENTS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64}


def test_fp8_weights_beside_layers_for_more_tokens_at_once(
    tmp_path: Path, folder_of: Callable[..., Path], make_llm: Callable[..., LLM]
) -> None:
    """As DeepSeek-V3 is published. Nobody reads the layer after the last, whose tensors are in fp8,
    too, though numbers of it cannot be right."""
    sizes = {**SIZES, **LATENTS, "moe_intermediate_size": 256}
    plain = folder_of("deepseek-v3", **sizes)
    folder = write_quantised(plain, tmp_path / "fp8", STORED["fp8-blocks"])
    one = prompt_logprobs(make_llm(folder, 1))
    add_layer_for_more_tokens(folder)
    assert torch.equal(prompt_logprobs(make_llm(folder, 1)), one)
    assert_nearer(prompt_logprobs(make_llm(folder, 2)), prompt_logprobs(make_llm(plain, 1)), one)


def add_layer_for_more_tokens(folder: Path) -> None:
    """Adds a layer of multi-token prediction (MTP) after the last, which is a copy of it with the
    matrices that join it to the model, all in blocks of e4m3. Their scales are not finite."""
    config = json.loads((folder / "config.json").read_text())
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    last, added = (f"model.layers.{layer}." for layer in (count - 1, count))
    new = {name.replace(last, added): x for name, x in tensors.items() if last in name}
    joined = STORED["fp8-blocks"].store(torch.randn(hidden, 2 * hidden))
    new |= {f"{added}eh_proj.{name}": x for name, x in joined.items()}
    new |= {f"{added}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm")}
    new |= {f"{added}embed_tokens.weight": torch.ones(config["vocab_size"], hidden)}
    assert sum(x.dtype == torch.float8_e4m3fn for x in new.values()) > 20
    broken = {
        name: x * torch.nan if name.endswith("_scale_inv") else x.clone() for name, x in new.items()
    }
    save_file({**tensors, **broken}, folder / "model.safetensors", {"format": "pt"})


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
    for said in ("no more", "cannot be used any more"):
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
@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 1), (1, 3, 1), (1, 3, 2)])
def test_a_rank_that_dies_or_stands_still_is_found(
    tp: int,
    pp: int,
    rank: int,
    how: signal.Signals,
    folder_of: Callable[..., Path],
    own_ranks: list[RankProcesses],
) -> None:
    """The rank is one of a layer's, or the stage in the middle, or the first."""
    llm = LLM(
        str(folder_of("qwen2")),
        tokenizer=False,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        step_deadline_s=DEADLINE_S,
        **ROOMY,
    )
    [ranks] = own_ranks
    child = ranks.children[rank]
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
    assert taken < (FOUND_S if how == signal.SIGKILL else DEADLINE_S + 2.0), (
        f"{caught.value} after {taken:.1f} s"
    )
    if how == signal.SIGKILL:
        assert f"the process of rank {rank} has ended" in str(caught.value)
    with pytest.raises(RuntimeError, match="cannot be used any more"):
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
    assert layout_of({0: spec, 1: spec}, 16, "float32").groups[0].heads == (6, 7)


def test_layers_of_a_peers_stage_are_a_group() -> None:
    specs = {layer: AttentionSpec(4, 2, 16, 0.25) for layer in range(5)}
    layout = layout_of(specs, 16, "bfloat16", stage_layers(5, 2))
    assert [group.layers for group in layout.groups] == [(0, 1), (2, 3, 4)]
    later = {layer: specs[layer] for layer in (3, 4)}  # of a last stage of three
    assert len(layout_of(later, 16, "bfloat16", stage_layers(5, 2)).groups) == 1
    short = {layer: AttentionSpec(4, 2, 8, 0.25) for layer in range(5)}
    assert len(layout_of(short, 16, "fp8_e4m3", stage_layers(5, 2)).groups) == 1


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
