"""Tests benchmarks/cluster/prefixes.py: its loads, the ideal cache with which workers are compared,
and, on two hosts, that four caches compute little more than that one."""

import itertools
import sys

import pytest

from benchmarks.cluster import prefixes
from benchmarks.cluster.prefixes import TRACE, blocks_of, measure
from benchmarks.support.prefix_cluster import Setting
from benchmarks.support.prefix_loads import (
    KV_BLOCK,
    MAX_BLOCKS,
    Ask,
    hot,
    ideal_computed,
    traced,
    working_set,
)
from benchmarks.support.two_hosts import available, two_hosts
from pdserve.bench.replay.trace import read_trace
from pdserve.bench.replay.trace_lines import TraceRequest

BOUND = 1.15
ATTEMPTS = 3  # on a busy machine queues send more requests away from the caches that know them


def ask(*blocks: int, tail: int = 0) -> Ask:
    """A prompt of whole blocks of one token id each, and a few tokens more."""
    return Ask([block for block in blocks for _ in range(KV_BLOCK)] + [9] * tail, 1)


def test_the_ideal_cache_computes_what_it_lacks_and_the_last_token() -> None:
    asks = [ask(1, 2, tail=3), ask(1, 2, tail=3), ask(1, 2), ask(1, 3, tail=1), ask(3, 2, tail=1)]
    assert [ideal_computed(asks[:count], 100) for count in range(1, 6)] == [
        35,
        35 + 3,
        35 + 3 + 16,  # the block of the last token is found, but must give logits
        35 + 3 + 16 + 17,
        35 + 3 + 16 + 17 + 33,  # a block alone is no prefix
    ]
    assert working_set(asks) == 5


def test_the_ideal_cache_evicts_what_was_used_least_recently_and_ends_first() -> None:
    assert ideal_computed([ask(1, 2, tail=1), ask(3, tail=1), ask(1, 2, tail=1)], 2) == 33 + 17 + 17
    assert ideal_computed([ask(1, 2, tail=1), ask(1, 2, tail=1)], 1) == 33 + 17
    assert ideal_computed([ask(1, tail=1), ask(2, tail=1), ask(1, tail=1)], 1) == 3 * 17


def test_a_trace_scaled_down_keeps_its_prefixes() -> None:
    requests = [
        TraceRequest(0.0, 1100, 64, (8, 9, 10)),
        TraceRequest(1.0, 1024, 10_000, (8, 9)),
        TraceRequest(2.0, 512, 64, (3,)),
        TraceRequest(3.0, 200_000, 1, tuple(range(16, 16 + 391))),
    ]
    asks = traced(requests, 8, 0)
    assert [len(each.prompt) for each in asks] == [35, 32, MAX_BLOCKS * KV_BLOCK]
    assert [each.num_answer for each in asks] == [2, 128, 1]
    assert asks[0].prompt[:32] == asks[1].prompt and asks[2].prompt[:16] != asks[0].prompt[:16]
    assert traced(requests, 8, 0) == asks != traced(requests, 8, 1)
    with pytest.raises(ValueError, match="--one-in 5 keeps no request of the trace: lower it"):
        traced(requests[:3], 5, 0)
    with pytest.raises(ValueError, match="request 0 of the trace has no hash ids"):
        traced([TraceRequest(0.0, 10, 10)], 1, 0)


def test_the_shipped_trace_shares_as_much_when_a_part_of_it_is_sent() -> None:
    """64 % of all its blocks were seen before."""
    asks = traced(read_trace(TRACE).requests, 8, 0)
    num_blocks = sum(len(each.prompt) // KV_BLOCK for each in asks)
    assert len(asks) > 400 and 0.6 < 1 - working_set(asks) / num_blocks < 0.75
    assert max(len(each.prompt) + each.num_answer for each in asks) <= 2048


def test_bursts_ask_for_the_same_prefixes() -> None:
    warm, *bursts = hot(3, 5, 2, 0)
    assert len(warm) == 3 and [len(burst) for burst in bursts] == [5] * 6
    for burst, first in zip(bursts, itertools.cycle(warm), strict=False):
        assert {tuple(each.prompt[: 64 * KV_BLOCK]) for each in burst} == {
            tuple(first.prompt[: 64 * KV_BLOCK])
        }
    assert working_set(itertools.chain(warm, *bursts)) == 3 * 64 + (3 + 30) * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "0"], "--cache: must be a finite number above 0, not '0'"),
        (["--fetch", "maybe"], "--fetch: invalid choice: 'maybe'"),
        (["--trace", "no/such/file"], "no/such/file"),
        (["--one-in", "0"], "--one-in: must be at least 1, not 0"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["prefixes.py", *arguments])
    monkeypatch.setattr(prefixes, "available", lambda: "")
    monkeypatch.setattr(prefixes, "two_hosts", None)
    monkeypatch.setattr(prefixes.logging.getLogger("pdserve"), "setLevel", lambda level: None)
    try:
        assert prefixes.main() == 1
    except SystemExit as error:
        assert error.code == 2
    assert message in capsys.readouterr().err


def test_without_namespaces_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prefixes.py"])
    monkeypatch.setattr(prefixes, "available", lambda: "needs root for network namespaces")
    assert prefixes.main() == 1
    assert "cannot make two hosts here: needs root" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("fetch", [True, False], ids=["fetches", "no fetches"])
def test_four_caches_on_two_hosts_compute_little_more_than_one_as_large(fetch: bool) -> None:
    """Two routers, the shipped trace scaled down, KV caches of a quarter of its working set."""
    if reason := available():
        pytest.skip(reason)
    asks = traced(read_trace(TRACE).requests, 8, 0)
    setting = Setting(blocks_of(asks, 0.25), fetch=fetch)
    ratios = []
    for _ in range(ATTEMPTS):
        with two_hosts(None) as net:
            row = measure(setting, net, [asks], 4)
        assert bool(row["fetched"]) is fetch, row
        ratios.append(row["ratio"])
        if row["ratio"] <= BOUND:
            return
    pytest.fail(f"computed {ratios} times what one ideal cache as large leaves, not {BOUND}")


@pytest.mark.slow
@pytest.mark.processes
def test_bursts_for_a_few_prefixes_compute_less_when_workers_fetch() -> None:
    """So many ask at once that routers send some away from the worker that holds the prefix."""
    if reason := available():
        pytest.skip(reason)
    bursts = hot(4, 40, 3, 0)
    num_blocks = blocks_of([each for burst in bursts for each in burst], 0.5)
    computed = []
    for _ in range(ATTEMPTS):
        with two_hosts(None) as net:
            rows = [measure(Setting(num_blocks, fetch=on), net, bursts, 40) for on in (True, False)]
        computed.append([row["computed"] for row in rows])
        if rows[0]["fetched"] > 0 and computed[-1][0] < computed[-1][1]:
            return
    pytest.fail(f"tokens computed with fetches and without: {computed}")
