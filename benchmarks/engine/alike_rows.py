"""Measures how fast a mixture is if all rows go to the same experts.

    python -m benchmarks.engine.alike_rows --model benchmarks/shapes/deepseek-v2-lite

Routers of zeros give every expert the same score, and the first experts win. So a step reads few
experts however many rows it has. Some figures of other engines are below the time that reading all
experts takes, because dummy weights near zero also give equal scores if scores are rounded to
bfloat16. This benchmark makes ours comparable with these. benchmarks/targets has the figures of
rows that differ.
"""

import argparse
from unittest.mock import patch

from benchmarks.support.places import SHAPES
from pdserve.bench.offline import Bench, OfflineConfig
from pdserve.bench.workload import Shape
from pdserve.models.weights import Weight

ROUTER = ".gate.weight"  # the end of a router's name in a checkpoint
SHAPE_NAMES = ("64x1024x256", "512x256x512", "512x1024x128")

draw = Weight.draw


def draw_all_but_routers(weight: Weight, seed: int) -> None:
    draw(weight, seed)
    if any(name.endswith(ROUTER) for name in weight.names):
        weight.tensors["weight"].zero_()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(SHAPES / "deepseek-v2-lite"), help="a mixture")
    parser.add_argument("--shape", nargs="*", default=SHAPE_NAMES, help="prompts x in x out")
    options = parser.parse_args()
    shapes = [Shape.parse(name) for name in options.shape]
    config = OfflineConfig(
        options.model, {"load_format": "dummy"}, {"enable_prefix_caching": False}
    )
    with patch.object(Weight, "draw", draw_all_but_routers):
        bench = Bench(config)
    for shape, figures in bench.throughput(shapes):
        print(shape, figures)
    for layer, load in bench.llm.expert_load().items():
        print(f"layer {layer}: rows went to {(load > 0).sum()} of {len(load)} experts")


if __name__ == "__main__":
    main()
