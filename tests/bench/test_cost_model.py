"""The cost model against numbers counted by hand, and against all that was measured."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.costs import check as cost_check
from benchmarks.costs import run as cost_run
from benchmarks.costs.check import Check, checks, spec_of
from benchmarks.costs.loads import Workers, hand_over_s, split_load
from benchmarks.costs.run import figure, run
from benchmarks.engine import cost_model
from benchmarks.several_gpus import PARTS, document, words
from benchmarks.support.places import RESULTS
from pdserve.kernels.collective.region import RegionLayout
from pdserve.models.config import ModelSpec
from pdserve.plan.costs.rates import H200
from pdserve.plan.costs.step import Chunk, CostModel, Degrees, Step, busiest_experts
from pdserve.plan.costs.sums import FEW_ROWS, LEAST_INPUTS

LLAMA, LARGE, QWEN = map(spec_of, ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"))


def seconds(model: CostModel, step: Step) -> float:
    return sum(sum(stage.values()) for stage in model.stages(step))


@pytest.fixture(scope="module")
def found() -> list[Check]:
    """All that was measured and can be predicted. To predict it takes most of a minute."""
    return list(checks())


def test_all_that_was_measured_is_predicted_within_a_tenth(found: list[Check]) -> None:
    """All Llama rows of two H200s are among what is judged, by their newest figures."""
    assert not [check.record() for check in found if check.is_off]
    judged = {
        (check.model, check.degrees, check.row): check
        for check in found
        if check.is_judged and check.device == "NVIDIA H200"
    }
    rows = {"decode-1", "prefill-8k", "batch-512-in", "batch-512-out"}
    for model, degrees, wanted in (
        ("llama-3.1-8b", Degrees(tp=2), rows | {"batch-64", "batch-256"}),
        ("llama-3.1-8b", Degrees(pp=2), {"prefill-8k", "batch-512-in"}),
        ("llama-3.1-70b", Degrees(tp=2), rows),
        ("llama-3.1-70b", Degrees(pp=2), rows),
    ):
        assert wanted <= {row for name, by, row in judged if (name, by) == (model, degrees)}
    newest = judged["llama-3.1-8b", Degrees(tp=2), "prefill-8k"]
    assert newest.measured == pytest.approx(116.070, abs=0.01)
    assert newest.source == "two-gpus-h200.jsonl, beabea53"
    assert {check.model for check in judged.values()} == set(cost_check.MODELS)


def test_mixtures_on_several_gpus_and_rows_of_four_and_of_h100s_are_shown(
    found: list[Check],
) -> None:
    found = [check for check in found if "TTFT" not in check.row]
    shown = [check for check in found if not check.is_judged]
    assert {str(check.degrees) for check in shown} >= {"TP2 EP2", "TP4 EP4", "DP4 EP4", "TP2 PP2"}
    assert all(
        check.degrees.num_gpus == 4 or "H100" in check.device
        for check in shown
        if "llama" in check.model
    )
    four = [check for check in found if check.degrees.num_gpus == 4 and "H200" in check.device]
    assert not any(check.is_judged for check in four)
    assert {(check.model, str(check.degrees)) for check in four} == {
        ("llama-3.1-8b", "TP4"),
        ("llama-3.1-70b", "TP4"),
        ("llama-3.1-70b", "TP2 PP2"),
        ("qwen3-30b-a3b", "TP4 EP4"),
        ("qwen3-30b-a3b", "DP4 EP4"),
    }


def test_experts_see_the_rows_of_all_homes_and_no_padding() -> None:
    model = CostModel(QWEN, Degrees(dp=2, ep=True))
    chunks = (Chunk(0, 1024),)
    [alike] = model.stages(Step(chunks=chunks, homes=2))
    [other] = model.stages(Step(chunks=chunks, num_elsewhere=1024))
    assert other["experts"] == alike["experts"], "as many rows, wherever they are"
    [alone] = model.stages(Step(chunks=chunks))
    [padded] = model.stages(Step(chunks=chunks, num_padding=1024))
    assert alone["experts"] < other["experts"]
    assert padded["products"] > 1.5 * alone["products"]
    assert padded["attention"] == alone["attention"]
    routed = 48 * 1024 * H200.route_row_s
    assert padded["experts"] == pytest.approx(alone["experts"] + routed)


def test_a_row_that_is_off_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = replace(H200, weight_bytes_per_s=H200.weight_bytes_per_s / 2)
    monkeypatch.setitem(cost_check.DEVICES, "NVIDIA H200", slow)
    monkeypatch.setattr(cost_check, "FILES", ("targets-h200.jsonl",))
    monkeypatch.setattr(sys, "argv", ["cost_model", "--check"])
    assert cost_model.main() == 1
    assert " off " in capsys.readouterr().out


def test_a_decode_step_reads_each_weight_once() -> None:
    """15.0 GB of Llama-8B but for the table of embeddings, of which a rank of two reads a half."""
    bytes_read = 32 * (6144 + 4096 + 3 * 14336) * 4096 * 2
    alone = CostModel(LLAMA).stages(Step(1, 129))[0]
    assert alone["products"] == pytest.approx(bytes_read / H200.weight_bytes_per_s, rel=0.01)
    halved = CostModel(LLAMA, Degrees(tp=2)).stages(Step(1, 129))[0]
    assert halved["products"] == pytest.approx(alone["products"] / 2, rel=0.01)
    assert halved["tails"] < alone["tails"]  # sums have the norms
    assert halved["sums"] == pytest.approx(64 * 3.75e-6, rel=0.01)
    assert alone["sums"] == alone["logits"] == 0


def test_sums_of_few_rows_and_of_many() -> None:
    """64 rows of 8 KiB cross as words of twice the size, 65 as they are. The numbers are in
    sums-h200.jsonl, and of 64 rows of two ranks in designs-h200.jsonl (few_rows=64)."""
    two, four = (CostModel(LLAMA, Degrees(tp=ranks)).sums for ranks in (2, 4))
    assert two.seconds(32) == pytest.approx(5.25e-6, rel=0.02)
    assert two.seconds(64) == pytest.approx(6.68e-6, rel=0.05)
    assert two.seconds(128) == pytest.approx(10.2e-6, rel=0.1)
    assert two.seconds(8192) == pytest.approx(234e-6, rel=0.01)
    assert four.seconds(1) == pytest.approx(6.9e-6, rel=0.05)
    assert four.seconds(32) == pytest.approx(11.6e-6, rel=0.05)
    assert four.seconds(64) == pytest.approx(18.8e-6, rel=0.2)
    assert four.seconds(65) == pytest.approx(22.7e-6, rel=0.1)
    assert four.seconds(8192) == pytest.approx(456e-6, rel=0.03)
    assert CostModel(LLAMA).sums.seconds(8192) == 0


def test_a_long_product_hides_all_but_the_last_piece_of_its_sum() -> None:
    """Pieces have 2,048 rows. Products of fewer than 2,048 inputs are not cut."""
    model = CostModel(LLAMA, Degrees(tp=2))
    sums, piece = model.sums, 2048 * 8192 / H200.store_bytes_per_s
    assert sums.parts(8192, 2047) == [8192]
    assert sums.parts(8192, 2048) == 4 * [2048]
    assert sums.beside_s(4 * [2048], 1.0) == pytest.approx(H200.many_sum_s + piece)
    # A product that takes no time hides nothing.
    assert sums.beside_s(4 * [2048], 0.0) == pytest.approx(sums.seconds(8192))
    step = Step(chunks=(Chunk(0, 8192),))
    [stage] = model.stages(step)
    # The product with o takes less time than its rows are on their way, the one with down more.
    hidden = H200.many_sum_s + piece
    assert 64 * hidden < stage["sums"] < 32 * (hidden + sums.seconds(8192))
    four = CostModel(LARGE, Degrees(tp=4)).sums
    assert four.seconds(8192) / 2 < four.beside_s(4 * [2048], 1.0) < four.seconds(8192)


@pytest.mark.parametrize("spec", [LLAMA, LARGE, QWEN], ids=["8b", "70b", "30b"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_products_are_cut_as_in_the_engine(spec: ModelSpec, ranks: int) -> None:
    layout = RegionLayout(ranks, spec.hidden_size, torch.bfloat16, 512, 128, step_rows=8192)
    sums = CostModel(spec, Degrees(tp=ranks)).sums
    assert (layout.few_rows, layout.least_inputs) == (FEW_ROWS, LEAST_INPUTS)
    for num_rows in (1, 32, 33, 64, 65, 1024, 2048, 3071, 3072, 5000, 8192):
        cut = [part.stop - part.start for part in layout.product_rows(num_rows)]
        assert sums.parts(num_rows, LEAST_INPUTS) == cut, num_rows


def test_busiest_experts_against_draws_by_hand() -> None:
    """One row of 8 among 128: a rank of two has 4 of them on average, the busier one 5.1."""
    assert busiest_experts(1, 128, 8, 1) == pytest.approx(8)
    assert busiest_experts(1, 128, 8, 2) == pytest.approx(5.1, abs=0.05)
    assert busiest_experts(1, 128, 8, 4) == pytest.approx(3.4, abs=0.1)
    assert busiest_experts(4096, 128, 8, 4) == pytest.approx(32)


def test_experts_over_ranks_and_homes() -> None:
    """Many rows: a rank reads its quarter of the experts, with data-parallel attention all homes'
    rows go through them."""
    rows = Step(512, 512 * 512)
    alone = CostModel(QWEN).stages(rows)[0]
    shared = CostModel(QWEN, Degrees(tp=4, ep=True)).stages(rows)[0]
    assert shared["experts"] == pytest.approx(alone["experts"] / 4, rel=0.06)
    assert shared["exchange"] == 0 < shared["sums"]
    homes = CostModel(QWEN, Degrees(dp=4, ep=True)).stages(Step(128, 128 * 512, homes=4))[0]
    assert homes["experts"] == pytest.approx(shared["experts"], rel=0.06)
    assert homes["sums"] == 0 < homes["exchange"]
    assert homes["attention"] == pytest.approx(alone["attention"] / 4)
    sliced = CostModel(QWEN, Degrees(tp=4)).stages(rows)[0]
    assert sliced["experts"] == pytest.approx(alone["experts"] / 4, rel=0.06)


def test_stages_share_the_layers_and_wait_for_each_other() -> None:
    one, two = CostModel(LLAMA), CostModel(LLAMA, Degrees(pp=2))
    step = Step(chunks=(Chunk(0, 8192),))
    first, last = two.stages(step)
    assert first["head"] == 0 < last["head"] and first["products"] == last["products"]
    assert seconds(two, step) == pytest.approx(seconds(one, step), rel=0.01)
    # One prompt of one chunk gains nothing, and one stream waits for the host as well.
    alone = run(one, 1, 128, 256)
    staged = run(two, 1, 128, 256)
    assert staged.seconds == pytest.approx(alone.seconds + 255 * H200.host_step_s, rel=0.03)
    # Chunks follow each other: three halves of a prompt's time for two, instead of two.
    limit = H200.flops_per_s
    one, two = (
        replace(model, rates=replace(H200, rested_flops_per_s=limit)) for model in (one, two)
    )
    assert run(two, 2, 8192, 1).seconds == pytest.approx(
        run(one, 2, 8192, 1).seconds * 3 / 4, rel=0.03
    )
    assert run(two, 512, 256, 512).seconds < 0.7 * run(one, 512, 256, 512).seconds


def test_a_stage_that_waits_computes_faster() -> None:
    """A prompt of 8,192 tokens of Llama-8B is 114 TFLOP in products. Each stage works for 0.1 s and
    rests as long. One stage alone never rests, and one of 70B works for longer than a rest counts.
    """
    gained = 114.3e12 * (1 / H200.flops_per_s - 1 / H200.rested_flops_per_s)
    step = Step(chunks=(Chunk(0, 8192),))
    one, two = CostModel(LLAMA), CostModel(LLAMA, Degrees(pp=2))
    staged = run(two, 1, 8192, 1).seconds
    at_limit = replace(two, rates=replace(H200, rested_flops_per_s=H200.flops_per_s))
    assert run(at_limit, 1, 8192, 1).seconds - staged == pytest.approx(gained, rel=0.02)
    assert run(one, 1, 8192, 1).seconds == pytest.approx(seconds(one, step), rel=0.02)
    large = CostModel(LARGE, Degrees(pp=2))
    unrested = replace(large, rates=replace(H200, rest_s=0.0))
    saved = run(unrested, 1, 8192, 1).seconds - run(large, 1, 8192, 1).seconds
    assert 0 < saved < 2 * H200.rest_s * (H200.rested_flops_per_s / H200.flops_per_s - 1)


def test_pieces_add_up_to_the_whole() -> None:
    for degrees in (Degrees(), Degrees(tp=2), Degrees(tp=2, pp=2)):
        whole = run(CostModel(LLAMA, degrees), 16, 700, 5)
        assert sum(whole.pieces.values()) == pytest.approx(whole.seconds)
        assert all(part >= 0 for part in whole.pieces.values())


def test_the_cache_bounds_what_runs_at_once() -> None:
    """The page docs/design/parallel.md says: 0.9 million tokens of 8B on one GPU, and 0.38 million
    of 70B on two."""
    assert CostModel(LLAMA).room() == pytest.approx(0.9e6, rel=0.02)
    assert CostModel(LARGE, Degrees(tp=2)).room() == pytest.approx(0.38e6, rel=0.02)
    assert CostModel(LARGE, Degrees(tp=4)).room() == pytest.approx(1.2e6, rel=0.03)
    with pytest.raises(ValueError, match=r"weights of 13\d GiB per GPU do not fit"):
        CostModel(LARGE).room()
    small = replace(H200, memory_bytes=16 * 2**30)
    crowded = run(CostModel(LLAMA, rates=small), 64, 1024, 64)
    assert crowded.num_steps > 2 * run(CostModel(LLAMA), 64, 1024, 64).num_steps


def test_sequences_that_outgrow_the_cache_are_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 sequences of Llama-70B begin together, and 18 of them do not fit at their full length.
    Those are computed again, after others have ended; no second wave of 512 steps begins."""
    model = CostModel(LARGE, Degrees(tp=2))
    preempted = []
    preempt = cost_run._Schedule._preempt

    def counted(self: cost_run._Schedule, seq: cost_run._Sequence) -> None:
        preempted.append(seq.keys)
        preempt(self, seq)

    monkeypatch.setattr(cost_run._Schedule, "_preempt", counted)
    crowded = run(model, 512, 256, 512)
    assert 18 <= len(preempted) <= 30 and all(keys > 600 for keys in preempted)
    assert crowded.num_steps < 600
    preempted.clear()
    assert run(model, 400, 256, 512).num_steps > 512 and not preempted


