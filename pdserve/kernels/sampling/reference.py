"""Turns logits into tokens, in plain torch: draws, filters, edits, penalties, masks,
log-probabilities."""

import torch
from torch import Tensor

NEG_INF = float("-inf")
MASK_32 = 0xFFFFFFFF
IN_PROMPT = 1 << 30  # a flag in the counts of apply_penalties


def draw_tokens(
    logits: Tensor,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    cut: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Draws one token id per row of logits [R, V] (float32, float16, bfloat16): int32 [R].

    temperature: float32 [R]; None: 0 for all. A row with 0 takes its best logit, and the lowest id
        of equal ones. Above 0 the token is drawn from softmax(logits / temperature) by the
        Gumbel-max trick: argmax(logits / temperature + gumbel).
    keys: int32 [R], which fix the noise of each row (engine.sampling.randomness).
    cut: from `cut_tokens`, limits the tokens to draw from.
    """
    if temperature is None:
        return logits.argmax(dim=-1).int()
    assert keys is not None, "a draw needs the rows' keys"
    drawn = (temperature > 0).nonzero()[:, 0]
    tokens = (
        logits.argmax(dim=-1)
        if len(drawn) < len(logits)
        else logits.new_empty(len(logits), dtype=torch.int64)
    )
    if len(drawn) < len(logits):
        logits = logits[drawn]
        temperature = temperature[drawn]
        keys = keys[drawn]
        cut = cut and (cut[0][drawn], cut[1][drawn])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    scores = logits.float() / temperature[:, None] + gumbel(keys, ids)
    if cut is not None:
        value = cut[0][:, None]
        last = cut[1][:, None]
        scores.masked_fill_((logits < value) | ((logits == value) & (ids > last)), NEG_INF)
    tokens[drawn] = scores.argmax(dim=-1)
    return tokens.int()


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise, float32 `[rows, tokens]`, for the 32-bit row keys `[rows]` and
    global token ids `[tokens]`. It is a fixed function of both, so a part of the vocabulary gets
    its part of the noise.

    argmax(log p + noise) draws from p (Gumbel-max). Two chained mixes per token give 32 random
    bits, even for keys that differ in few bits.
    """
    wide = keys.long()[:, None] & MASK_32
    bits = mix_32(wide ^ mix_32(token_ids.long() * 0x9E3779B1 + 0x165667B1 & MASK_32)[None, :])
    bits = mix_32(bits + wide & MASK_32)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(uniform))).to(torch.float32)


def mix_32(h: Tensor) -> Tensor:
    """Mixes 32-bit numbers (a finaliser in the style of Wang's lowbias32) in int64 words. Products
    wrap, and their low 32 bits are exact everywhere.
    """
    h = (h ^ (h >> 16)) * 0x7FEB352D & MASK_32
    h = (h ^ (h >> 15)) * 0x846CA68B & MASK_32
    return h ^ (h >> 16)


def cut_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns where each row of logits [R, V] ends: (value float32 [R], last int32 [R]). top_k is
    applied first, then top_p to what is left, then min_p.

    A row keeps the tokens whose logit is above `value`, and those equal to it with an id up to
    `last`: equal logits are ordered by their ids. At least one token stays. A row of temperature 0
    keeps all.
    top_k: int32 [R], 1..V (V: off), number of tokens.
    top_p: float32 [R], in (0, 1] (1: off). The smallest set, best first, stays whose probability at
        `temperature` reaches it.
    min_p: float32 [R] (0: off). Tokens stay that have at least this share of the best token's
        probability.
    """
    vocab = logits.shape[-1]
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    positions = torch.arange(vocab, device=logits.device)[None, :]
    outside = positions >= top_k[:, None]
    probs = torch.softmax(ordered.masked_fill(outside, NEG_INF), dim=-1)
    before = probs.cumsum(dim=-1) - probs
    outside |= (before >= top_p[:, None]) & (top_p[:, None] < 1.0)
    outside |= ordered < ordered[:, :1] + torch.log(min_p)[:, None]
    outside &= (temperature > 0)[:, None]
    num_kept = (~outside).sum(dim=-1, keepdim=True).clamp_(min=1)
    last = index.gather(1, num_kept - 1)
    return logits.gather(1, last)[:, 0].float(), last[:, 0].int()


def apply_edits(logits: Tensor, slots: Tensor, counts: Tensor, ids: Tensor, values: Tensor) -> None:
    """Adds values to single logits float32 [R, V], in place.

    slots: int32 [R], the slot of each row, or 0 for a row without edits.
    counts: int32 [slots], number of edits of each slot.
    ids: int32 [slots, W]; the first entries of a slot are the tokens of its edits, all distinct.
    values: float32 [slots, W], what is added to the logits of these tokens.
    """
    rows = slots.nonzero()[:, 0]
    of_slot = slots[rows].long()
    edits = counts[of_slot].long()
    behind = edits.cumsum(0) - edits
    starts = (of_slot * ids.shape[1] - behind).repeat_interleave(edits)
    entries = starts + torch.arange(len(starts), device=logits.device)
    at = rows.repeat_interleave(edits) * logits.shape[1] + ids.view(-1)[entries]
    logits.view(-1).index_add_(0, at, values.view(-1)[entries])


def apply_penalties(
    logits: Tensor,
    counts: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Applies penalties to logits float32 [R, V], in place. The order is vLLM's: repetition, then
    frequency and presence.

    counts: int32 [slots, V]. How often the output of a slot holds each token, plus IN_PROMPT if its
        prompt does.
    slots: int32 [R], the slot of each row, or 0 for a row without penalties.
    repetition: float32 [R] (1: off). Divides positive logits and multiplies negative ones, for all
        tokens of prompt and output.
    frequency: float32 [R] (0: off). Subtracted from the logits of output tokens, times their count.
    presence: float32 [R] (0: off). Subtracted once from the logits of output tokens.
    """
    counted = counts.index_select(0, slots.long()).masked_fill_((slots == 0)[:, None], 0)
    rows, ids = counted.nonzero(as_tuple=True)
    amounts = (counted[rows, ids] & (IN_PROMPT - 1)).float()
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition[rows], values * repetition[rows])
    penalties = frequency[rows] * amounts + presence[rows]
    logits[rows, ids] = torch.where(amounts > 0, values - penalties, values)


def apply_token_mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Sets the logits of tokens that are not allowed to -inf, in place.

    logits: float32 [R, V].
    rows: int32 [M], distinct rows; all others stay as they are.
    words: int32 [M, ceil(V / 32)], the masks of these rows. Bit t % 32 of word t // 32 is set if
        token t is allowed; bits beyond V are ignored.
    """
    at = rows.long()
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (words[:, :, None] >> places & 1).flatten(1).bool()[:, : logits.shape[1]]
    logits[at] = logits[at].masked_fill_(~allowed, NEG_INF)


def token_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the log-probabilities of `tokens` (int32 or int64 [R]) under logits [R, V] in
    float32, and the likeliest tokens.

    The result is (log-probabilities float32 [R], ranks int32 [R] (1 for the best), the best
    log-probabilities float32 [R, num_top], their ids int64 [R, num_top]), best first.
    """
    logp = torch.log_softmax(logits.float(), dim=-1)
    chosen = logp.gather(1, tokens.long()[:, None])
    ranks = (logp > chosen).sum(dim=-1) + 1
    values, ids = logp.topk(num_top, dim=-1)
    return chosen[:, 0], ranks.int(), values, ids
