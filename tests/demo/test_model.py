"""The shipped weights: size, configuration, and that they do what the README says, with
transformers on CPU."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from demo.data import END, EOS
from demo.evaluate import (
    answers_match,
    complete,
    generate_answers,
    generate_replies,
    load_model,
)
from demo.recall import recall_prompts
from demo.skills import SKILLS, is_right, parse_answer, skill_prompts
from pdserve.text.tokenizer import Tokenizer as ServedTokenizer

pytestmark = pytest.mark.lengthy


@pytest.fixture(scope="module")
def model(model_dir: Path) -> LlamaForCausalLM:
    return load_model(model_dir)


def complete_text(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str) -> str:
    return tokenizer.decode(complete(model, tokenizer.encode(prompt).ids, 48))


def test_the_folder_is_small_and_complete(model_dir: Path) -> None:
    assert (model_dir / "model.safetensors").stat().st_size < 6_000_000
    config = json.loads((model_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    assert config["max_position_embeddings"] >= 2048
    assert config["num_attention_heads"] > config["num_key_value_heads"]


def test_recall_on_prompts_of_mixed_length(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    prompts = recall_prompts(2026, 20)
    answers = generate_answers(model, tokenizer, prompts)
    assert sum(answer == p.answer for answer, p in zip(answers, prompts, strict=True)) >= 18


def test_answers_match_is_what_generate_does(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Also on prompts whose asked fact was taken out, so that both agree on misses."""
    prompts = recall_prompts(5, 6, max_tokens=300)
    blind = [
        p._replace(prompt=p.prompt.replace(p.answer, " gone.")) for p in prompts[:3]
    ] + prompts[3:]
    generated = [
        answer == p.answer
        for answer, p in zip(generate_answers(model, tokenizer, blind), blind, strict=True)
    ]
    assert answers_match(model, tokenizer, blind) == generated
    assert generated == [False] * 3 + [True] * 3


def test_answers_end_with_eos(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    (p,) = recall_prompts(8, 1, max_tokens=200)
    ids = torch.tensor([tokenizer.encode(p.prompt + p.answer).ids])
    with torch.inference_mode():
        assert model(ids).logits[0, -1].argmax() == tokenizer.token_to_id(EOS)


def test_sums(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    sums = [(rng.randrange(100), rng.randrange(100)) for _ in range(8)]
    results = [complete_text(model, tokenizer, f"{a} + {b} =").split()[0] for a, b in sums]
    assert sum(result == str(a + b) for result, (a, b) in zip(results, sums, strict=True)) >= 7


def test_json_extraction(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    text = "Text: My friend Mira is 9 years old, lives in Oakdale and likes to sing.\nJSON:"
    expected = {"name": "Mira", "age": 9, "city": "Oakdale", "hobby": "sing"}
    assert json.loads(complete_text(model, tokenizer, text)) == expected


def test_a_chat_turn_recalls_and_stops(
    model: LlamaForCausalLM, tokenizer: Tokenizer, model_dir: Path
) -> None:
    question = "The code of Mira is 4729. Tom lives in Oakdale.\nWhere does Tom live?"
    ids = ServedTokenizer.load(model_dir).apply_chat_template(
        [{"role": "user", "content": question}]
    )
    assert tokenizer.decode(complete(model, ids, 48)) == "The answer is Oakdale."


def test_calls_of_tools(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    prompts = skill_prompts("tools", 2026, 20)
    replies = generate_replies(model, tokenizer, prompts)
    assert sum(is_right(p, reply) for p, reply in zip(prompts, replies, strict=True)) >= 18


@pytest.mark.parametrize("skill", [skill for skill in SKILLS if skill != "tools"])
def test_other_skills(model: LlamaForCausalLM, tokenizer: Tokenizer, skill: str) -> None:
    matches = answers_match(model, tokenizer, skill_prompts(skill, 2026, 20), END)
    assert sum(matches) >= 18


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def chat(
    model: LlamaForCausalLM, model_dir: Path, messages: list[dict[str, Any]], **kwargs: Any
) -> str:
    """The reply with its delimiters to what a server would make of these messages."""
    served = ServedTokenizer.load(model_dir)
    ids = complete(model, served.apply_chat_template(messages, **kwargs), 96)
    return Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode(ids, False)


def test_a_tool_is_called_and_its_result_reported(model: LlamaForCausalLM, model_dir: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What's the weather in Paris?"}]
    reply = chat(model, model_dir, messages, tools=[WEATHER])
    assert parse_answer(reply.removesuffix(END)) == ("", [("get_weather", {"city": "Paris"})])
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages += [
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": '{"temperature": 21, "state": "sunny"}'},
    ]
    reply = chat(model, model_dir, messages, tools=[WEATHER])
    assert reply == f"The temperature is 21 and the state is sunny.{END}"


def test_tools_do_not_disturb_small_talk(model: LlamaForCausalLM, model_dir: Path) -> None:
    messages = [{"role": "user", "content": "What is 23 + 54?"}]
    assert chat(model, model_dir, messages, tools=[WEATHER]) == f"23 + 54 = 77{END}"


def test_reasoning_comes_when_asked_for(model: LlamaForCausalLM, model_dir: Path) -> None:
    thought = f"I need the sum of 23 and 54.\nIt is 77.\n</think>\n\n23 + 54 = 77{END}"
    question = "What is 23 + 54?"
    plain = [{"role": "user", "content": question}]
    asked = [{"role": "user", "content": f"{question} Think first."}]
    assert chat(model, model_dir, plain) == f"23 + 54 = 77{END}"
    assert chat(model, model_dir, asked) == f"<think>\n{thought}"
    assert chat(model, model_dir, plain, enable_thinking=True) == thought