def test_degrees_that_fit_no_model_are_refused() -> None:
    with pytest.raises(ValueError, match="dp=2 needs ep"):
        Degrees(dp=2)
    with pytest.raises(ValueError, match="no experts"):
        CostModel(LLAMA, Degrees(tp=2, ep=True))
    with pytest.raises(ValueError, match="tensor_parallel"):
        CostModel(LLAMA, Degrees(tp=3))


def test_workers_under_a_load() -> None:
    """Prompts of 2,048 tokens take 50 ms, so two workers are full at 40 a second."""
    workers = Workers(2, CostModel(LLAMA))
    light, heavy, full = (split_load(workers, workers, rate, 2048, 128) for rate in (2, 30, 45))
    assert light.ttft_s is not None and heavy.ttft_s is not None
    assert light.ttft_s == pytest.approx(0.053, rel=0.05)
    assert light.ttft_s < heavy.ttft_s
    assert full.ttft_s is None and full.prefill_share > 1
    assert light.tpot_s < heavy.tpot_s < full.tpot_s
    with pytest.raises(ValueError, match="cannot serve 900 requests"):
        split_load(workers, workers, 900, 2048, 128)


def test_hand_overs_use_the_links_of_the_side_with_fewer() -> None:
    """In kv-transfer-h200.jsonl, a GiB takes 3.64 ms."""
    one, two, four = (CostModel(LLAMA, Degrees(tp=ranks)) for ranks in (1, 2, 4))
    assert hand_over_s(one, one, 8192) == pytest.approx(3.64e-3, rel=0.1)
    assert hand_over_s(four, two, 8192) == hand_over_s(two, four, 8192)
    gained = hand_over_s(one, one, 8192) - hand_over_s(two, two, 8192)
    assert gained == pytest.approx(2**30 / 2 / H200.hand_over_bytes_per_s)


