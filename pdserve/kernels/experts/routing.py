"""The way in which a mixture of experts chooses: facts of a model, from its configuration.

This file needs no torch, because models/config.py holds a Routing.
"""

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True)
class Routing:
    """Rules by which each row goes to the `top_k` experts with the highest scores. Of equal scores,
    the lower number wins.

    num_experts: number of experts, without the shared ones.
    scoring: how scores are made of the router's logits, in float32.
    normalize: the weights of the chosen experts are divided by their sum.
    scaling: the weights are then multiplied by this.
    num_groups: if above 1, experts form groups of neighbours, and only those in the best
        `top_groups` groups may be chosen.
    group_score: a group counts as its best expert (max), or as the sum of its best two (top2).
    num_shared: number of further experts, after the `num_experts`, that every row goes to with
        weight 1.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    num_shared: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.top_k} must be from 1 to the {self.num_experts} experts"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(
                f"n_group={self.num_groups} must divide the {self.num_experts} experts"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"topk_group={self.top_groups} must be from 1 to n_group={self.num_groups}"
            )
        if self.top_k > self.top_groups * self.group_size:
            raise ValueError(
                f"num_experts_per_tok={self.top_k} must not be above the number of experts in "
                f"topk_group={self.top_groups} groups of {self.group_size}"
            )
        if self.group_score == "top2" and self.group_size < 2:
            raise ValueError(
                f"n_group={self.num_groups}: groups of one expert have no best two; n_group must "
                "leave at least two experts per group"
            )

    @property
    def num_places(self) -> int:
        """Number of experts that a row goes to."""
        return self.top_k + self.num_shared

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups
