"""Names the places in the repository that benchmarks read and write."""

from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
BENCHMARKS = REPOSITORY / "benchmarks"
SHAPES = BENCHMARKS / "shapes"  # configurations of models, without weights
RESULTS = BENCHMARKS / "results"
DEMO = REPOSITORY / "demo" / "pdserve-demo"
