"""Measures the demo model's recall with transformers alone: exact match of greedy answers to fresh
prompts.

Two measures of the same thing: `generate_answers` decodes token by token, as a server would;
`answers_match` runs one forward pass over prompt + right answer and asks whether every arg max
along the answer is the right token, which is equivalent for greedy decoding and fast enough to run
during training. Called by hand, by demo/train.py and the tests.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from demo.data import EOS, RecallPrompt
from demo.recall import MAX_ANSWER_TOKENS, THRESHOLD, length_bucket, recall_prompts, shares

MODEL_DIR = Path(__file__).parent / "pdserve-demo"


@torch.inference_mode()
def answers_match(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[RecallPrompt],
    batch_size: int = 32,
) -> list[bool]:
    """For each prompt, whether greedy decoding would give exactly the answer and then <|eos|>."""
    device = model.device
    matches: list[bool] = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        texts = tokenizer.encode_batch([p.prompt + p.answer + EOS for p in batch])
        width = max(len(text.ids) for text in texts)
        # Right padding needs no mask: with causal attention no real token sees the padding.
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
    """The greedy continuation of `ids` by transformers' `generate`, its end token included."""
    prompt = torch.tensor([ids], device=model.device)
    # transformers types `self` of generate as a mixin that its own model classes do not satisfy.
    output = model.generate(  # type: ignore[misc]
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
    """Greedy completions of at most 16 tokens, one prompt at a time, <|eos|> removed."""
    return [
        tokenizer.decode(complete(model, tokenizer.encode(p.prompt).ids, MAX_ANSWER_TOKENS))
        for p in tqdm(prompts, desc="recall", file=sys.stderr)
    ]


def load_model(folder: Path, device: str = "cpu") -> LlamaForCausalLM:
    """The stored weights, cast up to float32 as the CPU engine serves them."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()  # type: ignore[arg-type]  # transformers wraps `to` in an untyped decorator


def main() -> int:
    parser = argparse.ArgumentParser(description="recall of the demo model, by transformers alone")
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num", type=int, default=300)
    parser.add_argument("--seed", type=int, default=12345)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompts = recall_prompts(args.seed, args.num)
    answers = generate_answers(load_model(args.model, args.device), tokenizer, prompts)
    matches = [answer == p.answer for answer, p in zip(answers, prompts, strict=True)]
    print("by kind:  ", shares([p.kind for p in prompts], matches))
    print(
        "by tokens:",
        shares([length_bucket(len(tokenizer.encode(p.prompt).ids)) for p in prompts], matches),
    )
    accuracy = sum(matches) / len(matches)
    print(
        f"recall: {sum(matches)} of {len(matches)} = {accuracy:.4f} (seed {args.seed}, threshold "
        f"{THRESHOLD})"
    )
    return 0 if accuracy >= THRESHOLD else 1


if __name__ == "__main__":
    sys.exit(main())
