"""How long a step of this engine takes, learned from the steps that it has done.

Decode-only steps (CUDA graphs) and steps with prompt rows (eager) have a fit of their own, each of
which forgets only with samples of its kind: an hour of decoding takes nothing from what is known of
prompts. Knows no clock and no sequences. Fed and asked by `pace.Pace`.

    decode-only:  fixed + a x decodes + b x context
    with prompts: fixed + c x rows + d x rows above KNEE + e x context + f x attended
"""

import math
from dataclasses import dataclass

from pdserve.engine.pacing.least_squares import Fit

# Rows that an 8B model computes on an H200 while their step is launched: 23 us a row, 9 ms. Reading
# the weights takes as long as computing with them at 206. On other devices both slopes come out
# equal.
KNEE = 384
KEPT_DECODE = 0.98  # share of the weight that is left when a sample is added: the last 50 count
KEPT_MIXED = 0.99  # the last 100: more terms, and fewer steps of this kind
REFIT_EVERY = 8  # samples; the first ones are fitted at once
CLIP = 3.0  # a sample is taken for at most so many times its prediction, and at least for 1/CLIP
LEANS_UNTIL = 32  # samples with prompts: before, what decodes take says much about them
SURE_FROM = 8  # samples of a kind from which on they are clipped
FIRST_ROWS = 256  # prompt rows of the first step beside decodes, when nothing is known
GROWTH = 2  # no step has more times the prompt rows of the largest lately
LATELY = 0.995  # what is left of the largest one after a further sample
FIXED_SHARE = 0.2  # of the first sample's time: the part that its rows did not cause
# A chunk is efficient when each of its rows costs at most a tenth more than a row of a long one. An
# H200 launches a step with prompts in 9 ms however few its rows are, 4 more than a graph of decodes
# takes, and computes 384 rows behind those launches: so 256 rows cost 15 us each, 2,048 cost 20.
WASTE = 1 / 10
LEAST_EFFICIENT, MOST_EFFICIENT = 128, 512
ERROR_KEPT = 0.98


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes in its busiest home. context_tokens: rows of the KV cache that its
    decodes read. attended: sum over prompt chunks of rows x mean context of a row."""

    num_prompt_rows: int = 0
    num_decodes: int = 0
    context_tokens: int = 0
    attended: float = 0.0

    @property
    def num_rows(self) -> int:
        return self.num_prompt_rows + self.num_decodes

    def with_prompt(self, num_rows: int, start: int) -> "StepLoad":
        """This load and a chunk of a prompt of which `start` rows are computed."""
        return StepLoad(
            self.num_prompt_rows + num_rows,
            self.num_decodes,
            self.context_tokens,
            self.attended + attended_by(num_rows, start),
        )


NOTHING = StepLoad()


def attended_by(num_rows: int, start: int) -> float:
    """Rows x mean context of a chunk that begins at position `start`."""
    return num_rows * (start + num_rows / 2)


class StepModel:
    """largest: prompt rows of the largest step lately. error: mean relative error of its latest
    predictions (0.1: 10 %)."""

    def __init__(self) -> None:
        self._decode = Fit(3, KEPT_DECODE)
        self._mixed = Fit(5, KEPT_MIXED)
        self._decode_terms = [0.0] * 3
        self._mixed_terms = [0.0] * 5
        self._first_decode = 0.0  # seconds
        self._reference = 0, 0.0  # prompt rows and seconds of the largest mixed step
        self.largest = 0.0
        self.error = 0.0

    @property
    def knows_decodes(self) -> bool:
        """Whether there was a decode-only step."""
        return self._decode.num_samples > 0

    @property
    def knows_prompts(self) -> bool:
        """Whether there was a step with prompt rows."""
        return self._mixed.num_samples > 0

    @property
    def most_rows(self) -> int:
        """Prompt rows that a step beside decodes may have: larger ones would be guesses."""
        return max(FIRST_ROWS, int(GROWTH * self.largest))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step of this load took so long; seconds must be above 0."""
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
        if load.num_prompt_rows > self._reference[0]:
            self._reference = load.num_prompt_rows, seconds
        self._mixed.add(_mixed_features(load), seconds)
        if _is_due(self._mixed.num_samples):
            self._mixed_terms = self._mixed.solve(self._mixed_prior())

    def _mixed_prior(self) -> list[float]:
        """The decodes' terms, and beyond them rows that all cost the same."""
        rows, seconds = self._reference
        fixed, row, context = self._decode_terms
        if not self.knows_decodes:
            fixed = FIXED_SHARE * seconds
        slope = max(0.0, seconds - fixed - row * rows) / rows
        # below the knee rows are nearly free, as decodes are; one step near it says little of them
        knows_both = rows > 2 * KNEE
        return [fixed, row, slope, context, 0.0] if knows_both else [fixed, slope, 0, context, 0]

    def decode_seconds(self, decodes: StepLoad) -> float:
        """Duration of a step of these decodes alone; 0 when there are none, or nothing is known."""
        return _dot(self._decode_terms, _decode_features(decodes)) if decodes.num_decodes else 0.0

    def seconds(self, load: StepLoad) -> float:
        """Duration of a step; with prompt rows never less than of its decodes alone."""
        alone = self.decode_seconds(load)
        if not load.num_prompt_rows:
            return alone
        return max(alone, _dot(self._mixed_terms, _mixed_features(load)))

    def row_seconds(self, decodes: StepLoad) -> float:
        """What one more decode, of the mean context, adds to a step."""
        _, row, context = self._decode_terms
        return row + context * decodes.context_tokens / max(1, decodes.num_decodes)

    def prompt_rows_within(self, seconds: float, decodes: StepLoad, start: int = 0) -> int:
        """Prompt rows that a step beside these decodes may have to take at most so long: of a
        prompt of which `start` rows are computed. At most `most_rows`; FIRST_ROWS when nothing is
        known."""
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
        return max(0, int(min(rows, self.most_rows)))

    def efficient_rows(self, decodes: StepLoad) -> int:
        """Prompt rows from which on a step beside these decodes wastes little: what it takes longer
        than without any is, for each row, at most a WASTE above what a row of a long prompt takes.
        """
        if not self.knows_prompts:
            return LEAST_EFFICIENT
        overhead = self.seconds(decodes.with_prompt(1, 0)) - self.decode_seconds(decodes)
        _, row, beyond, _, _ = self._mixed_terms
        below_knee = max(0, KNEE - decodes.num_decodes)
        most = (1 + WASTE) * (row + beyond)
        rows = _root(overhead, most - row, 0.0)  # where overhead + row * rows == most * rows
        if rows <= below_knee and beyond > row:
            rows = below_knee  # what is left below it is nearly free
        elif rows > below_knee:
            rows = max(below_knee, _root(overhead - beyond * below_knee, most - row - beyond, 0.0))
        return int(min(max(rows, LEAST_EFFICIENT), MOST_EFFICIENT))

    def prompt_seconds(self, num_tokens: int, most_rows: int) -> float:
        """Computing time of a prompt alone, in steps of most_rows; 0 when nothing is known."""
        if not self.knows_prompts:
            return 0.0
        whole, rest = divmod(num_tokens, most_rows)
        terms = self._mixed_terms
        total = terms[4] * attended_by(num_tokens, 0)
        total += whole * _dot(terms, _mixed_features(StepLoad(most_rows)))
        return total + (_dot(terms, _mixed_features(StepLoad(rest))) if rest else 0.0)


def _root(left: float, slope: float, curve: float) -> float:
    """The x >= 0 at which slope * x + curve * x^2 == left; 0 when left is below 0."""
    if left <= 0:
        return 0.0
    if not slope and not curve:
        return math.inf
    return 2 * left / (slope + math.sqrt(slope * slope + 4 * curve * left))


def _is_due(num_samples: int) -> bool:
    return num_samples <= REFIT_EVERY or not num_samples % REFIT_EVERY


def _decode_features(load: StepLoad) -> tuple[float, ...]:
    return 1.0, load.num_decodes, load.context_tokens


def _mixed_features(load: StepLoad) -> tuple[float, ...]:
    rows = load.num_prompt_rows + load.num_decodes
    return 1.0, rows, max(0, rows - KNEE), load.context_tokens, load.attended


def _dot(terms: list[float], features: tuple[float, ...]) -> float:
    return sum([term * feature for term, feature in zip(terms, features, strict=True)])
