"""A sample row holds all that sampling knows of one choice while it keeps its slot.

The planner makes it for a choice's first sample in a slot and uses it at each step. Nothing in it
is copied or looked up again while its sequence continues. Knows neither logits nor device.
"""

from dataclasses import dataclass
from typing import Any

from pdserve.engine.grammars.grammar import Grammar
from pdserve.protocol.sampling_params import SamplingParams


@dataclass(eq=False)
class SampleRow:
    """One choice in one slot."""

    sampling: SamplingParams
    choice: int
    # 1..num_slots. The sequence keeps it from its first sample until it is released; no two rows of
    # a step share one.
    slot: int
    # Prompt and output so far, without tokens in flight. The list is not copied: the cost of a step
    # must not grow with the length of its sequences.
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]  # tokens that end the choice
    # Index of the token to sample among the generated tokens, including those in flight. Set at
    # each step.
    position: int = 0
    # States of the rules that the row asks for, with each rule's index; set when the row joins.
    states: tuple[tuple[int, Any], ...] = ()
    grammar: Grammar | None = None  # the prototype of its request, if it has one
    # Why nothing can be drawn for it. A rule sets it while it is staged; the request ends when the
    # step is collected.
    error: str = ""

    @property
    def num_known(self) -> int:
        """Number of generated tokens whose values are known."""
        return len(self.token_ids) - self.num_prompt_tokens
