"""Launches of one layer's attention that are repeated for another layer give the bits that the
other layer's own launches give. On a GPU (marked gpu) the real kernels run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_problem import PagedProblem, paged_problem
from support.paper_graphs import PaperGraph, paper_graphs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.tools.tensor_descriptor import TensorDescriptor

from pdserve.engine.execution.attention import AttentionBatch, PagedAttention
from pdserve.engine.execution.piecewise_graphs import AttentionCall, Cut, PiecewiseGraphs
from pdserve.engine.stepping.work import StepShape
from pdserve.kernels.attention import decode, prefill, shares, triton_ops
from pdserve.kernels.e4m3 import E4M3
from pdserve.kernels.launching.notes import Launched, noting, other_work, scratch
from pdserve.kernels.launching.repeat import Given, Memory, Repeatable
from pdserve.kernels.ops import TORCH, Ops

pytestmark = pytest.mark.lengthy

__all__ = ["paper_graphs"]  # a fixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM, BLOCK = (4, 2), 64, 64
OPS: Any = SimpleNamespace(attention=triton_ops)
ON_GPU = DEVICE == "cuda"
DECODES = [70, 1, 2500 if ON_GPU else 400]
CHUNKS = [(3000 if ON_GPU else 600, 40), (0, 30)]  # rows before a chunk, and its rows
PADDING = 9


@dataclass(frozen=True)
class Case:
    """The properties in which the layers of a test differ from plain ones."""

    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_scales: bool = False
    is_e4m3: bool = False
    shares_keys: bool = True  # several programs share the keys of a chunk


CASES = {
    "plain": Case(),
    "float32": Case(dtype=torch.float32, shares_keys=False),
    "window": Case(window=100, shares_keys=False),
    "capped": Case(soft_cap=5.0),
    "sinks": Case(has_sinks=True),
    "e4m3": Case(has_scales=True, is_e4m3=True),
}


@pytest.fixture(autouse=True)
def few_keys_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for as many keys as programs share on a GPU."""
    if not ON_GPU:
        monkeypatch.setattr(shares, "LEAST_KEYS", 256)


def problem_of(case: Case) -> PagedProblem:
    contexts = [*DECODES, *(before + rows for before, rows in CHUNKS)]
    lens = [1] * len(DECODES) + [rows for _, rows in CHUNKS]
    found = paged_problem(HEADS, HEAD_DIM, BLOCK, case.dtype, contexts, lens, PADDING, DEVICE)
    return replace(found, window=case.window, soft_cap=case.soft_cap)


def layer_of(problem: PagedProblem, case: Case) -> AttentionCall:
    """Another layer of a step: other rows, keys, scales and sinks, laid out as the problem's."""
    num_rows, (heads, kv_heads) = len(problem.q), HEADS
    fused = torch.randn(num_rows, heads + 2 * kv_heads, HEAD_DIM, device=DEVICE).to(case.dtype)
    pool = torch.randn(*problem.kv.shape[:2], 3, *problem.kv.shape[2:], device=DEVICE)
    kv = pool.to(E4M3 if case.is_e4m3 else case.dtype)[:, :, 1]
    scales = torch.rand(kv_heads, device=DEVICE) + 0.5 if case.has_scales else None
    sinks = torch.randn(heads, device=DEVICE) if case.has_sinks else None
    q, k, v = fused.split((heads, kv_heads, kv_heads), 1)
    out = torch.empty(num_rows, heads, HEAD_DIM, dtype=case.dtype, device=DEVICE)
    spec = replace(problem.spec, has_sinks=case.has_sinks)
    return AttentionCall(spec, q, k, v, kv, scales, sinks, out)


def step_of(problem: PagedProblem, ops: Ops) -> PagedAttention:
    num = len(DECODES)
    shape = StepShape(num, max(DECODES), tuple(CHUNKS))
    batch = AttentionBatch(
        shape,
        problem.table_rows,  # attention between graphs reads neither positions nor slots
        problem.table_rows,
        problem.block_tables,
        problem.table_rows,
        problem.context_lens,
        problem.query_starts[num:] - num,
    )
    cache: Any = SimpleNamespace(layers=[], layout=SimpleNamespace(block_size=BLOCK))
    return PagedAttention(cache, ops, batch)


class Counted:
    """Counts how often attention is asked for what is not a repetition."""

    def __init__(self) -> None:
        self.calls = 0

    def decode(self, *args: Any) -> Tensor:
        self.calls += 1
        return triton_ops.decode(*args)

    def prefill(self, *args: Any) -> Tensor:
        self.calls += 1
        return triton_ops.prefill(*args)


def attended(step: PagedAttention, layers: Sequence[AttentionCall]) -> list[Tensor]:
    for layer in layers:
        layer.out.fill_(float("nan"))
        step.carry_out(layer)
    return [layer.out.clone() for layer in layers]


