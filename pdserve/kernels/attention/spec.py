"""The values that attention takes: how a layer attends, and where the KV of a step's sequences is.

This file holds values alone. Specs come from the model, one per layer; `Paged` and `Prefills` come
from the step.
"""

from dataclasses import dataclass

from torch import Tensor

MAX_GROUP = 64
MAX_LATENT_GROUP = 128


@dataclass(frozen=True)
class AttentionSpec:
    """The way in which one layer attends.

    scale: factor of the scores, above 0.
    window: a query sees its own position and window - 1 before it; None: all.
    soft_cap: scaled scores s become soft_cap * tanh(s / soft_cap); None: they stay as they are.
    value_width: values are the first value_width columns of the keys' rows, and only these rows are
        stored; None: values have rows of their own.
    first_kv_head: number, among the layer's KV heads, of the first one here. No kernel reads it.
    has_sinks: the softmax of each query head has one more score, its sink, whose value is zero
        (gpt-oss).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    value_width: int | None = None
    first_kv_head: int = 0
    has_sinks: bool = False

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(
                f"scale must be above 0, not {self.scale}: the softmax subtracts its maximum "
                "before it scales"
            )
        most = MAX_GROUP if self.value_width is None else MAX_LATENT_GROUP
        if self.num_heads % self.num_kv_heads or self.num_heads // self.num_kv_heads > most:
            raise ValueError(
                f"num_heads must be 1 to {most} for each of the {self.num_kv_heads} KV heads, not "
                f"{self.num_heads} in all"
            )
        if self.value_width is not None and not 1 <= self.value_width <= self.head_dim:
            raise ValueError(
                f"value_width must be from 1 to head_dim {self.head_dim}, not {self.value_width}"
            )
        if self.value_width is not None and (self.num_kv_heads > 1 or not self.is_plain):
            raise ValueError(
                "with value_width there must be one KV head, no window, no soft_cap and no sinks: "
                "no kernel attends otherwise"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, or None, not {self.window}")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be above 0, or None, not {self.soft_cap}")

    @property
    def planes(self) -> int:
        """Rows that a token stores for each KV head: K and V, or one row that is both."""
        return 2 if self.value_width is None else 1

    @property
    def row_width(self) -> int:
        return self.head_dim

    @property
    def out_width(self) -> int:
        """Columns of the result of one query head."""
        return self.head_dim if self.value_width is None else self.value_width

    @property
    def is_plain(self) -> bool:
        """True if every query sees all keys up to its own, by scaled scores alone."""
        return self.window is None and self.soft_cap is None and not self.has_sinks


@dataclass(frozen=True)
class Paged:
    """Sequences whose KV is stored in blocks.

    tables: int32 `[num_slots, max_blocks]`; entries past a context may be anything.
    rows: int32 `[S]`; sequence s has row rows[s] of tables.
    context_lens: int32 `[S]`, KV rows including this step's.
    longest: an upper bound of context_lens.
    """

    tables: Tensor
    rows: Tensor
    context_lens: Tensor
    longest: int


@dataclass(frozen=True)
class Prefills:
    """Sequences with several queries each. These are the last positions of the context.

    query_starts: int32 `[S + 1]`. Sequence s has rows query_starts[s] : query_starts[s + 1] of q;
        rows from query_starts[-1] on are padding.
    max_query_len: an upper bound of the number of queries of a sequence.
    chunks: for each sequence (number of rows of its context before the queries, number of queries);
        () if the host does not know them.
    """

    paged: Paged
    query_starts: Tensor
    max_query_len: int
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def fresh_lens(self) -> tuple[int, ...]:
        """Number of queries of each sequence if all are whole contexts, so that all keys are rows
        of this step; else ()."""
        if any(before for before, _ in self.chunks):
            return ()
        return tuple(length for _, length in self.chunks)

    @property
    def prefix_len(self) -> int:
        """Number of rows before the queries if there is one sequence, else 0."""
        return self.chunks[0][0] if len(self.chunks) == 1 else 0