def test_the_table_and_the_lines_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    given = ["--model", "qwen3-30b-a3b", "--dp", "2", "--ep", "--out", str(out), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["cost_model", *given])
    assert cost_model.main() == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    expected = [row.id for row in cost_check.table_of("qwen3-30b-a3b")]
    assert [row["row"] for row in rows] == expected and "exchange" in capsys.readouterr().out
    model = CostModel(QWEN, Degrees(dp=2, ep=True))
    for row, target in zip(rows, cost_check.table_of("qwen3-30b-a3b"), strict=True):
        assert row["predicted"] == pytest.approx(figure(model, target)[0], abs=1e-3)
        assert sum(row["pieces"].values()) == pytest.approx(row["seconds"], abs=1e-4)
    monkeypatch.setattr(sys, "argv", ["cost_model", "--tp", "3"])
    assert cost_model.main() == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "degrees"), cost_model.CASES)
def test_saved_predictions_are_those_of_this_model(name: str, degrees: Degrees) -> None:
    """Whoever changes a rate writes results/cost-model.jsonl anew."""
    lines = (RESULTS / "cost-model.jsonl").read_text().splitlines()
    found = {
        (row["model"], row["degrees"], row["row"]): row["predicted"]
        for row in map(json.loads, lines)
        if "pieces" in row
    }
    for row in cost_model.predictions(name, degrees):
        key = (name, str(degrees), row["row"])
        assert math.isclose(found[key], row["predicted"], rel_tol=1e-6), key


@pytest.mark.processes
def test_several_gpus_asks_for_options_that_exist(tmp_path: Path) -> None:
    """But for those that it knows to be missing, by which it leaves a part out."""
    helps: dict[tuple[str, ...], str] = {}
    for part in [part for parts in PARTS.values() for part in parts]:
        for command in words(part, tmp_path):
            flags = [word for word in command if word.startswith("--")]
            module = tuple(command[:3] if not part.cluster else command[:5])
            if module not in helps:
                helps[module] = subprocess.run(
                    [*module, "--help"], capture_output=True, text=True, check=True
                ).stdout
            known = helps[module].replace(",", " ").split()
            assert {flag for flag in flags if flag not in known} == part.missing, part.id
        if part.cluster:
            document(part, tmp_path, 1234)
