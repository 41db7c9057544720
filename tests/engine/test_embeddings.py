"""`LLM.embed`: what transformers computes, whatever shares steps, ranks and the prefix cache; and
what is no embedding model is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import make_embedding, make_tiny

from pdserve.engine.llm import LLM

TEXTS = [
    "a",
    "The capital of France is Paris.",
    "What is 23 + 54? " * 12,
    "One sheep, two sheep, three sheep. " * 30,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedding(tmp_path_factory.mktemp("embedding") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Returns the last hidden row of transformers, normalised, in float32."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)

    def of(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            row = model(torch.tensor([ids])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(row, dim=0).numpy()

    return of


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", num_kv_blocks=128)


def vectors(llm: LLM, prompts: Any = TEXTS, **options: Any) -> list[np.ndarray]:
    outputs = llm.embed(prompts, use_tqdm=False, **options)
    assert all(output.finished for output in outputs)
    return [np.array(output.outputs.embedding, dtype=np.float32) for output in outputs]


def assert_near(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
    cosine = found @ wanted / (np.linalg.norm(found) * np.linalg.norm(wanted))
    assert cosine >= 0.999999


def test_embeddings_are_those_of_transformers(
    llm: LLM, expected: Callable[[list[int]], np.ndarray]
) -> None:
    """Each text alone, all in one batch, and again from the prefix cache: the same bits."""
    assert llm.tokenizer is not None
    alone = [vectors(llm, text)[0] for text in TEXTS]
    for text, vector in zip(TEXTS, alone, strict=True):
        ids = llm.tokenizer.encode(text)
        assert ids[-1] == 1  # <|eos|>
        assert_near(vector, expected(ids))
    for _ in range(2):
        for found, vector in zip(vectors(llm), alone, strict=True):
            assert (found == vector).all()
    again = llm.embed(TEXTS, use_tqdm=False)
    assert [output.num_cached_tokens > 0 for output in again] == [False, False, True, True]
    assert not llm.engine.has_work and llm.engine.blocks.num_owned == 0


def test_a_prompt_that_is_cached_to_its_end(
    llm: LLM, expected: Callable[[list[int]], np.ndarray]
) -> None:
    """Embed a prompt of whole blocks; all but its last row could come from the cache."""
    ids = list(range(20, 84))
    for cached in (0, 48):
        [output] = llm.embed(ids, use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert_near(np.array(output.outputs.embedding), expected(ids))


@pytest.mark.parametrize(
    "engine",
    [
        {"max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
        {"async_scheduling": True, "max_num_batched_tokens": 32, "max_num_seqs": 2},
    ],
    ids=lambda engine: next(iter(engine)),
)
def test_steps_of_any_kind(folder: Path, llm: LLM, engine: dict[str, Any]) -> None:
    other = LLM(str(folder), device="cpu", num_kv_blocks=128, **engine)
    for found, vector in zip(vectors(other), vectors(llm), strict=True):
        assert_near(found, vector)


@pytest.mark.lengthy
@pytest.mark.processes
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 1, "pp": 2}], ids=["tp", "pp"])
def test_several_ranks(
    folder: Path, llm: LLM, make_llm: Callable[..., LLM], degrees: dict[str, int]
) -> None:
    prompts = [list(range(7, 7 + length)) for length in (1, 16, 50, 200)]
    ranks = make_llm(folder, **degrees)
    for found, vector in zip(vectors(ranks, prompts), vectors(llm, prompts), strict=True):
        assert_near(found, vector)


def test_dimensions_and_lengths(llm: LLM) -> None:
    [whole] = vectors(llm, TEXTS[1])
    [raw] = vectors(llm, TEXTS[1], normalize=False)
    assert np.linalg.norm(raw) > 1.1
    assert_near(whole, raw / np.linalg.norm(raw))
    [cut] = vectors(llm, TEXTS[1], dimensions=16)
    assert_near(cut, raw[:16] / np.linalg.norm(raw[:16]))


def test_prompts_are_cut_to_their_first_tokens(llm: LLM) -> None:
    """The end-of-text token of a text stays."""
    assert llm.tokenizer is not None
    [output] = llm.embed(TEXTS[2], use_tqdm=False, truncate_prompt_tokens=10)
    whole = llm.tokenizer.encode(TEXTS[2])
    assert output.prompt_token_ids == [*whole[:9], 1]
    [output] = llm.embed([whole], use_tqdm=False, truncate_prompt_tokens=10)
    assert output.prompt_token_ids == whole[:10]
    [output] = llm.embed("sheep " * 5000, use_tqdm=False, truncate_prompt_tokens=-1)
    assert len(output.prompt_token_ids) == 512 and output.prompt_token_ids[-1] == 1


def test_what_is_wrong_is_named(llm: LLM) -> None:
    def refused(prompt: Any, match: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            llm.embed(prompt, use_tqdm=False, **options)

    refused("", "prompt is empty")
    refused([[]], "prompt is empty")
    refused([[1] * 513], "prompt has 513 tokens, but a request may have 512")
    refused("a", "dimensions must be from 1 to 64", dimensions=65)
    refused("a", "truncate_prompt_tokens must be -1 or from 1 to 512", truncate_prompt_tokens=0)
    with pytest.raises(ValueError, match="this model is for embeddings: call embed"):
        llm.generate("a", use_tqdm=False)


def test_a_prompt_may_fill_the_context(llm: LLM) -> None:
    """No token is generated after it."""
    [output] = llm.embed([[5] * 512], use_tqdm=False)
    assert output.finished


def test_models_that_generate_embed_only_when_asked_to(
    tmp_path: Path, expected: Callable[[list[int]], np.ndarray]
) -> None:
    folder = make_tiny("qwen3", tmp_path / "qwen3", vocab_size=1792)
    with pytest.raises(ValueError, match="this model generates tokens"):
        LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=16).embed([[1]])
    llm = LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=16, task="embed")
    ids = [3, 1, 4, 1, 5]
    assert_near(vectors(llm, [ids])[0], expected(ids))


def test_what_a_checkpoint_says(folder: Path, tmp_path: Path) -> None:
    """Other poolings and modules are refused by name, and lengths of embeddings are kept to."""
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config |= {"architectures": ["Qwen3Model"], "matryoshka_dimensions": [16, 32]}
    (other / "config.json").write_text(json.dumps(config))
    modules = json.loads((other / "modules.json").read_text())
    (other / "modules.json").write_text(json.dumps(modules[:2]))

    def made() -> LLM:
        return LLM(str(other), device="cpu", num_kv_blocks=16)

    llm = made()
    with pytest.raises(ValueError, match="dimensions must be one of 16, 32 for this model, not 20"):
        llm.embed("a", dimensions=20)
    assert np.linalg.norm(vectors(llm, "a")[0]) > 1.1  # without a Normalize module
    (other / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with pytest.raises(ValueError, match="says pooling_mode_mean_tokens: only pooling_mode_last"):
        made()
    dense = {**modules[2], "type": "sentence_transformers.models.Dense"}
    (other / "modules.json").write_text(json.dumps([*modules[:2], dense]))
    with pytest.raises(ValueError, match="has a module 'Dense': only Transformer, Pooling"):
        made()
