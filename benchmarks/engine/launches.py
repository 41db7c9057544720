"""Counts what the host starts in one eager step, without a GPU. A step with prompts is not captured
in a CUDA graph, so each launch takes the host 10 to 40 us. If that is more than the device's work,
the host is the limit.

    python -m benchmarks.engine.launches --model benchmarks/shapes/qwen3-30b-a3b --rows 8192
    python -m benchmarks.engine.launches --model benchmarks/shapes/qwen3-30b-a3b --ranks 2 --experts

The model has its real number of layers and experts, but narrow matrices. Launchers run as on a GPU,
up to the call that would start a kernel. Several ranks are counted as one of them, whose sums over
ranks send to nobody. "products" are those of torch, "others" torch's other operations that start
kernels.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.engine.eager_host import Step
from benchmarks.support.places import SHAPES
from pdserve.bench.option_values import integer
from pdserve.configs.engine import EngineConfig
from pdserve.engine.expert_places import placements_of
from pdserve.kernels.collective.faults import Faults
from pdserve.kernels.collective.ops import HomeAlone
from pdserve.kernels.collective.region import RegionLayout
from pdserve.kernels.collective.triton_ops import PeerCollective
from pdserve.kernels.launching import launch
from pdserve.kernels.linear import triton_ops as products
from pdserve.kernels.linear.schemes.dense import Dense
from pdserve.kernels.ops import Ops, triton_ops
from pdserve.models.config import ModelSpec, read_spec
from pdserve.parallel.dims import ParallelDims, dims_of

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
# A narrow model has heads of so many columns, and its other widths are smaller by as much.
HEAD_DIM = 16
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "linear")
VIEWS = ("view", "split", "slice", "select", "transpose", "mT", "unsqueeze", "expand", "alias")
MORE_VIEWS = ("detach", "as_strided", "unbind", "permute", "squeeze", "unflatten", "flatten")
NO_KERNEL = (*VIEWS, *MORE_VIEWS, "empty", "new_empty")


@dataclass
class Started:
    """Counts what the host started in one step, by name."""

    launches: Counter[str] = field(default_factory=Counter)
    products: int = 0
    others: Counter[str] = field(default_factory=Counter)


class _Counting(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self, started: Started) -> None:
        super().__init__()
        self._started = started

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__.lstrip("_")
        if name in PRODUCTS:
            self._started.products += 1
            return _uncomputed(func, args, kwargs or {})
        if not name.startswith(NO_KERNEL):
            self._started.others[name] += 1
        return func(*args, **(kwargs or {}))


def _uncomputed(product: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the memory of a product, whose values nothing here depends on. To multiply 8,192 rows
    would take a CPU minutes."""
    if "out" in kwargs:
        return cast(Tensor, kwargs["out"])
    result = product(*tree_map_only(Tensor, lambda given: given.to("meta"), args), **kwargs)
    is_in_place = product.overloadpacket.__name__.endswith("_")
    return args[0] if is_in_place else torch.empty_like(result, device=CPU)


class _Kernels(dict[Any, Any]):
    """Stands for the compiled kernels that `launch` keeps: all are there, and start nothing."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self._names: dict[int, str] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        if key[0] not in self._names:  # its module was imported since
            self._names = _names_of_kernels()
        self._started.launches[self._names[key[0]]] += 1
        return launch._Kept(lambda *_: None, 0, None, ())


def _names_of_kernels() -> dict[int, str]:
    """The name of each kernel, by what `launch` knows it by."""
    return {
        id(value): name
        for module in list(sys.modules.values())
        if module.__name__.startswith("pdserve.kernels.")
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    }


def narrow(spec: ModelSpec) -> ModelSpec:
    by = spec.head_dim // HEAD_DIM
    changes: dict[str, Any] = {
        "head_dim": HEAD_DIM,
        "hidden_size": spec.num_heads * HEAD_DIM,
        "intermediate_size": spec.intermediate_size // by,
        "vocab_size": 64,
    }
    if spec.experts is not None:
        changes["experts"] = spec.experts.model_copy(update={"size": spec.experts.size // by})
    return spec.model_copy(update=changes)


def parts_of(
    spec: ModelSpec, num_ranks: int, has_whole_experts: bool, num_rows: int
) -> tuple[Ops, ParallelDims, Any]:
    """Returns the ops and dims of rank 0, and where experts are. Sums are cut as those of the real
    width, which the narrow model lacks."""
    ops = triton_ops()
    if num_ranks == 1:
        return ops, ParallelDims(), None
    given = {"device": "cpu", "tensor_parallel": num_ranks, "expert_parallel": has_whole_experts}
    config = EngineConfig.model_validate(given)
    dims = dims_of(config)
    wide = RegionLayout(num_ranks, spec.hidden_size, DTYPE, 1, 1, num_rows)
    layout = replace(
        wide,
        width=narrow(spec).hidden_size,
        piece_rows=wide.piece_slots * wide.slot_rows,
        pulled_rows=max(1, wide.most_pulled),
        least_inputs=wide.least_inputs * HEAD_DIM // spec.head_dim,
    )
    faults = Faults(torch.zeros(1, dtype=torch.int32), CPU)
    own = torch.empty(layout.num_bytes, dtype=torch.uint8)
    regions = torch.zeros(num_ranks, dtype=torch.int64)
    collective = PeerCollective(layout, 0, regions, faults, own=own)
    ops = replace(ops, collective=collective, exchange=HomeAlone(collective))
    return ops, dims, placements_of(spec, dims, config, None)


def count(spec: ModelSpec, num_ranks: int, has_whole_experts: bool, num_rows: int) -> Started:
    """Runs a step with one prompt of num_rows tokens."""
    started = Started()
    with (
        mock.patch.object(Dense, "ops", lambda self, device: products),
        mock.patch.object(launch, "_kept", _Kernels(started)),
    ):
        ops, dims, placements = parts_of(spec, num_ranks, has_whole_experts, num_rows)
        run = Step(narrow(spec), ops, CPU, dims, placements).forward(0, (num_rows,))
        with torch.inference_mode(), _Counting(started):
            run()
    return started


class _Driver:
    """All that `launch` asks of Triton's driver."""

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SHAPES / "llama-3.1-8b")
    parser.add_argument("--rows", type=integer(2), default=8192, help="tokens of the prompt")
    parser.add_argument("--ranks", type=integer(1), default=1, help="engine.tensor_parallel")
    parser.add_argument("--experts", action="store_true", help="engine.expert_parallel")
    options = parser.parse_args()
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(_Driver())
    spec = read_spec(str(options.model), "dummy")
    started = count(spec, options.ranks, options.experts, options.rows)
    figures = {
        "model": options.model.name,
        "rows": options.rows,
        "ranks": options.ranks,
        "launches": started.launches.total(),
        "products": started.products,
        "others": started.others.total(),
        "by_kernel": dict(started.launches.most_common()),
        "by_operation": dict(started.others.most_common()),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
