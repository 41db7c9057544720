"""Finds the goodput of one layout: the highest rate at which the wanted share of requests keeps the
promises.

It begins at the share FIRST of the layout's bound. The fewer requests missed a promise, the more it
raises the rate. Between a rate that is served and one that is not, it takes the rate to which their
misses point. A simulation that misses early is stopped early. This module knows no processes: the
callable `run` simulates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdserve.plan.layouts.candidates import Candidate
from pdserve.plan.layouts.layout import Layout, Slo
from pdserve.plan.loads import Load
from pdserve.plan.simulation.jobs import Job, Outcome

ROUGH, CLOSE = 0.3, 0.04  # relative precision of the rate
MOST_POINTS = 10
# Factor to the next rate if no request missed its promises, and if as many missed them as may.
# In between it falls evenly: see `_raised`.
MOST_RAISED, LEAST_RAISED = 1.6, 1.08
RAISED_AGAIN = 1.25  # least factor after three raises; it grows with each further one
NEAREST = 0.2  # share of the bracket that lies at least between its ends and the next rate
FIRST = 0.6  # share of the bound that is tried first
LEAST_SHARE = 1 / 64  # share of the bound below which a layout counts as serving nothing


@dataclass(frozen=True)
class Point:
    """The outcome of one simulation. `rate` is that of the whole layout."""

    rate: float
    outcome: Outcome


@dataclass(frozen=True)
class Goodput:
    """The goodput of a layout."""

    rate: float  # requests per second; 0: no rate keeps the promises
    best: Point | None  # the highest rate that keeps them
    beyond: Point | None  # the lowest rate that does not
    points: list[Point] = field(default_factory=list)

    def times(self, number: int) -> "Goodput":
        """Returns the goodput of this number of such layouts together."""

        def scaled(point: Point | None) -> Point | None:
            return None if point is None else Point(number * point.rate, point.outcome)

        return Goodput(
            number * self.rate,
            scaled(self.best),
            scaled(self.beyond),
            [Point(number * point.rate, point.outcome) for point in self.points],
        )


class GoodputSearch:
    """The search of one layout. Another call of `close_in` makes the result more exact.

    - layout: All its workers are simulated.
    - limit: Requests per second that the layout cannot exceed (`layouts.bounds`).
    - seconds: Seconds of arrivals at each rate.
    """

    def __init__(
        self,
        layout: Layout,
        limit: float,
        load: Load,
        slo: Slo,
        run: Callable[[Job], Outcome],
        seconds: float,
    ) -> None:
        self.layout = layout
        self._limit = limit
        self._load = load
        self._slo = slo
        self._run = run
        self._seconds = seconds
        self._points: list[Point] = []
        self._best: Point | None = None
        self._beyond: Point | None = None

    def close_in(self, close: float) -> None:
        """Simulates until the rate is known to the relative precision `close`, or until MOST_POINTS
        rates were tried."""
        rate = self._next(close)
        while rate is not None and len(self._points) < MOST_POINTS:
            self._measure(rate)
            rate = self._next(close)

    def settle(self, rate: float) -> None:
        """Simulates this rate if the result does not say yet whether the layout serves it."""
        best, beyond = self._best, self._beyond
        if best is not None and beyond is not None and best.rate < rate < beyond.rate:
            self._measure(rate)

    def reaches(self, rate: float) -> bool:
        """See `Searched.reaches`."""
        if self._best is None:
            return False
        return self._beyond is None or rate < self._beyond.rate

    @property
    def goodput(self) -> Goodput:
        rate = _between(self._best, self._beyond, self._slo.share)
        return Goodput(rate, self._best, self._beyond, self._points)

    def _measure(self, rate: float) -> None:
        requests = self._load.at(rate, self._seconds)
        point = Point(rate, self._run(self.layout.job(requests, self._slo, self._load.longest + 1)))
        self._points.append(point)
        if point.outcome.kept >= self._slo.share:
            self._best = point
        else:
            self._beyond = point

    def _next(self, close: float) -> float | None:
        """Returns the next rate to try. None: the result is exact enough, or nothing is served."""
        best, beyond = self._best, self._beyond
        if best is None and beyond is None:
            return FIRST * self._limit
        if best is None:
            assert beyond is not None
            return None if beyond.rate < LEAST_SHARE * self._limit else beyond.rate / 2
        if beyond is None:
            return self._raised(best)
        width = beyond.rate - best.rate
        if width <= close * beyond.rate:
            return None
        if beyond.outcome.is_whole:
            guess = _between(best, beyond, self._slo.share)
        else:  # nobody knows how many would have missed
            guess = (best.rate + beyond.rate) / 2
        return min(
            max(guess, best.rate + NEAREST * width),
            beyond.rate - NEAREST * width,
        )

    def _raised(self, best: Point) -> float:
        """Returns the rate to try after one at which so few requests miss their promises.

        Measured with the shipped trace: at 1 / 5 of the misses that may be, layouts serve 1.4 to
        2.6 times the rate, at a half 1.1 to 1.3 times.
        """
        missed = (1 - best.outcome.kept) / (1 - self._slo.share)
        factor = MOST_RAISED - (MOST_RAISED - LEAST_RAISED) * missed
        # Bounds know of no cached prefixes, and may be far too low. Some requests may miss at any
        # rate.
        raises = len(self._points) - 1
        return best.rate * (factor if raises < 3 else max(factor, RAISED_AGAIN) ** (raises - 2))


@dataclass(frozen=True)
class Searched:
    """A layout, and the search of the part that stands for it. Layouts of the same proportions
    share a search."""

    layout: Layout
    search: GoodputSearch

    @property
    def goodput(self) -> Goodput:
        return self.search.goodput.times(self.layout.divisor)

    def settle(self, rate: float) -> None:
        """See `GoodputSearch.settle`. rate: of the whole layout."""
        self.search.settle(rate / self.layout.divisor)

    def reaches(self, rate: float) -> bool:
        """True if, by what is known, the layout may serve `rate` requests per second."""
        return self.search.reaches(rate / self.layout.divisor)


def searches_of(
    chosen: Sequence[Candidate],
    load: Load,
    slo: Slo,
    run: Callable[[Job], Outcome],
    seconds: float,
) -> list[Searched]:
    """Returns these layouts with their searches, which have not begun. The arguments are those of
    `GoodputSearch`."""
    searches: dict[str, GoodputSearch] = {}
    found = []
    for each in chosen:
        part = each.layout.simulated
        limit = each.bound / each.layout.divisor
        search = searches.setdefault(str(part), GoodputSearch(part, limit, load, slo, run, seconds))
        found.append(Searched(each.layout, search))
    return found


def near_best(searched: Sequence[Searched]) -> list[GoodputSearch]:
    """Returns the searches of layouts that may still be the best of their number of GPUs, each
    once."""
    best: dict[int, float] = {}
    for each in searched:
        num_gpus = each.layout.num_gpus
        best[num_gpus] = max(best.get(num_gpus, 0.0), each.goodput.rate)
    return distinct(each for each in searched if each.reaches(best[each.layout.num_gpus]))


def distinct(searched: Iterable[Searched]) -> list[GoodputSearch]:
    """Returns the searches of these layouts, each once."""
    return list({id(each.search): each.search for each in searched}.values())


def _between(best: Point | None, beyond: Point | None, share: float) -> float:
    """Returns the rate at which the line through both points crosses the wanted share. If `beyond`
    was stopped early, returns the rate of `best`."""
    if best is None:
        return 0.0
    if beyond is None or not beyond.outcome.is_whole:
        return best.rate
    fall = best.outcome.kept - beyond.outcome.kept
    part = (best.outcome.kept - share) / fall if fall > 0 else 0.0
    return best.rate + part * (beyond.rate - best.rate)
