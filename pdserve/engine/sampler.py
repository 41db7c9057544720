"""Turns logits into tokens and log-probabilities: bias, penalties, temperature, filters, and the Gumbel-max draw.

Rows are independent: a row's result does not depend on the batch it is in. Knows no blocks, no scheduling and no text.
Called by the model runner with one `SampleRow` a logits row.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.protocol import SamplingParams, TokenLogprob
from pdserve.engine.randomness import Purpose, gumbel, row_keys

NEG_INF = float("-inf")


@dataclass(frozen=True)
class SampleRow:
    """What sampling needs to know of one choice: its settings and tokens so far. Stop tokens are masked before
    min_tokens.

    token_ids: prompt and output; not copied, since a step must not cost more the longer its sequences are.
    """

    sampling: SamplingParams
    choice: int
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]

    @property
    def position(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def changes_logits(self) -> bool:
        s = self.sampling
        return bool(
            s.logit_bias
            or s.repetition_penalty != 1.0
            or s.presence_penalty
            or s.frequency_penalty
            or (self.position < s.min_tokens and self.stop_token_ids)
        )


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


def sample(logits: Tensor, rows: list[SampleRow]) -> list[Sampled]:
    """One token a row from `logits` `[rows, vocab]` of any dtype; log-probabilities are of the unchanged ones."""
    logits = logits.float()
    adjusted = _adjust(logits, rows)
    greedy = adjusted.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.sampling.greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        greedy[index] = _draw(adjusted[index], [rows[i] for i in drawn])
    tokens = greedy.tolist()
    wanted = [(i, row.sampling.logprobs) for i, row in enumerate(rows)]
    logprobs = token_logprobs(logits, tokens, [count for _, count in wanted])
    return [Sampled(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]


def token_logprobs(logits: Tensor, tokens: list[int], counts: list[int | None]) -> list[TokenLogprob | None]:
    """Log-probability and rank of each row's token, with the `counts[row]` likeliest alternatives; None where counts is
    None.
    """
    rows = [i for i, count in enumerate(counts) if count is not None]
    result: list[TokenLogprob | None] = [None] * len(tokens)
    if not rows:
        return result
    logp = torch.log_softmax(logits[rows].float(), dim=-1)
    chosen = logp.gather(1, torch.tensor([tokens[i] for i in rows], device=logits.device)[:, None])
    ranks = (logp > chosen).sum(dim=-1) + 1
    most = min(max(counts[i] or 0 for i in rows), logp.shape[-1])
    values, ids = logp.topk(most, dim=-1)
    packed = zip(rows, chosen[:, 0].tolist(), ranks.tolist(), values.tolist(), ids.tolist(), strict=True)
    for i, logprob, rank, top_values, top_ids in packed:
        top = tuple(zip(top_ids, top_values, strict=True))[: counts[i]]
        result[i] = TokenLogprob(tokens[i], logprob, rank, top)
    return result


def _adjust(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Logits with min_tokens, bias and penalties applied; the input itself when no row asks for any."""
    changed = [i for i, row in enumerate(rows) if row.changes_logits]
    if not changed:
        return logits
    logits = logits.clone()
    for i in changed:
        _adjust_row(logits[i], rows[i])
    return logits


def _adjust_row(logits: Tensor, row: SampleRow) -> None:
    """In place, `[vocab]`, in vLLM's order: bias, min_tokens, repetition, frequency and presence penalties."""
    s = row.sampling

    def ids(tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, dtype=torch.long, device=logits.device)

    if s.logit_bias:
        logits[ids(list(s.logit_bias))] += torch.tensor(list(s.logit_bias.values()), device=logits.device)
    if row.position < s.min_tokens and row.stop_token_ids:
        logits[ids(list(row.stop_token_ids))] = NEG_INF
    if s.repetition_penalty != 1.0:
        seen = ids(list(set(row.token_ids)))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.frequency_penalty or s.presence_penalty) and row.position:
        counts = Counter(row.token_ids[row.num_prompt_tokens :])
        amounts = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
        logits[ids(list(counts))] -= s.frequency_penalty * amounts + s.presence_penalty


def _draw(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """Gumbel-max draw from each row's filtered distribution; int64 `[rows]`."""
    device = logits.device
    temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32, device=device)
    scaled = _filter(logits / temperature[:, None], [row.sampling for row in rows])
    numbers = [(row.sampling.seed or 0, row.choice, row.position) for row in rows]
    seeds, choices, positions = torch.tensor(numbers, dtype=torch.int64, device=device).unbind(dim=1)
    keys = row_keys(seeds, choices, positions, Purpose.SAMPLE)
    return (scaled + gumbel(keys, torch.arange(logits.shape[-1], device=device))).argmax(dim=-1)


def _filter(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Scaled logits `[rows, vocab]` with -inf outside top_k, then top_p of what is left, then min_p."""
    vocab = logits.shape[-1]
    device = logits.device
    if any(0 < p.top_k < vocab for p in params) or any(p.top_p < 1.0 for p in params):
        logits = _top_k_top_p(logits, params, vocab)
    if any(p.min_p > 0.0 for p in params):
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device)
        floor = logits.max(dim=-1, keepdim=True).values + torch.log(min_p)[:, None]
        logits = logits.masked_fill(logits < floor, NEG_INF)
    return logits


def _top_k_top_p(logits: Tensor, params: list[SamplingParams], vocab: int) -> Tensor:
    """Keeps the top_k likeliest, of them the smallest set whose probability reaches top_p (at least one token)."""
    device = logits.device
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params], device=device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    outside = torch.arange(vocab, device=device)[None, :] >= top_k[:, None]
    probs = torch.softmax(ordered.masked_fill(outside, NEG_INF), dim=-1)
    before = probs.cumsum(dim=-1) - probs
    outside |= (before >= top_p[:, None]) & (top_p[:, None] < 1.0)
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(outside, NEG_INF))
