"""How a mixture of experts chooses: facts of a model, as its configuration says them.

Torch-free: models/config.py holds one too.
"""

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True)
class Routing:
    """Each row goes to the `top_k` experts of the highest scores; of equal ones to the lower.

    scoring: of the router's logits, in float32. normalize: the weights of the chosen are divided by
    their sum. scaling: and multiplied by this. With num_groups above 1 the experts stand in groups
    one after another, and only those of the best `top_groups` may be chosen; group_score: a group
    counts as its best expert, or as its best two together. num_shared: behind the `num_experts`
    stand so many more that every row goes to, with weight 1.
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
                f"num_experts_per_tok={self.top_k} must not be above the experts of topk_group="
                f"{self.top_groups} groups of {self.group_size}"
            )
        if self.group_score == "top2" and self.group_size < 2:
            raise ValueError(
                f"n_group={self.num_groups}: groups of one expert have no best two: it must leave "
                "at least two experts a group"
            )

    @property
    def num_places(self) -> int:
        """To how many experts a row goes."""
        return self.top_k + self.num_shared

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups
