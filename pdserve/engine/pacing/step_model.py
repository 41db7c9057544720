"""Predicts how long a step of this engine takes, learned from the steps that it has done.

Decode-only steps and steps with prompt rows have separate fits, since they run by different CUDA
graphs, or by none. Each forgets only with samples of its own kind, so an hour of decoding loses
nothing that is known of prompts. Knows no clock and no sequences. Fed and asked by `pace.Pace`.

    decode-only:  fixed + a x decodes + b x context
    with prompts: fixed + c x rows + d x rows above KNEE + e x context + f x attended

The rows of a step with prompts are those of the CUDA graph to which it is padded, if there is one.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.graph_sizes import nearest_size
from pdserve.engine.pacing.least_squares import Fit
from pdserve.protocol.prompt_work import attended_by

# Number of rows that an 8B model computes on an H200 while their step is launched: 23 us per row,
# 9 ms. Reading the weights takes as long as computing with them at 206 rows. On other devices both
# slopes come out equal.
KNEE = 384
KEPT_DECODE = 0.98  # factor on the weight when a sample is added: the last 50 samples count
KEPT_MIXED = 0.99  # the last 100 count, because there are more terms and fewer steps of this kind
REFIT_EVERY = 8  # samples; the first ones are fitted at once
CLIP = 3.0  # a sample counts as at most CLIP times its prediction, and at least 1 / CLIP of it
LEANS_UNTIL = 32  # samples with prompts; before, the time of decodes says much about them
SURE_FROM = 8  # samples of a kind after which they are clipped
FIRST_ROWS = 256  # prompt rows of the first step with decodes, when nothing is known
GROWTH = 2  # a step has at most GROWTH times the prompt rows of the largest recent one
LATELY = 0.995  # factor on the size of the largest recent step, per sample
FIXED_SHARE = 0.2  # share of the first sample's time that its rows did not cause
# A chunk is efficient if each of its rows costs at most a tenth more than a row of a long chunk. An
# H200 launches a step with prompts in 9 ms however few its rows are, 4 more than a graph of decodes
# takes. It computes 384 rows during those launches. So 256 rows cost 15 us each, 2,048 cost 20.
WASTE = 1 / 10
LEAST_EFFICIENT, MOST_EFFICIENT = 128, 512
# A chunk of about KNEE rows is tried after EXPLORED samples without one. No other sample shows that
# rows below the knee are nearly free.
NEAR_KNEE = (0.75, 1.5)
EXPLORED = 8
ERROR_KEPT = 0.98


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of a step in its busiest home."""

    num_prompt_rows: int = 0
    num_decodes: int = 0
    context_tokens: int = 0  # rows of the KV cache that the decodes read
    attended: float = 0.0  # sum over prompt chunks of rows x mean context of a row

    @property
    def num_rows(self) -> int:
        return self.num_prompt_rows + self.num_decodes

    def with_prompt(self, num_rows: int, start: int) -> "StepLoad":
        """This load plus a chunk of a prompt that has `start` rows computed."""
        return StepLoad(
            self.num_prompt_rows + num_rows,
            self.num_decodes,
            self.context_tokens,
            self.attended + attended_by(num_rows, start),
        )


NOTHING = StepLoad()


class StepModel:
    """The fits for both kinds of steps.

    graph_rows: numbers of rows to which smaller steps with prompts are padded, in order.
    most_pair_tokens: limit of pair_tokens. The first samples may take all of their time for
    attention.
    largest: prompt rows of the largest recent step.
    error: mean relative error of recent predictions (0.1: 10 %).
    """

    def __init__(self, graph_rows: Sequence[int] = (), most_pair_tokens: float = math.inf) -> None:
        self._graph_rows = graph_rows
        self._most_pair_tokens = most_pair_tokens
        self._decode = Fit(3, KEPT_DECODE)
        self._mixed = Fit(5, KEPT_MIXED)
        self._decode_terms = [0.0] * 3
        self._mixed_terms = [0.0] * 5
        self._first_decode = 0.0  # seconds
        self._reference = 0, 0.0  # prompt rows and seconds of the mixed step with most rows
        self._far_from_knee = 0  # mixed samples since the last one of about KNEE rows
        self.largest = 0.0
        self.error = 0.0

    @property
    def knows_decodes(self) -> bool:
        """True if there was a decode-only step."""
        return self._decode.num_samples > 0

    @property
    def knows_prompts(self) -> bool:
        """True if there was a step with prompt rows."""
        return self._mixed.num_samples > 0

    @property
    def knows_rows(self) -> bool:
        """True if some step had enough prompt rows to show how long one takes, and not only how
        long a step does."""
        return self._reference[0] >= LEAST_EFFICIENT

    @property
    def pair_tokens(self) -> float:
        """How many prompt tokens take as long as the attention between one pair of them, limited to
        most_pair_tokens; 0 if nothing is known."""
        _, row, beyond, _, attended = self._mixed_terms
        row += beyond
        return min(self._most_pair_tokens, attended / row) if row > 0 else 0.0

    @property
    def most_rows(self) -> int:
        """Maximum prompt rows of a step with decodes: a prediction for more would be a guess."""
        return max(FIRST_ROWS, int(GROWTH * self.largest))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn the duration of a step with this load; seconds must be above 0."""
        is_mixed = load.num_prompt_rows > 0
        fit = self._mixed if is_mixed else self._decode
        if fit.num_samples >= SURE_FROM:
            predicted = self.seconds(load)
            off = abs(predicted / seconds - 1)
            self.error = ERROR_KEPT * self.error + (1 - ERROR_KEPT) * min(off, 1.0)
            seconds = min(max(seconds, predicted / CLIP), predicted * CLIP)
        if is_mixed:
            self._observe_mixed(load, seconds)
        else:
            self._observe_decode(load, seconds)

    def _observe_decode(self, load: StepLoad, seconds: float) -> None:
        if not self._decode.num_samples:
            self._first_decode = seconds
        self._decode.add(_decode_features(load), seconds)
        if _is_due(self._decode.num_samples):
            self._decode_terms = self._decode.solve([self._first_decode, 0.0, 0.0])
            if 0 < self._mixed.num_samples < LEANS_UNTIL:
                self._mixed_terms = self._mixed.solve(self._mixed_prior())

    def _observe_mixed(self, load: StepLoad, seconds: float) -> None:
        self.largest = max(LATELY * self.largest, load.num_prompt_rows)
        low, high = NEAR_KNEE
        is_near = low * KNEE <= load.num_rows <= high * KNEE
        self._far_from_knee = 0 if is_near else self._far_from_knee + 1
        if load.num_prompt_rows > self._reference[0]:
            self._reference = load.num_prompt_rows, seconds
        self._mixed.add(self._mixed_features(load), seconds)
        if _is_due(self._mixed.num_samples):
            self._mixed_terms = self._mixed.solve(self._mixed_prior())

    def _mixed_prior(self) -> list[float]:
        """The terms of the decode fit, and prompt rows by the step with most of them."""
        rows, seconds = self._reference
        fixed, row, context = self._decode_terms
        if not self.knows_decodes:
            fixed = FIXED_SHARE * seconds
        if rows <= 2 * KNEE:  # says little of the rows above the knee
            slope = max(0.0, seconds - fixed - row * rows) / rows
            return [fixed, slope, 0.0, context, 0.0]
        # A long chunk computes its rows while the weights are read: it takes rows x slope.
        slope = seconds / rows
        fixed = min(fixed, slope * KNEE)
        beyond = fixed / KNEE
        return [fixed, slope - beyond, beyond, context, 0.0]

    def decode_seconds(self, decodes: StepLoad) -> float:
        """Duration of a step of these decodes alone; 0 if there are none or nothing is known."""
        return _dot(self._decode_terms, _decode_features(decodes)) if decodes.num_decodes else 0.0

    def seconds(self, load: StepLoad) -> float:
        """Duration of a step. With prompt rows it is at least that of the decodes alone."""
        alone = self.decode_seconds(load)
        if not load.num_prompt_rows:
            return alone
        return max(alone, _dot(self._mixed_terms, self._mixed_features(load)))

    def row_seconds(self, decodes: StepLoad) -> float:
        """Seconds that one more decode, with the mean context, adds to a step."""
        _, row, context = self._decode_terms
        return row + context * decodes.context_tokens / max(1, decodes.num_decodes)

    def prompt_rows_within(self, seconds: float, decodes: StepLoad, start: int = 0) -> int:
        """Prompt rows that a step with these decodes may have, if it is to take at most `seconds`.
        They continue a prompt that has `start` rows computed. At most `most_rows`; FIRST_ROWS if
        nothing is known. They fill the step's graph, if it has one."""
        if not self.knows_prompts:
            return FIRST_ROWS
        if self.decode_seconds(decodes) > seconds:
            return 0
        fixed, row, beyond, context, attended = self._mixed_terms
        num = decodes.num_decodes
        left = seconds - fixed - row * num - context * decodes.context_tokens
        slope = row + attended * start
        rows = _root(left, slope, attended / 2)
        if num + rows > KNEE:
            rows = max(
                KNEE - num, _root(left + beyond * (KNEE - num), slope + beyond, attended / 2)
            )
        return self.filling_rows(int(min(rows, self.most_rows)), decodes)

    def filling_rows(self, num_prompt_rows: int, decodes: StepLoad) -> int:
        """The most prompt rows, of these, that fill the graph of a step with these decodes; 0 if
        they fill none."""
        num = decodes.num_decodes
        rows = num + num_prompt_rows
        if not self._graph_rows or rows > self._graph_rows[-1]:
            return max(0, num_prompt_rows)
        index = bisect_right(self._graph_rows, rows)
        return max(0, self._graph_rows[index - 1] - num) if index else 0

    def efficient_rows(self, decodes: StepLoad) -> int:
        """Smallest number of prompt rows with which a step with these decodes wastes little. The
        time that the rows add is then, per row, at most WASTE above that of a row of a long prompt.
        """
        if not self.knows_prompts:
            return LEAST_EFFICIENT
        return int(min(max(self._efficient(decodes), LEAST_EFFICIENT), MOST_EFFICIENT))

    def longest_rows(self, decodes: StepLoad) -> int:
        """Number of prompt rows above which a chunk beside these decodes gains nothing: each row
        adds as much time as in shorter chunks, and streams get fewer tokens meanwhile. At least
        KNEE."""
        if not self.knows_prompts or self._far_from_knee >= EXPLORED:
            return KNEE
        return int(min(max(self._efficient(decodes), KNEE), self.most_rows))

    def _efficient(self, decodes: StepLoad) -> float:
        """See efficient_rows, which limits it."""
        _, row, beyond, _, _ = self._mixed_terms
        one = decodes.with_prompt(1, 0)
        overhead = self.seconds(one) - self.decode_seconds(decodes)
        overhead -= row * (self._padded(one.num_rows) - one.num_rows)
        below_knee = max(0, KNEE - decodes.num_decodes)
        most = (1 + WASTE) * (row + beyond)
        rows = _root(overhead, most - row, 0.0)  # solves overhead + row * rows == most * rows
        if rows > below_knee:
            return max(below_knee, _root(overhead - beyond * below_knee, most - row - beyond, 0.0))
        # the rows up to the knee are nearly free
        return below_knee if beyond > row else rows

    def _padded(self, num_rows: int) -> int:
        """The rows that a step with prompts computes."""
        return nearest_size(self._graph_rows, num_rows) or num_rows

    def _mixed_features(self, load: StepLoad) -> tuple[float, ...]:
        rows = self._padded(load.num_rows)
        return 1.0, rows, max(0, rows - KNEE), load.context_tokens, load.attended

    def prompt_seconds(self, num_tokens: int, most_rows: int) -> float:
        """Computing time of a prompt alone, in steps of most_rows; 0 if nothing is known."""
        if not self.knows_prompts:
            return 0.0
        whole, rest = divmod(num_tokens, most_rows)
        terms = self._mixed_terms
        total = terms[4] * attended_by(num_tokens, 0)
        total += whole * _dot(terms, self._mixed_features(StepLoad(most_rows)))
        return total + (_dot(terms, self._mixed_features(StepLoad(rest))) if rest else 0.0)


def _root(left: float, slope: float, curve: float) -> float:
    """Returns the x >= 0 with slope * x + curve * x^2 == left; 0 if left is below 0."""
    if left <= 0:
        return 0.0
    if not slope and not curve:
        return math.inf
    return 2 * left / (slope + math.sqrt(slope * slope + 4 * curve * left))


def _is_due(num_samples: int) -> bool:
    return num_samples <= REFIT_EVERY or not num_samples % REFIT_EVERY


def _decode_features(load: StepLoad) -> tuple[float, ...]:
    return 1.0, load.num_decodes, load.context_tokens


def _dot(terms: list[float], features: tuple[float, ...]) -> float:
    return sum([term * feature for term, feature in zip(terms, features, strict=True)])
