"""Finds the layouts that are worth a simulation: the best ones, by their bound, of all that memory
and shapes allow.

`cli` calls this module.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from math import gcd

from pdserve.models.config import ModelSpec
from pdserve.plan.costs.step import Degrees
from pdserve.plan.layouts.bounds import bound, split_bound
from pdserve.plan.layouts.layout import MOST_SIMULATED, Layout, Part, Slo
from pdserve.plan.loads import Load
from pdserve.plan.profile.profile import Profile
from pdserve.plan.profile.scaled import Scaled, scale

MOST_LAYOUTS = 20  # in all, if that leaves LEAST_LAYOUTS for each number of GPUs
LEAST_LAYOUTS = 5
MOST_KINDS = 2  # kinds that take turns before all others
GPUS_OF_HOST = 8


@dataclass(frozen=True)
class Candidate:
    """A layout, and the requests per second that it cannot exceed."""

    layout: Layout
    bound: float


@dataclass(frozen=True)
class Candidates:
    """The chosen layouts, and what was left out."""

    chosen: list[Candidate]  # for each number of GPUs, the best ones first
    num_left_out: int  # layouts that were left out because of their bounds
    refused: dict[str, str]  # degrees that are impossible -> the reason


def gpu_numbers(low: int, high: int) -> list[int]:
    """Returns numbers of GPUs from `low` to `high`, each twice the previous one. The last is
    `high`."""
    numbers = [low]
    while 2 * numbers[-1] <= high:
        numbers.append(2 * numbers[-1])
    return numbers if numbers[-1] == high else [*numbers, high]


def candidates(
    profile: Profile, spec: ModelSpec, load: Load, slo: Slo, numbers: Sequence[int]
) -> Candidates:
    """Returns the layouts that are worth a simulation. Raises ValueError with the reason and the
    cure if no layout can keep the promises."""
    fitting: dict[Degrees, Scaled] = {}
    refused: dict[str, str] = {}
    for degrees in _degrees(spec, max(numbers)):
        try:
            found = scale(profile, spec, degrees)
        except ValueError as error:
            refused[str(degrees)] = str(error)
            continue
        if found.num_kv_tokens < load.longest:
            refused[str(degrees)] = (
                f"its KV cache holds {found.num_kv_tokens:,} tokens, but a request has "
                f"{load.longest:,}"
            )
            continue
        fitting[degrees] = found
    if not fitting:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ValueError(f"--model fits no degrees on up to {max(numbers)} GPUs ({reasons})")
    share = max(LEAST_LAYOUTS, MOST_LAYOUTS // len(numbers))
    chosen: list[Candidate] = []
    left_out = 0
    for number in numbers:
        layouts = list(_layouts(fitting, number))
        best = _best(layouts, load, slo, share)
        chosen += best
        left_out += len(layouts) - len(best)
    if not chosen:
        raise ValueError(
            f"--slo ttft={slo.ttft_ms:g},tpot={slo.tpot_ms:g}: no layout of up to "
            f"{max(numbers)} GPUs keeps it for a lone request of {load.mean_in:,.0f} tokens: allow "
            "more milliseconds, or more GPUs"
        )
    return Candidates(chosen, left_out, refused)


def _best(layouts: list[Layout], load: Load, slo: Slo, share: int) -> list[Candidate]:
    """Returns the best layouts by their bounds: whole ones, and nearly as many or more split ones.
    Bounds of one kind do not say much about another, so all kinds take turns. A kind is the
    degrees of each role."""
    kept = []
    for layout in layouts:
        limit = bound(layout.parts, load, slo)
        if limit > 0:
            kept.append((limit, split_bound(layout.parts, load, slo), Candidate(layout, limit)))
    kept.sort(key=lambda each: (-each[0], -each[1]))
    ordered = [candidate for _, _, candidate in kept]
    whole = _by_turns([each for each in ordered if not each.layout.is_split])
    split = _by_turns([each for each in ordered if each.layout.is_split])
    num_whole = max(share // 2, share - len(split))
    best = whole[:num_whole]
    return best + split[: share - len(best)]


def _by_turns(candidates: list[Candidate]) -> list[Candidate]:
    """Returns the best of each of the best MOST_KINDS kinds, then the second of each, and so on.
    Other kinds follow."""
    kinds: dict[tuple[Degrees, ...], list[Candidate]] = {}
    for each in candidates:
        kinds.setdefault(tuple(part.degrees for part in each.layout.parts), []).append(each)
    first, others = list(kinds.values())[:MOST_KINDS], list(kinds.values())[MOST_KINDS:]
    turns = [*zip_longest(*first), *zip_longest(*others)]
    return [each for turn in turns for each in turn if each is not None]


def _degrees(spec: ModelSpec, most: int) -> Iterator[Degrees]:
    """Yields degrees on up to `most` GPUs: tensor parallelism within a host, pipeline stages, and
    shared experts."""
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            if tp * pp <= most and (pp == 1 or tp == GPUS_OF_HOST or tp * pp <= 4):
                yield Degrees(tp, pp)
    if spec.experts is not None:
        for tp, dp in ((2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4)):
            if tp * dp <= most:
                yield Degrees(tp=tp, dp=dp, ep=True)


def _layouts(fitting: dict[Degrees, Scaled], number: int) -> Iterator[Layout]:
    """Yields all layouts that can be simulated as a part of at most MOST_SIMULATED workers."""
    for parts in _all_parts(fitting, number):
        layout = _simulated(parts)
        if layout.num_workers <= MOST_SIMULATED * layout.divisor:
            yield layout


def _all_parts(fitting: dict[Degrees, Scaled], number: int) -> Iterator[tuple[Part, ...]]:
    for degrees, found in fitting.items():
        if number % degrees.num_gpus == 0:
            yield (Part("both", number // degrees.num_gpus, degrees, found),)
    for (p_degrees, p_found), (d_degrees, d_found) in product(fitting.items(), repeat=2):
        if max(p_degrees.pp, d_degrees.pp) > 1 and p_degrees != d_degrees:
            continue
        for p_count in _counts(number, p_degrees.num_gpus):
            rest = number - p_count * p_degrees.num_gpus
            if rest and rest % d_degrees.num_gpus == 0:
                prefill = Part("prefill", p_count, p_degrees, p_found)
                yield prefill, Part("decode", rest // d_degrees.num_gpus, d_degrees, d_found)


def _counts(number: int, size: int) -> list[int]:
    """Returns the numbers of prefill workers to try. With many GPUs, only some are tried."""
    step = max(1, number // MOST_SIMULATED // size)
    return list(range(step, (number - 1) // size + 1, step))


def _simulated(parts: tuple[Part, ...]) -> Layout:
    """Returns the layout with the divisor of its smallest part that has the same proportions and is
    large enough."""
    common = parts[0].count
    for part in parts[1:]:
        common = gcd(common, part.count)
    total = sum(part.count for part in parts)
    divisor = next(
        (d for d in range(1, common + 1) if common % d == 0 and total // d <= MOST_SIMULATED),
        common,
    )
    return Layout(parts, divisor)
