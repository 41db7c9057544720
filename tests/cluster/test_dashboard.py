"""Every query of the dashboard is PromQL, and asks for metrics and labels that the /metrics page of
a served cluster has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.hosts import Host, hosts
from support.metrics_table import written
from support.served import DEMO, MODEL, cluster

from pdserve.cluster.cli import main
from pdserve.cluster.operate.dashboard import dashboard, place, queries
from pdserve.cluster.operate.dashboard_panels import Query
from pdserve.cluster.operate.dashboard_rows import ROWS

# Only with a pool; its metrics are held against the tested table of docs/use/metrics.md.
NOT_LIVE = "pdserve_kv_pool_"

Labels = dict[str, set[str]]


@pytest.fixture(scope="module")
def pd() -> Iterator[list[Host]]:
    with hosts(DEMO, "P", "D", engine={"num_kv_blocks": 256}) as started:
        yield started


def parse(expr: str) -> Any:
    return promql_parser.parse(expr.replace("P@", "").replace("$__rate_interval", "5m"))


def nodes(expr: Any) -> Iterator[Any]:
    """Yields the expression and all its parts."""
    yield expr
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if getattr(expr, name, None) is not None:
            yield from nodes(getattr(expr, name))
    for argument in getattr(expr, "args", ()):
        yield from nodes(argument)


def selectors(expr: Any) -> list[Any]:
    return [node for node in nodes(expr) if type(node).__name__ == "VectorSelector"]


def aggregations(expr: Any) -> list[Any]:
    return [node for node in nodes(expr) if type(node).__name__ == "AggregateExpr"]


def grouped_by(aggregation: Any) -> set[str]:
    modifier = aggregation.modifier
    assert modifier is None or str(modifier.type).endswith("By")
    return set() if modifier is None else set(modifier.labels)


def documented() -> Labels:
    """Series names of the page's tables -> their labels."""
    known: Labels = {}
    for name, row in written().items():
        labels = {label.strip() for label in row.labels.split(",") if label.strip()}
        if not name.startswith("pdserve_router_"):
            labels |= {"worker", "role"}
        suffixes = ("_bucket", "_sum", "_count") if row.kind == "histogram" else ("",)
        known |= {
            name + suffix: labels | ({"le"} if suffix == "_bucket" else set())
            for suffix in suffixes
        }
    return known


def live(page: str) -> Labels:
    """Series names of a /metrics page -> labels of its samples; of those that have counted nothing,
    the documented ones."""
    known = Labels()
    documents = documented()
    for family in text_string_to_metric_families(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        suffixes = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
        known |= {
            name + suffix: documents[name + suffix] for suffix in suffixes if not family.samples
        }
        for sample in family.samples:
            known.setdefault(sample.name, set()).update(sample.labels)
    return known


def check(query: Query, known: Labels) -> None:
    expr = parse(query.expr)
    groups = [grouped_by(aggregation) for aggregation in aggregations(expr)]
    for selector in selectors(expr):
        assert selector.name in known, f"{query.expr}: there is no {selector.name}"
        labels = known[selector.name]
        filters = {matcher.name for matcher in selector.matchers.matchers}
        assert filters <= labels, f"{query.expr}: {selector.name} has no {filters - labels}"
    available = set().union(*(known[selector.name] for selector in selectors(expr)))
    assert set().union(*groups, set()) <= available, (
        f"{query.expr}: grouped by what none of its metrics has"
    )
    shown = set(re.findall(r"{{(\w+)}}", query.legend))
    outer = grouped_by(aggregations(expr)[0])
    assert shown <= outer, f"{query.legend} of {query.expr}: {shown - outer} is summed away"


ALL = [query for row in ROWS for panel in row.panels for query in panel.queries]


async def test_every_query_asks_for_what_a_served_cluster_shows(pd: list[Host]) -> None:
    async with cluster(*pd) as running:
        await running.complete(prompt="Once upon a time " * 20, max_tokens=4)
        refused = await running.client.post(
            "/v1/completions", json={"model": MODEL, "prompt": "a", "top_p": 9}
        )
        assert refused.status_code == 400
        known = live((await running.client.get("/metrics")).text)
    assert {"le", "worker", "role"} == known["pdserve_kv_transfer_lag_seconds_bucket"]
    known |= {name: labels for name, labels in documented().items() if name.startswith(NOT_LIVE)}
    for query in ALL:
        check(query, known)


def test_no_sum_is_lost_where_a_workers_series_come_from_several_pages() -> None:
    """`max by` stands in for one of several equal series: of different ones it would drop all but
    one."""
    known = documented()
    for query in ALL:
        kept = [a for a in aggregations(parse(query.expr)) if str(a.op) == "max"]
        for aggregation in kept:
            for selector in selectors(aggregation):
                missing = known[selector.name] - {"role"} - grouped_by(aggregation)
                assert not missing, (
                    f"{query.expr}: {missing} of {selector.name} come together in a max"
                )
        taken = {s.name for a in kept for s in selectors(a)}
        of_workers = {
            s.name for s in selectors(parse(query.expr)) if not s.name.startswith("pdserve_router_")
        }
        assert of_workers <= taken, f"{query.expr}: counts a worker once a router's page"


@pytest.mark.parametrize(
    "bad", ["sum by (nothing) (pdserve_kv_blocks)", 'pdserve_kv_blocks{x="1"}', "pdserve_nothing"]
)
def test_the_check_finds_what_is_wrong(bad: str) -> None:
    with pytest.raises(AssertionError, match=r"there is no|has no|none of its"):
        check(Query(bad, ""), documented())
    with pytest.raises(AssertionError, match="summed away"):
        check(Query("sum by (worker) (pdserve_kv_blocks)", "{{state}}"), documented())


def test_both_sources_ask_the_same_by_their_names() -> None:
    routers = list(queries("routers"))
    rays = list(queries("ray"))
    assert [query.replace("ray_pdserve_", "pdserve_") for query in rays] == routers
    assert all("pdserve_" in query and "P@" not in query for query in rays)
    assert not any(
        selector.name.startswith("pdserve_")
        for query in rays
        for selector in selectors(parse(query))
    )


def test_the_documents_are_whole(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["dashboard", "--source", "routers"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == dashboard("routers") and shown["uid"] != dashboard("ray")["uid"]
    panels = shown["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 40
    spots = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(spots)) == len(spots), "panels lie on each other"
    assert [t["expr"] for p in panels for t in p.get("targets", ())] == list(queries("routers"))
    assert place(tmp_path / "nowhere") is None
    placed = place(tmp_path)
    assert placed is not None and json.loads(placed.read_text()) == dashboard("ray")
