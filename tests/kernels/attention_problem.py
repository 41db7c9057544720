"""Random paged-attention inputs with everything a kernel must not read set to NaN, and their
float64 answer.

Shared by the tests of both implementations; knows neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from pdserve.kernels.attention.ops import AttentionOps
from pdserve.kernels.attention.spec import AttentionSpec, Paged, Prefills

NO_BLOCK = -(2**20)  # table entries past the context: following one is a wild read


@dataclass
class PagedProblem:
    """Sequences whose last query_lens[s] of context_lens[s] positions are queries.

    kv: one layer [num_blocks, Hk, 2, block_size, D] of a KV cache; q [T, Hq, D]. keys[s] and
    values[s]: [context, Hk, D].
    """

    q: Tensor
    kv: Tensor
    block_tables: Tensor
    table_rows: Tensor
    context_lens: Tensor
    query_starts: Tensor
    max_query_len: int
    scale: float
    keys: list[Tensor]
    values: list[Tensor]
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None

    @property
    def query_lens(self) -> list[int]:
        return self.query_starts.diff().tolist()

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.q.shape[1],
            self.kv.shape[1],
            self.q.shape[2],
            self.scale,
            self.window,
            self.soft_cap,
            has_sinks=self.sinks is not None,
        )

    @property
    def paged(self) -> Paged:
        longest = int(self.context_lens.max())
        return Paged(self.block_tables, self.table_rows, self.context_lens, longest)

    @property
    def prefills(self) -> Prefills:
        return Prefills(self.paged, self.query_starts, self.max_query_len)

    def decode(self, ops: AttentionOps, out: Tensor | None = None) -> Tensor:
        return ops.decode(self.q, self.kv, self.paged, self.spec, out, None, self.sinks)

    def prefill(self, ops: AttentionOps, out: Tensor | None = None) -> Tensor:
        """By the paged kernel: no k and v of the step are known."""
        none = self.q[:0]
        args = self.prefills, self.spec, out, None, self.sinks
        return ops.prefill(self.q, none, none, self.kv, *args)

    def make_all_scores(self, score: float) -> None:
        """Sets every query and key so that each seen score is exactly `score`, an integer: outputs
        are plain means."""
        self.q.fill_(1.0)
        keys = self.kv[:, :, 0]
        keys.sub_(keys).add_(score)  # what is NaN stays so
        for rows in self.keys:
            rows.fill_(score)
        self.scale = 1 / self.q.shape[2]

    def answer(self) -> Tensor:
        """Causal attention in float64 [T, Hq, D]; zeros for padding rows and empty contexts."""
        out = torch.zeros(self.q.shape, dtype=torch.float64, device=self.q.device)
        group = self.q.shape[1] // self.kv.shape[1]
        for seq, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            rows = slice(int(self.query_starts[seq]), int(self.query_starts[seq + 1]))
            q, k, v = (x.double().transpose(0, 1) for x in (self.q[rows], keys, values))
            if len(keys) == 0:
                continue
            k = k.repeat_interleave(group, 0)
            v = v.repeat_interleave(group, 0)
            positions = torch.arange(len(keys), device=q.device)
            own = positions[-q.shape[1] :, None]
            hidden = positions > own
            if self.window is not None:
                hidden |= positions <= own - self.window
            scores = q @ k.transpose(1, 2) * self.scale
            if self.soft_cap is not None:
                scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.sinks is not None:
                beside = self.sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
                scores = torch.cat((scores, beside), -1)
            out[rows] = (scores.softmax(-1)[..., : len(keys)] @ v).transpose(0, 1)
        return out


def paged_problem(
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    contexts: Sequence[int],
    query_lens: Sequence[int] | None = None,
    padding: int = 0,
    device: str = "cpu",
) -> PagedProblem:
    """`heads` is (Hq, Hk). Without query_lens each sequence has one query. q is a slice of a fused
    QKV tensor."""
    num_heads, num_kv_heads = heads
    query_lens = query_lens or [1] * len(contexts)
    num_blocks = [-(-context // block_size) for context in contexts]
    pool_blocks = sum(num_blocks) + 2
    pool = torch.full(
        (pool_blocks, num_kv_heads, 3, 2, block_size, head_dim),
        float("nan"),
        dtype=dtype,
        device=device,
    )
    kv = pool[:, :, 1]
    free = (torch.randperm(pool_blocks - 1) + 1).tolist()
    tables = torch.full((len(contexts) + 2, max(num_blocks) + 3), NO_BLOCK, dtype=torch.int32)
    table_rows = torch.randperm(len(tables), dtype=torch.int32)[: len(contexts)]
    keys = []
    values = []
    for seq, (context, blocks) in enumerate(zip(contexts, num_blocks, strict=True)):
        ids = torch.tensor([free.pop() for _ in range(blocks)], dtype=torch.int64)
        tables[table_rows[seq], :blocks] = ids
        k, v = (
            torch.randn(context, num_kv_heads, head_dim, device=device).to(dtype) for _ in range(2)
        )
        positions = torch.arange(context)
        for plane, rows in enumerate((k, v)):
            kv[
                ids[positions // block_size].to(device),
                :,
                plane,
                (positions % block_size).to(device),
            ] = rows
        keys.append(k)
        values.append(v)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = int(starts[-1]) + padding
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    fused[int(starts[-1]) :] = float("nan")
    return PagedProblem(
        q=fused[:, :num_heads],
        kv=kv,
        block_tables=tables.to(device),
        table_rows=table_rows.to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        query_starts=starts.to(device),
        max_query_len=max(query_lens),
        scale=head_dim**-0.5,
        keys=keys,
        values=values,
    )


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few tuples of one value an axis, in which every pair of values of two axes occurs; the same
    on every run.

    Greedy: each tuple starts from a pair still missing and takes, of 30 random completions, the one
    with most missing pairs.
    """
    random = Random(0)
    dims = [(i, j) for i in range(len(axes)) for j in range(i + 1, len(axes))]
    missing = {
        (i, j, a, b) for i, j in dims for a, b in product(range(len(axes[i])), range(len(axes[j])))
    }

    def covered(picks: list[int]) -> set[tuple[int, int, int, int]]:
        return {(i, j, picks[i], picks[j]) for i, j in dims} & missing

    cases = []
    while missing:
        i, j, a, b = min(missing)
        candidates = [[random.randrange(len(axis)) for axis in axes] for _ in range(30)]
        for picks in candidates:
            picks[i] = a
            picks[j] = b
        best = max(candidates, key=lambda picks: len(covered(picks)))
        missing -= covered(best)
        cases.append(tuple(axis[pick] for axis, pick in zip(axes, best, strict=True)))
    return cases
