"""The parts of an engine: device, model, KV cache and executor, put together in the order that
their memory asks for.

Weights first, then a profiling step, then the KV cache from what is left. Knows no requests. Called
once by each engine.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from pdserve.configs.engine import EngineConfig, ModelConfig, ResolvedEngineConfig
from pdserve.configs.kv_layout import KVLayout
from pdserve.engine.execution.cuda_graphs import graph_sizes
from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.execution.model_runner import ModelRunner
from pdserve.engine.memory.cpu_memory import keep_freed_memory
from pdserve.engine.memory.kv_cache import TORCH_DTYPES, layout_of
from pdserve.engine.memory.kv_cache_size import allocate_kv_cache, num_blocks_for
from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.rules.registry import logit_rules
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.scheduling.home import num_slots_for
from pdserve.engine.stepping.executor import Executor
from pdserve.kernels.ops import ops_for
from pdserve.models.checkpoint import resolve_folder
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.loader import load_model
from pdserve.protocol.start_progress import StartProgress


@dataclass(frozen=True)
class EngineComponents:
    """config: with nothing left to choose. fingerprint: of the model and the dtype it computes in.
    max_model_len: tokens a request may have as far as the model and the configuration go.
    """

    config: ResolvedEngineConfig
    device: torch.device
    spec: ModelSpec
    layout: KVLayout
    executor: Executor
    staging: RowStaging
    num_blocks: int
    fingerprint: str
    max_model_len: int


def make_components(
    model: ModelConfig, config: EngineConfig, progress: StartProgress
) -> EngineComponents:
    """Load the model and allocate the KV cache; ValueError names the parameter that is wrong."""
    progress.enter("config")
    device = _device(config.device)
    resolved = config.for_device("cuda" if device.type == "cuda" else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    if resolved.deterministic and device.type == "cuda":
        raise ValueError(
            "engine.deterministic is not supported on CUDA yet: set it to false (CPU is always so)"
        )
    path = model.resolved_path
    load_format = model.load_format
    with ThreadPoolExecutor(1) as beside:  # both wait rather than work
        awake = beside.submit(_wake, device)
        if not Path(path).is_dir():
            progress.enter("download")
            path = str(resolve_folder(path, load_format))
            progress.enter("config")
        spec = read_spec(path, load_format, model.seed)
        progress.enter("device")
        awake.result()
    max_len = spec.max_len(resolved.max_model_len)
    dtype = _dtype(model.dtype, spec, device)
    ops = ops_for(device)
    progress.enter("weights")
    weights = load_model(
        path,
        spec,
        TORCH_DTYPES[dtype],
        device,
        ops,
        load_format=load_format,
        seed=model.seed,
        report=progress.report,
    )
    layout = layout_of(weights.attention, resolved.block_size, dtype)
    num_slots = num_slots_for(resolved.max_num_seqs)
    runner = ModelRunner(
        weights, resolved.block_size, num_slots, layout.num_blocks_for(max_len), ops, device
    )
    rules = logit_rules(ops, spec.vocab_size, num_slots, len(spec.eos_token_ids), device)
    sampler = Sampler(ops, spec.vocab_size, rules, device)
    if _is_profiled(resolved, device):
        progress.enter("compile")
    reserved = _reserved_bytes(resolved, runner, sampler)
    progress.enter("kv_memory")
    num_blocks = num_blocks_for(resolved, layout, device, reserved)
    runner.use_kv_cache(allocate_kv_cache(layout, num_blocks, device))
    executor = LocalExecutor(runner, sampler)
    if device.type == "cuda":
        progress.enter("graphs")
        sizes = graph_sizes(resolved.max_num_seqs) if resolved.cuda_graphs else []
        executor.compile(sizes, progress.report)
    fingerprint = f"{spec.fingerprint()}/{dtype}"
    staging = RowStaging(rules, spec.vocab_size, num_slots)
    return EngineComponents(
        resolved, device, spec, layout, executor, staging, num_blocks, fingerprint, max_len
    )


def _is_profiled(config: ResolvedEngineConfig, device: torch.device) -> bool:
    return device.type == "cuda" and config.num_kv_blocks is None


def _reserved_bytes(config: ResolvedEngineConfig, runner: ModelRunner, sampler: Sampler) -> int:
    """Device memory that the largest step, and the graphs, need beside weights and KV cache."""
    if not _is_profiled(config, runner.device):
        return 0
    rows = config.max_num_batched_tokens
    samples = min(rows, config.max_num_seqs)
    step = (
        runner.peak_activation_bytes(rows, samples)
        + sampler.peak_bytes(samples)
        + sampler.state_bytes()
    )
    if not config.cuda_graphs:
        return step
    return step + runner.peak_activation_bytes(samples, samples)  # the graphs share one memory


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "engine.device is 'cuda', but torch sees no CUDA device: set it to cpu or auto"
        )
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _wake(device: torch.device) -> None:
    """Make the device's context and load cuBLAS."""
    ones = torch.ones(16, 16, device=device)
    torch.mm(ones, ones)


def _dtype(name: str, spec: ModelSpec, device: torch.device) -> str:
    """ "auto" is the checkpoint's dtype on CUDA; on CPU always float32, whose arithmetic is exact
    enough to be invariant.
    """
    if name != "auto":
        return name
    return spec.dtype if device.type == "cuda" else "float32"
