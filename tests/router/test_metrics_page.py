"""The page docs/use/metrics.md and the code name the same metrics, with the same types, labels and
meanings."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.harness import make_engine
from prometheus_client import CollectorRegistry
from support.metrics_table import Row, written
from support.tiny_models import make_tiny

from pdserve.cluster.deployments.rank_pings import Answers, StepAges
from pdserve.configs.router import RouterConfig, SloConfig
from pdserve.engine.grammars.builder import BuildTotals
from pdserve.kvtransfer.p2p.metrics import TransferMetrics
from pdserve.kvtransfer.pool.metrics import PoolMetrics, PoolServerCollector
from pdserve.plan.simulation.paper_tokenizer import PaperTokenizer
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.request.service import Service
from pdserve.worker.fetching.fetch import FetchMetrics
from pdserve.worker.metrics import WorkerMetrics
from pdserve.worker.phases.grammar_metrics import GrammarCollector

# Names of the field (vLLM's, without its prefix) that its users look for; ours must end with them.
FIELD = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "num_preemptions_total",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
}


def counted(registry: CollectorRegistry) -> Iterator[tuple[str, Row]]:
    for collector in list(registry._collector_to_names):
        declared = list(getattr(collector, "_labelnames", ()))
        for family in collector.collect():
            seen = {label for sample in family.samples for label in sample.labels} - {"le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield (
                name,
                Row(
                    family.type,
                    ", ".join(declared or sorted(seen)),
                    family.documentation.rstrip("."),
                ),
            )


@pytest.fixture
def code(tmp_path: Path) -> dict[str, Row]:
    """The metrics in the code, for a model that uses all of them."""
    slo = SloConfig(ttft_ms=1, tpot_ms=1)
    engine = make_engine(make_tiny("mixtral", tmp_path), slo, num_kv_blocks=8)
    worker = WorkerMetrics(engine)
    TransferMetrics(worker.registry)
    PoolMetrics(worker.registry)
    worker.registry.register(PoolServerCollector(lambda: 0))
    FetchMetrics(worker.registry)
    worker.registry.register(GrammarCollector(engine, BuildTotals()))
    tokenizer: Any = PaperTokenizer()
    router = Service(Fleet(), tokenizer, RouterConfig(), "m", slo=slo)
    ages = StepAges()
    ages.tell(Answers([0.0]))
    registries = router.metrics.registry, worker.registry, ages.registry
    return {name: row for registry in registries for name, row in counted(registry)}


def test_the_page_has_every_metric_and_no_other(code: dict[str, Row]) -> None:
    page = written()
    expected = [
        f"| `{name}` | {row.kind} | {row.labels} | {row.meaning} |" for name, row in code.items()
    ]
    wrong = [
        line
        for line, (name, row) in zip(expected, code.items(), strict=True)
        if page.get(name) != row
    ]
    assert not wrong, "rows that docs/use/metrics.md lacks or has otherwise:\n" + "\n".join(wrong)
    assert page.keys() <= code.keys(), "metrics of the page that are not counted"


def test_names_are_the_fields(code: dict[str, Row]) -> None:
    missing = {stem for stem in FIELD if not any(name.endswith(f"_{stem}") for name in code)}
    assert not missing
    for name, row in code.items():
        assert name.startswith("pdserve_")
        assert row.kind != "counter" or name.endswith("_total")
        assert row.kind != "histogram" or name.endswith(("_seconds", "_bytes", "_tokens")), (
            f"{name} has no unit"
        )
        assert "milli" not in row.meaning and not re.search(r"_(ms|us|mb|gb)(_|$)", name), (
            "seconds and bytes"
        )
