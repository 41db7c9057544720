"""A sample row is all that sampling knows of one choice while it keeps its slot.

Made by the planner for a choice's first sample in a slot, and asked anew at each step: nothing of
it is copied or looked up again while its sequence goes on. Knows neither logits nor device.
"""

from dataclasses import dataclass
from typing import Any

from pdserve.engine.grammars.grammar import Grammar
from pdserve.protocol.sampling_params import SamplingParams


@dataclass(eq=False)
class SampleRow:
    """One choice in one slot. stop_token_ids: those that end it.

    slot: 1..num_slots, the sequence's own from its first sample until it is released; no two rows
    of a step share one. token_ids: prompt and output so far, without tokens in flight; not copied,
    since a step must not cost more the longer its sequences are. position: of the token to sample
    among the generated ones, those in flight included; set at each step. states: of the rules that
    it asks for, by their place among all rules; set when it joins. grammar: the prototype of its
    request, where it has one. error: why nothing can be drawn for it, set by a rule that is staged;
    its request ends when the step is collected.
    """

    sampling: SamplingParams
    choice: int
    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    position: int = 0
    states: tuple[tuple[int, Any], ...] = ()
    grammar: Grammar | None = None
    error: str = ""

    @property
    def num_known(self) -> int:
        """Generated tokens whose values are known."""
        return len(self.token_ids) - self.num_prompt_tokens
