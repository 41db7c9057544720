"""StepTimes: seconds of any step, fitted to a profile's points.

- Decodes alone: straight lines between the measured batches and contexts.
- With prompts: base(rows) + k x pairs + e x earlier + c x keys, and + m if there are decodes.
  "rows" is that of the CUDA graph, if the step has one. "pairs" counts pairs of a row and an
  earlier token, minus those of one fresh prompt with as many rows. "earlier" counts the tokens
  before the prompts' parts: a short part deep in a prompt reads them with few programs. "keys"
  counts the tokens to which decodes attend.

All lines continue with their last slope. With fewer rows than the first point, a step with prompts
takes as long as the first point, because it cannot take less than its launches. Least squares give
c, k, e and m; for all but c, errors are relative, since some 0.3 ms is little of a long step. This
module knows no engine. The executor on paper calls it millions of times.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.engine.graph_sizes import nearest_size
from pdserve.plan.profile.profile import DecodePoint, Profile


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Rows of one home's step."""

    num_decodes: int
    num_keys: int  # tokens to which all its decodes attend
    # (tokens before it, rows) of each prompt's part
    chunks: Sequence[tuple[int, int]] = ()


class _Line:
    """A piecewise linear function through points. It is flat before the first point."""

    def __init__(self, points: dict[float, float]) -> None:
        self._xs = sorted(points)
        self._ys = [points[x] for x in self._xs]
        if len(self._xs) == 1:  # a single point has no slope
            self._xs.append(self._xs[0] + 1)
            self._ys.append(self._ys[0])

    def __call__(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        if x <= xs[0]:
            return ys[0]
        right = min(bisect_right(xs, x), len(xs) - 1)
        share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
        return ys[right - 1] + share * (ys[right] - ys[right - 1])


class StepTimes:
    """Step times of a profile. `host_s` and `spread` are those of the profile."""

    def __init__(self, profile: Profile) -> None:
        self.host_s = profile.host_s
        self.spread = profile.spread
        self._hot_factor = profile.hot_factor
        self._launch_s = profile.launch_s
        self.key_s = _key_s(profile.decodes)
        by_batch: dict[int, dict[float, float]] = defaultdict(dict)
        for point in profile.decodes:
            by_batch[point.batch][point.context] = point.seconds
        self._batches = sorted(by_batch)
        self._contexts = [
            _line_over_contexts(by_batch[batch], self.key_s * batch) for batch in self._batches
        ]
        fresh: dict[float, list[float]] = defaultdict(list)
        for one in profile.prompts:
            if one.start == 0:
                fresh[one.rows].append(one.seconds)
        self._prompt = _Line({rows: _mean(found) for rows, found in fresh.items()})
        self._graph_rows = sorted(profile.graph_rows)
        later = [p for p in profile.prompts if p.start]
        self.pair_s, self.earlier_s = _plane(
            [p.rows * p.start / p.seconds for p in later],
            [p.start / p.seconds for p in later],
            [1 - self._rows_seconds(p.rows) / p.seconds for p in later],
        )
        self.mixed_s = _slope(
            [1 / p.seconds for p in profile.mixed],
            [
                1
                - (self._rows_seconds(p.rows + p.batch) + self.key_s * p.batch * p.context)
                / p.seconds
                for p in profile.mixed
            ],
        )

    def padded(self, num_rows: int) -> int:
        """Returns the rows of the graph of a step with prompts, or its own if it has none."""
        return nearest_size(self._graph_rows, num_rows) or num_rows

    def has_graph(self, num_rows: int) -> bool:
        """True if a step of so many rows, some of them of prompts, is replayed or padded to one."""
        return bool(self._graph_rows) and num_rows <= self._graph_rows[-1]

    def launch_s(self, load: StepLoad) -> float:
        """Returns the seconds in which the host launches the step's kernels one by one."""
        num_rows = load.num_decodes + sum(count for _, count in load.chunks)
        return 0.0 if not load.chunks or self.has_graph(num_rows) else self._launch_s

    def _rows_seconds(self, num_rows: int) -> float:
        """Returns the seconds of one fresh prompt with so many rows."""
        return self._prompt(self.padded(num_rows))

    def _decode_seconds(self, batch: int, context: float) -> float:
        """Returns the seconds of a step with `batch` decodes that attend to `context` tokens
        each."""
        batches = self._batches
        if len(batches) == 1 or batch <= batches[0]:
            return self._contexts[0](context)
        right = min(bisect_right(batches, batch), len(batches) - 1)
        low, high = self._contexts[right - 1](context), self._contexts[right](context)
        share = (batch - batches[right - 1]) / (batches[right] - batches[right - 1])
        return low + share * (high - low)

    def seconds(self, load: StepLoad) -> float:
        if not load.chunks:
            return self._decode_seconds(load.num_decodes, load.num_keys / load.num_decodes)
        rows = load.num_decodes
        pairs = 0.0
        earlier = 0
        for start, count in load.chunks:
            rows += count
            pairs += count * (start + count / 2)
            earlier += start
        prompts = rows - load.num_decodes
        seconds = self._rows_seconds(rows) + self.pair_s * (pairs - prompts * prompts / 2)
        seconds += self.earlier_s * earlier
        if load.num_decodes:
            seconds += self.mixed_s + self.key_s * load.num_keys
        return self._hot_factor * max(seconds, self._prompt(1))  # at least that of its launches


def _line_over_contexts(points: dict[float, float], slope: float) -> _Line:
    """Returns seconds over contexts, from 0 on. `slope` is in seconds per token of context. It is
    used if there is only one point."""
    contexts = sorted(points)
    if len(contexts) > 1:
        slope = (points[contexts[1]] - points[contexts[0]]) / (contexts[1] - contexts[0])
    else:
        points = points | {contexts[0] + 1: points[contexts[0]] + slope}
    return _Line(points | {0: max(0.0, points[contexts[0]] - slope * contexts[0])})


def _key_s(points: Sequence[DecodePoint]) -> float:
    """Returns the seconds per attended token, from points with equal batch and several
    contexts."""
    batches: dict[int, list[DecodePoint]] = defaultdict(list)
    for point in points:
        batches[point.batch].append(point)
    xs: list[float] = []
    ys: list[float] = []
    for found in batches.values():
        middle = _mean([p.batch * p.context for p in found])
        level = _mean([p.seconds for p in found])
        xs += [p.batch * p.context - middle for p in found]
        ys += [p.seconds - level for p in found]
    return _slope(xs, ys)


def _slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Returns the slope of a fitted line through the origin, at least 0."""
    squares = _dot(xs, xs)
    return max(0.0, _dot(xs, ys) / squares) if squares else 0.0


def _plane(xs: Sequence[float], ys: Sequence[float], zs: Sequence[float]) -> tuple[float, float]:
    """Returns the slopes over x and y of a fitted plane through the origin, each at least 0."""
    xx, xy, yy = _dot(xs, xs), _dot(xs, ys), _dot(ys, ys)
    xz, yz = _dot(xs, zs), _dot(ys, zs)
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:  # else x and y are proportional
        a, b = (xz * yy - yz * xy) / determinant, (yz * xx - xz * xy) / determinant
        if min(a, b) >= 0:
            return a, b
    return _slope(xs, zs), 0.0


def _dot(xs: Sequence[float], ys: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(xs, ys, strict=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
