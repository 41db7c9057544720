"""What the tests of workers compare with: one engine alone, of the same model."""

from pathlib import Path

import pytest

from pdserve.engine.llm import LLM


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), tokenizer=False, num_kv_blocks=256, device="cpu")
