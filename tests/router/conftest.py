from collections.abc import AsyncIterator, Callable

import pytest
from router.fake_worker import VOCAB
from router.harness import Harness
from text.backends import TEMPLATE, byte_level_backend

from pdserve.configs.schema import RouterConfig
from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    specials = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    loaded = Tokenizer(backend, specials, (2,), TEMPLATE)
    assert loaded.vocab_size <= VOCAB
    return loaded


@pytest.fixture
async def make(tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Harness]]:
    """make(num_prefill, num_decode, **RouterConfig fields) -> a running Harness, closed after the test."""
    made: list[Harness] = []

    def build(num_prefill: int = 1, num_decode: int = 1, resume_wait_s: float = 0.3, **config: object) -> Harness:
        harness = Harness(
            tokenizer, RouterConfig(**{"split": "always", **config}), num_prefill, num_decode, resume_wait_s
        )
        made.append(harness)
        return harness

    yield build
    for harness in made:
        await harness.fleet.close()
