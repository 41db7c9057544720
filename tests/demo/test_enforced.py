"""The demo model with grammars: whatever it draws is a call of the tools, or an object of the
schema."""

from pathlib import Path

import pytest

from demo.enforced import is_valid, measure, prompts_of
from demo.skills import SkillPrompt
from pdserve.engine.llm import LLM


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return LLM(str(model_dir), device="cpu")


@pytest.mark.lengthy
@pytest.mark.parametrize("skill", ["tools", "objects"])
def test_every_answer_that_ends_is_valid(llm: LLM, model_dir: Path, skill: str) -> None:
    """At temperature 3 the model alone writes no JSON at all."""
    counts = measure(llm, model_dir, prompts_of(skill, 7, 16), 3.0)
    assert counts.is_good and counts.num_cut < counts.num, counts
    greedy = measure(llm, model_dir, prompts_of(skill, 7, 16), 0.0)
    assert greedy.is_good and greedy.num_right >= 15, greedy


def test_what_is_valid() -> None:
    function = {"name": "now", "parameters": {"properties": {"city": {"type": "string"}}}}
    tools = ({"type": "function", "function": function},)
    prompt = SkillPrompt("", "", "", tools=tools)
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    assert is_valid(prompt, call.format("now", '{"city": "Rome"}'))
    for wrong in (
        call.format("then", '{"city": "Rome"}'),
        call.format("now", '{"city": 3}'),
        "Rome",
        "Well. " + call.format("now", "{}"),
    ):
        assert not is_valid(prompt, wrong), wrong
    asked = SkillPrompt("", "", "", schema='{"required": ["a"]}')
    assert is_valid(asked, '{"a": 1}')
    assert not is_valid(asked, "{}") and not is_valid(asked, '{"a": ')
