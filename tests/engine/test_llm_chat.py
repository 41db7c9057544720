"""`LLM.chat` with tools and reasoning: a logit rule makes the model say what the test writes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from engine.no_repeat import NoRepeat, use_rule
from router.turn_models import CLOCK, HERMES, MESSAGES, WEATHER
from support.tiny_models import make_tiny
from text.backends import byte_level_backend, write_folder
from torch import Tensor

from pdserve.engine.llm import LLM, SamplingParams
from pdserve.engine.sampling.rules.logit_rule import AskedRows
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.engine.sampling.staged_rows import Arrays
from pdserve.kernels.sampling.reference import NEG_INF

EOS = 2
DELIMITERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
ANSWER = (
    "<think>It rains.</think>I look.\n<tool_call>"
    '{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
)


class Script(NoRepeat):
    """Every choice gets these tokens."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__()
        self._tokens = tokens

    def join(self, row: SampleRow) -> bool | None:
        return True

    def stage(self, rows: AskedRows[bool], num_rows: int) -> Arrays:
        last = len(self._tokens) - 1
        ids = [self._tokens[min(row.num_known, last)] for _, row, _ in rows]
        return {
            "rows": np.array([at for at, _, _ in rows], dtype=np.int64),
            "ids": np.array(ids, dtype=np.int64),
        }

    def apply(self, logits: Tensor, staged: Mapping[str, Tensor]) -> None:
        rows = staged["rows"]
        logits.index_fill_(0, rows, NEG_INF)
        logits.view(-1).index_fill_(0, rows * logits.shape[1] + staged["ids"], 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = byte_level_backend(*DELIMITERS, special=True)
    path = tmp_path_factory.mktemp("chat")
    make_tiny("llama3", path, vocab_size=backend.get_vocab_size(), eos_token_id=EOS)
    return write_folder(path, backend, eos_token="<|im_end|>", chat_template=HERMES)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    # what is scripted is no answer that a grammar would let through
    made = LLM(str(folder), device="cpu", num_kv_blocks=128, tool_enforcement="off")
    assert made.tokenizer is not None
    use_rule(made.engine, Script([*made.tokenizer.encode(ANSWER, add_special_tokens=False), EOS]))
    yield made
    assert not made.engine.has_work


PARAMS = SamplingParams(temperature=0, max_tokens=200)


def test_calls_and_reasoning(llm: LLM) -> None:
    params = SamplingParams(temperature=1, max_tokens=200, n=2)
    [output] = llm.chat(MESSAGES, params, use_tqdm=False, tools=[WEATHER, CLOCK])
    for choice in output.outputs:
        assert (choice.text, choice.reasoning) == ("I look.", "It rains.")
        [call] = choice.tool_calls
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Köln"}')
        assert call.is_complete and choice.finish_reason == "tool_calls"
    first, second = output.outputs
    assert first.tool_calls[0].id != second.tool_calls[0].id


def test_without_tools_a_call_is_content(llm: LLM) -> None:
    for number, [output] in enumerate(
        (
            llm.chat(MESSAGES, PARAMS, use_tqdm=False),
            llm.chat(MESSAGES, PARAMS, use_tqdm=False, tools=[WEATHER], tool_choice="none"),
        )
    ):
        [choice] = output.outputs
        assert choice.reasoning == "It rains." and not choice.tool_calls, number
        assert choice.text.startswith("I look.\n") and choice.finish_reason == "stop"


def test_stop_strings_and_length(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, stop=["look", "rains"])
    [output] = llm.chat(MESSAGES, params, use_tqdm=False, tools=[WEATHER])
    [choice] = output.outputs
    assert (choice.text, choice.reasoning) == ("I ", "It rains.")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "look")
    short = SamplingParams(temperature=0, max_tokens=25)
    [output] = llm.chat(MESSAGES, short, use_tqdm=False, tools=[WEATHER])
    assert output.outputs[0].finish_reason == "length"


def test_several_conversations_and_errors(llm: LLM) -> None:
    outputs = llm.chat([MESSAGES, MESSAGES], PARAMS, use_tqdm=False, tools=[WEATHER])
    assert [len(output.outputs[0].tool_calls) for output in outputs] == [1, 1]
    with pytest.raises(ValueError, match="tool_choice"):
        llm.chat(MESSAGES, PARAMS, use_tqdm=False, tools=[WEATHER], tool_choice="always")
    with pytest.raises(ValueError, match=r"tools\[0\]\.function\.name"):
        llm.chat(MESSAGES, PARAMS, use_tqdm=False, tools=[{"type": "function", "function": {}}])


def test_the_configuration_switches_reading_off(folder: Path) -> None:
    llm = LLM(
        str(folder), device="cpu", num_kv_blocks=64, tool_format="none", reasoning_format="none"
    )
    with pytest.raises(ValueError, match=r"model\.tool_format"):
        llm.chat(MESSAGES, PARAMS, use_tqdm=False, tools=[WEATHER])
    [output] = llm.chat(MESSAGES, SamplingParams(max_tokens=3), use_tqdm=False)
    assert not output.outputs[0].pieces
