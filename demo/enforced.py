"""Measures the demo model with grammars: runs the prompts of demo/skills.py through pdserve's
engine, which only allows calls and objects that fit the tools and schemas.

Answers are greedy, and sampled at temperature 1, where the model alone would often err. Every
answer that ends must be valid. demo/evaluate.py measures the model without a grammar. This module
is run by hand and by the tests.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from demo.skills import MAX_SKILL_TOKENS, SkillPrompt, is_right, parse_answer, skill_prompts
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.text.grammars.grammar_of import grammar_of
from pdserve.text.grammars.structured import structured_outputs
from pdserve.text.tokenizer import Tokenizer
from pdserve.turns.model_turns import ModelTurns
from pdserve.turns.turn import make_turn

MODEL_DIR = Path(__file__).parent / "pdserve-demo"
TEMPERATURES = (0.0, 1.0)


@dataclass
class Counts:
    """Counts of answers. Answers that were cut are neither valid nor right."""

    num: int = 0
    num_cut: int = 0  # answers that max_tokens ended
    num_valid: int = 0
    num_right: int = 0

    @property
    def is_good(self) -> bool:
        """True if every answer that was not cut is valid."""
        return self.num_valid == self.num - self.num_cut


def rules_of(prompt: SkillPrompt, turns: ModelTurns) -> dict[str, Any]:
    """Returns logit rules that enforce a call of the prompt's tools, or an object of its schema."""
    if prompt.tools:
        turn = make_turn(
            [{"role": "user", "content": "?"}], tools=prompt.tools, tool_choice="required"
        )
        return turns.rules(turn, prompt.prompt, has_engine=True)
    return {"grammar": grammar_of(structured_outputs({"json": prompt.schema}))}


def is_valid(prompt: SkillPrompt, answer: str) -> bool:
    """True if each call names a tool of the prompt and fits its parameters, or if the object fits
    the schema."""
    try:
        if not prompt.tools:
            jsonschema.validate(json.loads(answer), json.loads(prompt.schema))
            return True
        functions = {tool["function"]["name"]: tool["function"] for tool in prompt.tools}
        content, calls = parse_answer(answer)
        for name, arguments in calls:
            jsonschema.validate(arguments, functions[name].get("parameters", {}))
        return bool(calls) and not content
    except (ValueError, KeyError, jsonschema.ValidationError):
        return False


def measure(llm: LLM, folder: Path, prompts: Sequence[SkillPrompt], temperature: float) -> Counts:
    """Generates the answers of all prompts at once, and counts them."""
    turns = ModelTurns(Tokenizer.load(folder))
    params = [
        SamplingParams(
            temperature=temperature,
            seed=number,
            max_tokens=MAX_SKILL_TOKENS,
            skip_special_tokens=False,
            logit_rules=rules_of(prompt, turns),
        )
        for number, prompt in enumerate(prompts)
    ]
    outputs = llm.generate([prompt.prompt for prompt in prompts], params)
    counts = Counts(len(prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        choice = output.outputs[0]
        if choice.finish_reason == "length":
            counts.num_cut += 1
            continue
        answer = choice.text.removesuffix("<|end|>")
        counts.num_valid += is_valid(prompt, answer)
        counts.num_right += is_right(prompt, answer)
    return counts


def prompts_of(skill: str, seed: int, num: int) -> list[SkillPrompt]:
    """Draws `num` prompts of "tools", or of "objects" with a schema."""
    drawn = skill_prompts(skill, seed, num if skill == "tools" else 3 * num)
    return [prompt for prompt in drawn if prompt.tools or prompt.schema][:num]


def main() -> int:
    parser = argparse.ArgumentParser(description="measure the demo model's answers with grammars")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num", type=int, default=300, help="number of prompts per kind of task")
    parser.add_argument("--seed", type=int, default=12345)
    args = parser.parse_args()
    llm = LLM(str(args.model), device=args.device)
    is_good = True
    for skill in ("tools", "objects"):
        prompts = prompts_of(skill, args.seed, args.num)
        for temperature in TEMPERATURES:
            counts = measure(llm, args.model, prompts, temperature)
            is_good &= counts.is_good
            print(
                f"{skill}, temperature {temperature:g}: {counts.num_valid} valid and "
                f"{counts.num_right} right of {counts.num} ({counts.num_cut} cut by max_tokens)"
            )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
