"""The room that a home has left in the step that is being planned: tokens, slots, and whether
another prompt may join.

The scheduler, its only user, makes new ones for each step.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.scheduling.home import Home
from pdserve.engine.scheduling.placing import DECODE_TOKENS, load_of
from pdserve.engine.scheduling.sequence import Sequence
from pdserve.engine.scheduling.step_plan import HomePlan

# A prompt of this length fills a GPU. Beside another prompt, both would only wait for each other.
LONG_PROMPT = 2048


@dataclass
class Room:
    """The rest of one home's capacity in a step. `open` counts the fields from is_open to load.

    A pace limits num_prompt_rows if it protects decodes. Then prompts are cut to fill that limit.
    """

    home: Home
    budget: int  # tokens that the home may still compute
    is_short: bool = False  # a running sequence lacked blocks
    is_open: bool = False  # more sequences may be admitted
    num_slots: int = 0  # sequences that may begin
    longest: int = 0  # rows of the largest chunk
    load: int = 0  # cost of its sequences in prompt tokens
    lacked_blocks: bool = False  # the last sequence that was not admitted lacked blocks
    num_prompt_rows: int = sys.maxsize  # rows that prompts may still compute
    is_paced: bool = False  # a pace limits num_prompt_rows
    chunk_rows: int = sys.maxsize  # maximum rows of a prompt that does not fit into the step anyway

    def open(self, running: Iterable[Sequence], plan: HomePlan, max_num_seqs: int) -> None:
        """Count what is left for sequences that wait. running: those of this home."""
        self.is_open = self.budget > 0 and not self.is_short
        self.load = self.home.num_reserved * DECODE_TOKENS
        forks = 0
        wide = 0
        for seq in running:
            forks += len(seq.pending_forks)
            self.load += load_of(seq)
            if not seq.is_complete:  # complete ones keep a slot while their last step is in flight
                wide += 1 + len(seq.pending_forks)
        self.num_slots = min(max_num_seqs - wide, self.home.num_free_slots - forks)
        self.longest = max((chunk.num_rows for chunk in plan.chunks.values()), default=0)

    def is_crowded(self, wanted: int) -> bool:
        """True if a chunk of `wanted` rows would have to be cut, or would only slow down another
        chunk."""
        if self.is_paced:
            return False
        return min(self.longest, wanted) > 1 and (
            wanted > self.budget or max(wanted, self.longest) >= LONG_PROMPT
        )

    def rows_for(self, wanted: int) -> int:
        """Number of rows, of those wanted by one sequence, that may be computed now."""
        if wanted == 1:
            return min(1, self.budget)
        rows = min(self.budget, self.num_prompt_rows)
        return wanted if wanted <= rows else min(rows, self.chunk_rows)

    def spend(self, num_rows: int) -> None:
        """Count rows that a sequence computes in this step."""
        self.budget -= num_rows
        self.is_open &= self.budget > 0
        self.longest = max(self.longest, num_rows)
        if num_rows > 1 and self.is_paced:
            self.num_prompt_rows -= num_rows

    def take(self, seq: Sequence, num_rows: int) -> None:
        """Count an admitted sequence and its rows in this step."""
        self.spend(num_rows)
        self.num_slots -= 1 + len(seq.pending_forks)
        self.load += load_of(seq)
