"""The fixed parts of the recall measure: the prompts, the threshold, and the accuracy by group.

This module needs no torch, because benchmarks/cluster/recall.py asks a server and never loads the
model. That one, demo/evaluate.py, demo/train.py and the tests call it. It does not know who answers
the prompts.
"""

import random
from collections import defaultdict
from collections.abc import Sequence

from demo.data import MIN_RECALL_TOKENS, RecallPrompt, recall_prompt

MAX_PROMPT_TOKENS = 1500
MAX_ANSWER_TOKENS = 16
THRESHOLD = 0.97


def recall_prompts(
    seed: int, num_prompts: int, max_tokens: int = MAX_PROMPT_TOKENS
) -> list[RecallPrompt]:
    """Draws prompts of at most `max_tokens` tokens. Lengths are spread evenly, in random order."""
    if not 2 * MIN_RECALL_TOKENS <= max_tokens <= MAX_PROMPT_TOKENS:
        raise ValueError(
            f"max_tokens is {max_tokens}: choose {2 * MIN_RECALL_TOKENS} to {MAX_PROMPT_TOKENS}, "
            "the range that the model was trained for"
        )
    rng = random.Random(seed)
    return [
        recall_prompt(rng, rng.randint(MIN_RECALL_TOKENS, max_tokens - 10))
        for _ in range(num_prompts)
    ]


def shares(keys: Sequence[str], matches: Sequence[bool]) -> str:
    """Returns the accuracy by key as one line, such as "code 0.990 (75)  home 1.000 (70)"."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for key, match in zip(keys, matches, strict=True):
        groups[key].append(match)
    return "  ".join(
        f"{key} {sum(groups[key]) / len(groups[key]):.3f} ({len(groups[key])})"
        for key in sorted(groups)
    )


def length_bucket(num_tokens: int) -> str:
    """Returns the range of 250 tokens that a prompt falls in, such as "0500-0749"."""
    low = num_tokens // 250 * 250
    return f"{low:04d}-{low + 249:04d}"