def check(name: str) -> None:
    case = CASES[name]
    problem = problem_of(case)
    layers = [layer_of(problem, case) for _ in range(2)]
    assert len({layer.kind for layer in layers}) == 1
    counted: Any = Counted()
    for _ in range(2):  # a second step keeps what it can of the first
        repeated = attended(step_of(problem, SimpleNamespace(attention=counted)), layers)  # type: ignore[arg-type]
    assert counted.calls == 4
    alone = [attended(step_of(problem, OPS), [layer])[0] for layer in layers]
    for one, other in zip(repeated, alone, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all() and not one[-PADDING:].any() and one[:-PADDING].any()
    assert not torch.equal(repeated[0], repeated[1])


@pytest.mark.skipif(ON_GPU, reason="the same runs on the GPU instead")
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_layer_gets_the_bits_of_its_own_launches(name: str) -> None:
    check(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_layer_gets_the_bits_of_its_own_launches_on_a_gpu(name: str) -> None:
    check(name)


class _Operations(TorchDispatchMode):
    """Notes operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_what_is_repeated_is_launches_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Between its launches attention may take memory and make views. Any other operation of torch
    would be missing from a repetition, so it must say `other_work`."""
    problem = problem_of(CASES[name])
    layer = layer_of(problem, CASES[name])
    launched: list[str] = []
    for module in (decode, prefill, shares):
        monkeypatch.setattr(
            module, "launch", lambda kernel, *args, **options: launched.append(kernel.__name__)
        )
    step = step_of(problem, OPS)
    monkeypatch.setattr(prefill, "kv_matrix", lambda kv, tiles: None)  # makes a tensor, to check it
    with _Operations() as seen:
        step._attend_rows(layer)
    kernels = ["decode_kernel", "merge_kernel", "prefill_kernel"]
    assert launched == kernels + ["merge_rows_kernel"] * CASES[name].shares_keys
    assert seen.names <= {"aten.empty", "aten.slice"}


def test_tensors_that_lie_otherwise_are_of_another_kind() -> None:
    rows = torch.zeros(4, 8, 16, dtype=torch.bfloat16)
    q, k = rows.split((6, 2), 1)
    same, wider = torch.zeros_like(rows), torch.zeros(4, 9, 16, dtype=torch.bfloat16)
    likeness = Given(q, k, None).likeness
    assert Given(*same.split((6, 2), 1), None).likeness == likeness
    assert Given(q, k, q).likeness != likeness
    assert Given(q, rows[:, 5:7], None).likeness != likeness, "nearer to each other"
    assert Given(*wider[:, :8].split((6, 2), 1), None).likeness != likeness, "strides"
    bytes_of = torch.zeros(2 * rows.numel() + 8, dtype=torch.uint8)
    moved = bytes_of[8:].view(torch.bfloat16).view(rows.shape)
    assert Given(*moved.split((6, 2), 1), None).likeness != likeness, "alignment"


def test_addresses_move_with_the_tensors_that_have_them() -> None:
    """Pointers are integers, as on a GPU, and a descriptor is made of the other tensor."""
    calls: list[list[Any]] = []
    matrix, other = torch.zeros(8, 16), torch.zeros(8, 16)
    table = torch.zeros(4)
    descriptor = TensorDescriptor.from_tensor(matrix[2:], [2, 16])
    with noting() as notes:
        taken = scratch(4, like=matrix)
        pointers = (matrix[1:, 3:], descriptor, None, taken[1:], table)
        notes.add(Launched(lambda given: calls.append([*given]), pointers, True))
    repeatable = Repeatable(notes, Given(matrix, None), Memory([table]))
    given = Given(other, None)
    for _ in range(2):
        assert repeatable.repeat(given)
    address, made, *rest = calls[0]
    assert address == other.data_ptr() + 4 * (16 + 3)
    assert made.base.data_ptr() == other[2:].data_ptr() and made.shape == descriptor.shape
    assert rest == [None, taken.data_ptr() + 4, table.data_ptr()]
    assert calls[1][1] is made, "descriptors are kept"


def test_a_layer_with_memory_of_its_own_is_not_repeated() -> None:
    """It might hold a result that each layer must compute."""
    rows, result = torch.zeros(8), torch.zeros(8)
    with noting() as notes:
        for pointer in (rows, result):
            notes.add(Launched(lambda given: pytest.fail("launched"), (pointer,), True))
    repeatable = Repeatable(notes, Given(rows), Memory([]))
    assert not repeatable.repeat(Given(rows)) and not notes.launches


def test_other_work_is_not_repeated() -> None:
    """Nor is what it launches kept, since temporary memory would be kept with it."""
    problem = problem_of(CASES["plain"])
    layer = layer_of(problem, CASES["plain"])
    with noting() as notes:
        step_of(problem, TORCH)._attend_rows(layer)
    nothing = Memory([])
    assert not Repeatable(notes, layer.given, nothing).repeat(layer.given), "nothing was launched"
    launched = Launched(lambda given: pytest.fail("launched"), (layer.q,), True)
    with noting() as notes:
        notes.add(launched)
        scratch(4, like=layer.q)
        other_work()
        notes.add(launched)
        scratch(4, like=layer.q)
    assert not notes.launches and not notes.scratch
    assert not Repeatable(notes, layer.given, nothing).repeat(layer.given)
    other_work()  # nobody notes


def test_graphs_repeat_the_attention_of_their_layers(paper_graphs: type[PaperGraph]) -> None:
    """Through PiecewiseGraphs, where each layer has rows of its own at fixed addresses."""
    problem = problem_of(CASES["plain"])
    layers = [layer_of(problem, CASES["plain"]) for _ in range(3)]
    attended(step_of(problem, OPS), layers)
    alone = [layer.out.clone() for layer in layers]

    def step(rows: Tensor, cut: Cut) -> Tensor:
        for layer in layers:
            cut(layer)
        return rows

    pieces = PiecewiseGraphs(step, torch.device("cpu"), None)
    pieces.capture([len(problem.q)], lambda done, all: None)
    for layer in layers:
        layer.out.fill_(float("nan"))
    counted: Any = Counted()
    rows = torch.zeros(3, len(problem.q), dtype=torch.int32)
    pieces.replay(rows, step_of(problem, SimpleNamespace(attention=counted)).carry_out)  # type: ignore[arg-type]
    assert counted.calls == 2 and paper_graphs.replays == 4
    for layer, expected in zip(layers, alone, strict=True):
        assert torch.equal(layer.out, expected)
