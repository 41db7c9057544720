"""Reports what grammars and token masks cost this worker, as prometheus families.

Running totals are read when they are asked for. Knows no requests. Registered by worker.loop.
"""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pdserve.engine.engine import Engine
from pdserve.engine.grammars.builder import BuildTotals

REASONS = (
    # These end a request before it reaches the engine.
    "invalid",
    "no-tokenizer",
    "deadline",
    "queue",
    "replay",
    # These end it while it generates.
    "empty",
    "limit",
    "mask-time",
)


class GrammarCollector(Collector):
    """Collects the totals of grammar builds and masks. `builds` has zeros if there is no
    builder."""

    def __init__(self, engine: Engine, builds: BuildTotals) -> None:
        self._engine = engine
        self._builds = builds

    def collect(self) -> Iterator[Metric]:
        masks = self._engine.mask_totals
        builds = self._builds
        totals = {
            "engine_late_steps": (
                "Engine steps sampled late, for rules that need the values of tokens",
                self._engine.stats.num_late_steps,
            ),
            "token_masks": ("Masks of tokens that rows were drawn with", masks.num_masks),
            "token_mask_seconds": (
                "Time that the engine's thread spent on token masks, grammars included",
                masks.seconds,
            ),
            "grammar_requests": ("Grammars asked for", builds.num_asked),
            "grammar_cache_hits": (
                "Grammars asked for that were already built or being built",
                builds.num_known,
            ),
            "grammar_builds": ("Grammars built or refused", builds.num_built),
            "grammar_build_seconds": ("Time spent building grammars", builds.build_seconds),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"pdserve_{name}", text, value)
        errors = CounterMetricFamily(
            "pdserve_grammar_errors",
            "Requests that grammars or masks ended, by reason",
            labels=["reason"],
        )
        counts = Counter(builds.errors) + Counter(masks.errors)
        for reason in REASONS:
            errors.add_metric([reason], counts[reason])
        yield errors
