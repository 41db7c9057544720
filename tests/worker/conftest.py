"""One engine alone, of the same model, that the tests of workers compare with; and time made by
hand.
"""

import time
from pathlib import Path

import pytest
from support.clock import Clock

from pdserve.decode import decode_phase, kv_import, pulls
from pdserve.engine.llm import LLM
from pdserve.worker import legs, loop, status


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), tokenizer=False, num_kv_blocks=256, device="cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of worker loops and decode phases stands still but for what the test makes pass."""
    clock = Clock(time.monotonic())
    for module in (loop, legs, status, decode_phase, kv_import, pulls):
        monkeypatch.setattr(module, "time", clock)
    return clock
