"""A worker reports its KV cache, as a reader of /metrics sees it."""

from pathlib import Path

import pytest
import torch
from engine.harness import Driver, make_engine

from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker.metrics import WorkerMetrics


def values(metrics: WorkerMetrics) -> dict[str, float]:
    """By name, or name and the value of its one label."""
    samples = [
        sample
        for family in metrics.families()
        for sample in family.samples
        if len(sample.labels) < 2
    ]
    return {":".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_pools_use_and_fragmentation(tiny_llama: Path, device: str) -> None:
    engine = make_engine(tiny_llama, num_kv_blocks=33, block_size=16, device=device)
    metrics = WorkerMetrics(engine)
    idle = values(metrics)
    assert idle["pdserve_kv_blocks:free"] == idle["pdserve_kv_longest_blank_run_blocks"] == 32
    assert idle["pdserve_kv_blank_runs"] == 1 and idle["pdserve_kv_fragmentation_perc"] == 0
    assert idle["pdserve_device_memory_bytes:kv_pool"] == 33 * engine.layout.block_bytes

    driver = Driver(engine)
    driver.add(list(range(100)), SamplingParams(temperature=0, max_tokens=4))
    driver.run()
    after = values(metrics)
    assert after["pdserve_kv_cached_free_blocks"] == 100 // 16, "full blocks stay known"
    assert after["pdserve_kv_blocks:free"] == 32

    engine.blocks.begin_step()
    engine.blocks.release(engine.blocks.allocate(3))
    busy = values(metrics)
    states = {
        state: busy[f"pdserve_kv_blocks:{state}"]
        for state in ("free", "owned", "quarantined", "retiring")
    }
    assert states["retiring"] == 3 and sum(states.values()) == 32
    engine.blocks.end_step()

    blocks = engine.blocks.allocate(20)
    engine.blocks.release([blocks[4]])
    split = values(metrics)
    longest = split["pdserve_kv_longest_blank_run_blocks"]
    assert split["pdserve_kv_blocks:free"] == 13 and split["pdserve_kv_cached_free_blocks"] == 6
    assert split["pdserve_kv_blank_runs"] >= 2 and 1 <= longest < 7
    assert split["pdserve_kv_fragmentation_perc"] == pytest.approx(1 - longest / 7)
    assert split["pdserve_kv_cache_usage_perc"] == pytest.approx(19 / 32)


@pytest.mark.gpu
def test_device_memory_adds_up(tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, num_kv_blocks=4096, device="cuda")
    held = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    seen = {
        k.split(":")[1]: v for k, v in values(WorkerMetrics(engine)).items() if "device_memory" in k
    }
    assert held.numel() <= seen["torch_allocated"] <= seen["torch_reserved"]
    assert seen["torch_reserved"] + seen["kv_pool"] <= seen["used"] <= seen["total"]
