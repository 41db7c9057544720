"""`LLM` against transformers: the same weights, float32, greedy, token for token, and the
log-probabilities of both.

Every way a token's KV can come about is driven: batched, in chunks, from the prefix cache, after a
preemption.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import logprob_of
from support.tiny_models import FAMILIES, make_tiny

from pdserve.engine import components
from pdserve.engine.execution import model_runner
from pdserve.engine.execution.attention import AttentionBatch
from pdserve.engine.llm import LLM, RequestOutput, SamplingParams
from pdserve.engine.stepping import planner

pytestmark = pytest.mark.lengthy

NEW = 64
LENGTHS = (5, 70, 16, 33)  # one of them past a scaled rope's original positions
TOLERANCE = 1e-4


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(
        256, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)
    ).tolist()


SAMPLE = {"llama3", "qwen3", "phi3", "gemma3", "gpt-oss", "qwen2-moe", "deepseek-v3"}
each_family = pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=[] if one in SAMPLE else pytest.mark.slow) for one in FAMILIES],
)
PROMPTS = [prompt_of(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    @cache
    def get(family: str) -> Path:
        return make_tiny(family, tmp_path_factory.mktemp(family), seed=3)

    yield get


@cache
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@cache
def expected_tokens(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
        )
    return out[0, len(prompt) :].tolist()


def expected(folder: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [expected_tokens(folder, tuple(prompt)) for prompt in prompts]


def log_softmax(folder: Path, tokens: list[int]) -> torch.Tensor:
    """`[tokens, vocab]`: row p is the distribution of token p + 1."""
    with torch.inference_mode():
        return reference(folder)(torch.tensor([tokens])).logits[0].log_softmax(-1)


def make_llm(folder: Path, **engine: Any) -> LLM:
    return LLM(str(folder), tokenizer=False, **{"device": "cpu", "num_kv_blocks": 64, **engine})


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> list[RequestOutput]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": NEW, **sampling})
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check_integrity()
    assert llm.engine.blocks.num_owned == 0
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.sampled(3)
@each_family
def test_batched_prompts(family: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(family)
    outputs = generate(make_llm(folder))
    assert tokens(outputs) == expected(folder)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert min(len(set(ids)) for ids in tokens(outputs)) > 8, (
        "a model that repeats itself proves little"
    )


@pytest.mark.sampled(3)
@each_family
def test_chunks_preemption_and_cached_prefixes_together(
    family: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(family)
    llm = make_llm(folder, max_num_batched_tokens=16, num_kv_blocks=13)
    assert tokens(generate(llm)) == expected(folder)
    gives_blocks_back = llm.engine.spec.longest_window is not None  # so there is room for all
    assert (llm.engine.scheduler.num_preemptions == 0) == gives_blocks_back
    generate(llm, PROMPTS[1:2])
    again = generate(llm, PROMPTS[1:2])
    assert tokens(again) == expected(folder)[1:2] and again[0].num_cached_tokens == 64


@pytest.mark.parametrize("chunk", [16, 23, 64])
def test_chunked_prefill(chunk: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama3")
    assert tokens(generate(make_llm(folder, max_num_batched_tokens=chunk))) == expected(folder)


@pytest.mark.parametrize("num_kv_blocks", [10, 12])
def test_preemption(num_kv_blocks: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama3")
    llm = make_llm(folder, num_kv_blocks=num_kv_blocks)
    assert tokens(generate(llm)) == expected(folder)
    assert llm.engine.scheduler.num_preemptions >= 2


def test_prefix_cache(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama3")
    llm = make_llm(folder)
    prompts = [prompt_of(48) + prompt_of(length, 1) for length in (1, 9, 20)]
    generate(llm, [prompt_of(48)], max_tokens=1)
    outputs = generate(llm, prompts)
    assert [output.num_cached_tokens for output in outputs] == [48, 48, 48]
    assert tokens(outputs) == expected(folder, prompts)


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_block_sizes(block_size: int, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    assert tokens(generate(make_llm(folder, block_size=block_size))) == expected(folder)


@each_family
def test_logprobs(family: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(family)
    [output] = generate(make_llm(folder), PROMPTS[3:], logprobs=3)
    completion = output.outputs[0]
    rows = log_softmax(folder, PROMPTS[3] + completion.token_ids)[len(PROMPTS[3]) - 1 : -1]
    assert completion.logprobs is not None and len(completion.logprobs) == NEW
    for entry, token, row in zip(completion.logprobs, completion.token_ids, rows, strict=True):
        assert entry.token_id == token and entry.rank == 1
        assert entry.logprob == pytest.approx(row[token].item(), abs=TOLERANCE)
        best = row.topk(3)
        assert [t for t, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
    assert completion.cumulative_logprob == pytest.approx(
        sum(e.logprob for e in completion.logprobs)
    )


@pytest.mark.parametrize(
    "engine", [{}, {"max_num_batched_tokens": 16, "num_kv_blocks": 10}], ids=["whole", "preempted"]
)
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_prompt_logprobs(family: str, engine: dict, folder_of: Callable[[str], Path]) -> None:
    """Also in chunks, when preempted half-way, and when the prompt was cached before."""
    folder = folder_of(family)
    llm = make_llm(folder, **engine)
    for _ in range(2):
        for prompt, output in zip(PROMPTS, generate(llm, prompt_logprobs=2), strict=True):
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None
            rows = log_softmax(folder, prompt)
            for entry, token, row in zip(
                output.prompt_logprobs[1:], prompt[1:], rows[:-1], strict=True
            ):
                assert logprob_of(entry) == pytest.approx(row[token].item(), abs=TOLERANCE)
                assert entry is not None and entry.token_id == token and len(entry.top) == 2
                assert entry.rank == 1 + (row > row[token]).sum().item()


@pytest.mark.parametrize(
    ("family", "layers", "top_k"), [("mixtral", (0, 1, 2), 2), ("qwen2-moe", (0, 2), 3)]
)
def test_the_load_of_experts_is_counted(
    family: str, layers: tuple[int, ...], top_k: int, folder_of: Callable[[str], Path]
) -> None:
    """Each token of a step once, and no padding: of the last token of an answer nothing is
    computed."""
    llm = make_llm(folder_of(family))
    generate(llm)
    load = llm.expert_load()
    num_tokens = sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    assert tuple(load) == layers
    assert all(counts.sum() == num_tokens * top_k for counts in load.values())
    assert all(counts.max() <= num_tokens for counts in load.values())
    counted = llm.engine.expert_load
    assert counted is not None
    counted.latest()  # begins a copy, which the next call finds
    latest = counted.latest()
    assert {layer: counts.tolist() for layer, counts in latest.items()} == {
        layer: counts.tolist() for layer, counts in load.items()
    }
    started = counted.start_copy()
    assert started.ready(), "nothing is copied on a CPU"
    assert {layer: counts.tolist() for layer, counts in started.counts().items()} == {
        layer: counts.tolist() for layer, counts in load.items()
    }
    counted.clear()
    assert not any(counts.any() for counts in (*counted.latest().values(), *counted.now().values()))


def test_prompt_logprobs_longer_than_a_slice(folder_of: Callable[[str], Path]) -> None:
    """More rows than are scored at once."""
    folder = folder_of("llama3")
    prompt = prompt_of(400)
    [output] = generate(make_llm(folder), [prompt], prompt_logprobs=0, max_tokens=1)
    want = (
        log_softmax(folder, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    )
    assert [logprob_of(entry) for entry in (output.prompt_logprobs or [])[1:]] == pytest.approx(
        want, abs=TOLERANCE
    )


def with_batch(**changes: Callable[[Any], Any]) -> Callable[..., AttentionBatch]:
    """AttentionBatch with some of what it is given changed."""
    return lambda **given: AttentionBatch(
        **given | {name: f(given[name]) for name, f in changes.items()}
    )


MUTANTS: dict[str, Callable[..., AttentionBatch]] = {
    "context one too long": with_batch(
        context_lens=lambda lens: lens + 1,
        shape=lambda shape: replace(shape, max_decode_context=shape.max_decode_context + 1),
    ),
    "context one too short": with_batch(context_lens=lambda lens: (lens - 1).clamp(min=1)),
    "KV row one too far": with_batch(slot_mapping=lambda slots: slots + 1),
    "positions spread": with_batch(positions=lambda positions: positions + positions // 8),
    "wrong block": with_batch(block_tables=lambda tables: tables.roll(1, dims=1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_input_shows(
    mutant: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama3")
    llm = make_llm(folder)
    monkeypatch.setattr(model_runner, "AttentionBatch", MUTANTS[mutant])
    assert tokens(generate(llm)) != expected(folder)


def test_a_wrong_scale_shows(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama3")

    def wrong(*args: Any) -> Any:
        spec = engine_read_spec(*args)
        return spec.model_copy(update={"attention_scale": 1.03 * spec.head_dim**-0.5})

    engine_read_spec = components.read_spec
    monkeypatch.setattr(components, "read_spec", wrong)
    assert tokens(generate(make_llm(folder))) != expected(folder)


def test_a_wrong_rope_theta_shows(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("llama3")

    def wrong(*args: Any) -> Any:
        spec = engine_read_spec(*args)
        return spec.model_copy(update={"rope": spec.rope.model_copy(update={"theta": 10500.0})})

    engine_read_spec = components.read_spec
    monkeypatch.setattr(components, "read_spec", wrong)
    assert tokens(generate(make_llm(folder))) != expected(folder)


def test_a_skipped_copy_on_write_shows(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(folder_of("llama3"))
    sampling = {"n": 3, "temperature": 1.0, "seed": 5}
    right = [
        [c.token_ids for c in output.outputs] for output in generate(llm, PROMPTS[:1], **sampling)
    ]
    monkeypatch.setattr(planner, "_batches", lambda *_: ())
    llm = make_llm(folder_of("llama3"))
    assert [
        [c.token_ids for c in output.outputs] for output in generate(llm, PROMPTS[:1], **sampling)
    ] != right
