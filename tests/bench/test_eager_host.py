"""Tests benchmarks/engine/eager_host.py without a GPU: its arguments, the steps that it builds, and
its medians."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine import eager_host
from benchmarks.engine.eager_host import (
    CASES,
    LLAMA_8B,
    Stair,
    Step,
    measure_stairs,
    mixed_cases,
    parse,
    stair,
)
from pdserve.kernels.attention.spec import Paged, Prefills
from pdserve.kernels.ops import TORCH

TINY = LLAMA_8B.model_copy(
    update={
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 50,
    }
)
CPU = torch.device("cpu")


def test_every_number_of_rows_beside_every_number_of_decodes() -> None:
    args, cases = parse(["--rows", "2048", "2084", "--decodes", "0", "36", "--commit", "abc"])
    assert cases == [(0, (2048,)), (0, (2084,)), (36, (2012,)), (36, (2048,))]
    assert args.commit == "abc" and args.out is None
    assert parse(["--rows", "7"])[1] == [(0, (7,))]
    assert parse([])[1] == [], "the fixed cases are not asked for"


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--decodes", "4"], "--decodes needs --rows"),
        (["--rows"], "expected at least one argument"),
        (["--rows", "many"], "invalid int value"),
        (
            ["--rows", "64", "20", "--decodes", "0", "19"],
            "20 rows with 19 decodes leave a chunk of 1",
        ),
        (["--rows", "20", "--decodes", "40"], "leave a chunk of -20"),
        (["--rows", "20", "--decodes", "-4"], "must not be negative"),
        (["--rows", "8193"], "2 to 8192 above --decodes"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


class Spy:
    """The reference's attention; notes what it was given."""

    warm_prefill = staticmethod(TORCH.attention.warm_prefill)

    def __init__(self) -> None:
        self.decodes: list[tuple[int, list[int], int]] = []
        self.prefills: list[tuple[int, list[int], list[int], int]] = []

    def decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        paged: Paged,
        spec: Any,
        out: Any = None,
        v_scales: Any = None,
        sinks: Any = None,
    ) -> torch.Tensor:
        self.decodes.append((len(q), paged.context_lens.tolist(), paged.longest))
        return TORCH.attention.decode(q, kv, paged, spec, out, v_scales, sinks)

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        prefills: Prefills,
        spec: Any,
        out: Any = None,
        v_scales: Any = None,
        sinks: Any = None,
    ) -> torch.Tensor:
        longest = prefills.max_query_len
        paged = prefills.paged
        assert paged.tables.shape[1] * kv.shape[3] >= longest, "a table too short for the chunk"
        starts = prefills.query_starts.tolist()
        self.prefills.append((len(q), paged.context_lens.tolist(), starts, longest))
        return TORCH.attention.prefill(q, k, v, kv, prefills, spec, out, v_scales, sinks)


@pytest.mark.parametrize(
    "case", [*mixed_cases([20, 41], [0, 3]), *[CASES["201 decodes + 2 x 255"]], (1, (4200,))]
)
def test_a_step_has_the_rows_of_its_case(case: eager_host.Case) -> None:
    num_decodes, prompts = case
    spy = Spy()
    Step(TINY, replace(TORCH, attention=spy), CPU).forward(*case)()
    starts = [sum(prompts[:i]) for i in range(len(prompts) + 1)]
    assert spy.prefills == [(sum(prompts), list(prompts), starts, max(prompts))] * TINY.num_layers
    assert spy.decodes == (
        [(num_decodes, [1000] * num_decodes, 1000)] * TINY.num_layers if num_decodes else []
    )


def test_stairs_are_medians_of_rounds_over_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[eager_host.Case] = []
    seconds: dict[eager_host.Case, Iterator[float]] = {
        (0, (20,)): iter([9.0, 0.001, 0.002]),
        (4, (16,)): iter([0.004, 0.004, 9.0]),
    }

    def timed(run: Any) -> tuple[float, float]:
        run()
        return 0.0005, next(seconds[order[-1]])

    monkeypatch.setattr(eager_host, "timed", timed)
    monkeypatch.setattr(eager_host, "ROUNDS", 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    step: Any = SimpleNamespace(forward=lambda *case: lambda: order.append(case))
    cases = mixed_cases([20], [0, 4])
    stairs = measure_stairs(step, cases, "abc")
    assert order == cases * 6, "three to warm up, three that count"
    assert stairs == [
        Stair(20, 0, 0.5, 2.0, 100.0, 3, "a device", "abc"),
        Stair(20, 4, 0.5, 4.0, 200.0, 3, "a device", "abc"),
    ]


def test_time_a_row_counts_the_decodes() -> None:
    [case] = mixed_cases([2084], [36])
    assert stair(case, [(0.004, 0.053)] * 5, "", "").us_per_row == pytest.approx(
        53000 / 2084, abs=1e-3
    )
