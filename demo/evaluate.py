"""Measures the demo model with transformers alone, on fresh prompts: recall, and with --tools calls
of tools, answers from their results, JSON and reasoning.

There are two ways to measure the same. `generate_answers` decodes token by token, as a server does.
`answers_match` runs one forward pass over the prompt and the right answer, and checks that every
arg max along the answer is the right token. This is equivalent for greedy decoding, and fast enough
for use during training. This module is run by hand, by demo/train.py and by the tests.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from demo.data import END, EOS, RecallPrompt
from demo.recall import MAX_ANSWER_TOKENS, THRESHOLD, length_bucket, recall_prompts, shares
from demo.skills import (
    MAX_SKILL_TOKENS,
    SKILLS,
    TOOLS_THRESHOLD,
    SkillPrompt,
    is_right,
    skill_prompts,
)

MODEL_DIR = Path(__file__).parent / "pdserve-demo"


@torch.inference_mode()
def answers_match(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[RecallPrompt | SkillPrompt],
    end: str = EOS,
    batch_size: int = 32,
) -> list[bool]:
    """Returns for each prompt whether greedy decoding gives exactly the answer and then `end`."""
    device = model.device
    matches: list[bool] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = tokenizer.encode_batch([p.prompt + p.answer + end for p in batch])
        width = max(len(text.ids) for text in texts)
        # Right padding needs no mask, because with causal attention no real token sees it.
        ids = torch.tensor(
            [text.ids + [0] * (width - len(text.ids)) for text in texts], device=device
        )
        predicted = model(input_ids=ids, use_cache=False).logits.argmax(-1)  # [batch, width]
        for i, p in enumerate(batch):
            first = len(tokenizer.encode(p.prompt).ids)
            last = len(texts[i].ids)
            matches.append(
                bool(torch.equal(predicted[i, first - 1 : last - 1], ids[i, first:last]))
            )
    return matches


@torch.inference_mode()
def complete(model: LlamaForCausalLM, ids: list[int], max_new_tokens: int) -> list[int]:
    """Returns the greedy continuation of `ids` by transformers' `generate`, including its end
    token."""
    prompt = torch.tensor([ids], device=model.device)
    # transformers types `self` of generate as a mixin that its own model classes do not satisfy.
    output = cast(Any, model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    assert isinstance(output, Tensor)  # [1, prompt + new]
    continuation: list[int] = output[0, len(ids) :].tolist()
    return continuation


def generate_answers(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: Sequence[RecallPrompt]
) -> list[str]:
    """Generates greedy completions of at most 16 tokens, one prompt at a time, without <|eos|>."""
    return [
        tokenizer.decode(complete(model, tokenizer.encode(p.prompt).ids, MAX_ANSWER_TOKENS))
        for p in tqdm(prompts, desc="recall", file=sys.stderr)
    ]


def generate_replies(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: Sequence[SkillPrompt]
) -> list[str]:
    """Generates greedy replies with their delimiters, one prompt at a time, without <|end|>."""
    replies: list[str] = []
    for p in tqdm(prompts, desc="skills", file=sys.stderr):
        ids = complete(model, tokenizer.encode(p.prompt).ids, MAX_SKILL_TOKENS)
        reply = tokenizer.decode(ids, skip_special_tokens=False)
        replies.append(reply.removesuffix(END))
    return replies


def load_model(folder: Path, device: str = "cpu") -> LlamaForCausalLM:
    """Loads the stored weights as float32, as the CPU engine does."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # transformers wraps `to` in an untyped decorator.
    return model.to(device).eval()  # type: ignore[arg-type]


def recall(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, num: int) -> bool:
    """Prints the recall of `num` prompts. Returns True if it reaches THRESHOLD."""
    prompts = recall_prompts(seed, num)
    answers = generate_answers(model, tokenizer, prompts)
    matches = [answer == p.answer for answer, p in zip(answers, prompts, strict=True)]
    print("by kind:  ", shares([p.kind for p in prompts], matches))
    lengths = [length_bucket(len(tokenizer.encode(p.prompt).ids)) for p in prompts]
    print("by tokens:", shares(lengths, matches))
    accuracy = sum(matches) / len(matches)
    print(
        f"recall: {sum(matches)} of {len(matches)} = {accuracy:.4f} (seed {seed}, threshold "
        f"{THRESHOLD})"
    )
    return accuracy >= THRESHOLD


def skills(
    model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, num: int, num_misses: int
) -> bool:
    """Prints the share of right answers to `num` prompts of each skill, and the first misses.
    Returns True if calls of tools reach TOOLS_THRESHOLD."""
    accuracy: dict[str, float] = {}
    for skill in SKILLS:
        prompts = skill_prompts(skill, seed, num)
        replies = generate_replies(model, tokenizer, prompts)
        matches = [is_right(p, reply) for p, reply in zip(prompts, replies, strict=True)]
        results = list(zip(prompts, replies, matches, strict=True))
        misses = [(p, reply) for p, reply, match in results if not match]
        for p, reply in misses[:num_misses]:
            print(f"miss:\n{p.prompt}\n  right: {p.answer!r}\n  model: {reply!r}")
        accuracy[skill] = sum(matches) / len(matches)
        print(f"{skill} by kind:", shares([p.kind for p in prompts], matches))
        print(f"{skill}: {sum(matches)} of {len(matches)} = {accuracy[skill]:.4f} (seed {seed})")
    return accuracy["tools"] >= TOOLS_THRESHOLD


def main() -> int:
    parser = argparse.ArgumentParser(
        description="measure the demo model's answers with transformers alone"
    )
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num", type=int, default=300, help="number of prompts per kind of task")
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument(
        "--tools", action="store_true", help="measure tools, JSON and reasoning instead of recall"
    )
    parser.add_argument(
        "--misses", type=int, default=0, help="with --tools: number of wrong answers to print"
    )
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load_model(args.model, args.device)
    if args.tools:
        return 0 if skills(model, tokenizer, args.seed, args.num, args.misses) else 1
    return 0 if recall(model, tokenizer, args.seed, args.num) else 1


if __name__ == "__main__":
    sys.exit(main())
