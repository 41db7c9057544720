"""The parts of an engine: device, model, KV cache and executor, made in the order in which they
need memory.

Weights come first, then a profiling step, then the KV cache from the memory that is left. The ranks
of one engine do this side by side and agree after each part. Knows no requests. Called once by each
engine, and by each of its other ranks.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pdserve.configs.engine import EngineConfig, ModelConfig, ResolvedEngineConfig
from pdserve.configs.kv_layout import KVLayout, rows_digest
from pdserve.engine.execution import trial_steps
from pdserve.engine.execution.expert_load import ExpertLoad
from pdserve.engine.execution.follower import Follower
from pdserve.engine.execution.local_executor import LocalExecutor
from pdserve.engine.execution.model_runner import ModelRunner
from pdserve.engine.execution.stage import Stage
from pdserve.engine.expert_places import load_to_place_by, placements_of
from pdserve.engine.graph_sizes import decode_sizes, prompt_sizes
from pdserve.engine.memory.cpu_memory import keep_freed_memory
from pdserve.engine.memory.kv_cache import FP8, TORCH_DTYPES, layout_of
from pdserve.engine.memory.kv_cache_size import (
    allocate_kv_cache,
    await_those_who_leave,
    num_blocks_for,
)
from pdserve.engine.memory.row_scales import row_scales
from pdserve.engine.rank_links import link_ranks
from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.sampling.rules.registry import logit_rules
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.scheduling.home import num_slots_for
from pdserve.engine.stepping.executor import Executor
from pdserve.kernels import e4m3
from pdserve.kernels.ops import ops_for
from pdserve.models.checkpoint import resolve_folder
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.loader import load_model
from pdserve.models.task import read_embedding
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import stage_layers
from pdserve.protocol.start_progress import StartProgress


@dataclass(frozen=True)
class EngineComponents:
    """The parts that an engine is made of, on rank 0."""

    config: ResolvedEngineConfig  # nothing in it is left to choose
    device: torch.device
    spec: ModelSpec
    layout: KVLayout
    executor: Executor
    staging: RowStaging
    num_blocks: int
    fingerprint: str  # identifies the model and the dtype it computes in
    rows_digest: str  # covers the rows of all layers, whichever rank holds them
    unrounded: Mapping[str, str]  # see KVCacheMemory
    max_model_len: int  # tokens per request that the model and the configuration allow
    expert_load: ExpertLoad | None  # rank 0's layers; None if they have no experts


@dataclass(frozen=True)
class _Loaded:
    """A rank with its share of the model and without a KV cache yet."""

    config: ResolvedEngineConfig
    spec: ModelSpec
    layout: KVLayout
    runner: ModelRunner
    num_slots: int
    fingerprint: str
    rows_digest: str
    unrounded: Mapping[str, str]
    max_model_len: int
    links_bytes: int  # see RankLinks


def make_components(
    model: ModelConfig, config: EngineConfig, progress: StartProgress, group: RankGroup
) -> EngineComponents:
    """Load rank 0's share of the model and allocate its KV cache; ValueError names the parameter
    that is wrong."""
    loaded = _load(model, config, progress, group)
    resolved = loaded.config
    runner = loaded.runner
    device = runner.device
    vocab_size = loaded.spec.vocab_size
    num_eos = len(loaded.spec.eos_token_ids)
    rules = logit_rules(
        runner.ops, vocab_size, loaded.num_slots, num_eos, device, resolved.grammar_mask_s
    )
    sampler = Sampler(runner.ops, vocab_size, rules, device)
    samples = resolved.data_parallel * _home_samples(resolved)
    beside = sampler.peak_bytes(samples) + sampler.state_bytes()
    num_blocks = _give_memory(loaded, beside, progress, group)
    executor = LocalExecutor(runner, sampler, _load_of(runner))
    _compile(executor, resolved, device, progress, group)
    staging = RowStaging(rules, vocab_size, loaded.num_slots)
    return EngineComponents(
        resolved,
        device,
        loaded.spec,
        loaded.layout,
        executor,
        staging,
        num_blocks,
        loaded.fingerprint,
        loaded.rows_digest,
        loaded.unrounded,
        loaded.max_model_len,
        executor.load,
    )


def make_follower(
    model: ModelConfig, config: EngineConfig, progress: StartProgress, group: RankGroup
) -> Follower:
    """Make another rank's part, while rank 0 runs `make_components`."""
    loaded = _load(model, config, progress, group)
    _give_memory(loaded, 0, progress, group)
    load = _load_of(loaded.runner)
    follower = Follower(
        loaded.runner,
        loaded.fingerprint,
        loaded.rows_digest,
        loaded.unrounded,
        load,
        group.agree,
    )
    _compile(follower, loaded.config, loaded.runner.device, progress, group)
    return follower


def _load(
    model: ModelConfig, config: EngineConfig, progress: StartProgress, group: RankGroup
) -> _Loaded:
    progress.enter("config")
    device = _device(config.device, group.device_index)
    resolved = config.for_device("cuda" if device.type == "cuda" else "cpu")
    if device.type == "cpu":
        keep_freed_memory()
    if resolved.kv_cache_dtype == "fp8":
        e4m3.check_device(device)
    if resolved.deterministic and device.type == "cuda":
        raise ValueError(
            "engine.deterministic is not supported on CUDA yet: set it to false (CPU always is)"
        )
    path = model.resolved_path
    with ThreadPoolExecutor(1) as beside:  # both mostly wait, so a thread is enough
        awake = beside.submit(_wake, device)
        if group.dims.rank == 0:
            if not Path(path).is_dir():
                progress.enter("download")
                folder = resolve_folder(path, model.load_format, model.revision, progress.report)
                path = str(folder)
                progress.enter("config")
            spec = read_spec(
                path,
                model.load_format,
                model.seed,
                model.quantization,
                model.kv_scales,
                model.activation_dtype,
            )
            if read_embedding(Path(path), model.task) is not None:
                spec = spec.without_head()
            spec.check_parallel(group.dims, resolved.redundant_experts)
            load = load_to_place_by(resolved, spec)
            group.agree("config", [path, spec.model_dump_json(), load])
        else:
            path, said, load = group.agree("config")[0]
            spec = ModelSpec.model_validate_json(said)
        progress.enter("device")
        awake.result()
        await_those_who_leave(resolved, device)
    max_len = spec.max_len(resolved.max_model_len)
    spec = spec.for_length(max_len)
    dtype = _dtype(model.dtype, spec, device)
    torch_dtype = TORCH_DTYPES[dtype]
    links = link_ranks(group, device, spec, torch_dtype, resolved)
    ops = replace(ops_for(device), collective=links.collective, exchange=links.exchange)
    progress.enter("weights")
    weights = load_model(
        path,
        spec,
        torch_dtype,
        device,
        ops,
        load_format=model.load_format,
        seed=model.seed,
        dims=group.dims,
        report=progress.report,
        placements=placements_of(spec, group.dims, resolved, load),
    )
    kv_dtype = _kv_dtype(resolved, spec, dtype)
    peer_stages = stage_layers(spec.num_layers, resolved.peer_stages)
    layout = layout_of(weights.attention, resolved.block_size, kv_dtype, peer_stages)
    layouts = [
        KVLayout.model_validate(said) for said in group.agree("weights", layout.model_dump())
    ]
    num_slots = resolved.data_parallel * num_slots_for(resolved.max_num_seqs)
    runner = ModelRunner(
        weights,
        resolved.block_size,
        num_slots,
        layout.num_blocks_for(max_len),
        ops,
        device,
        Stage(group.dims, links.pipe),
        row_scales(spec.kv_scales, weights.attention, device) if kv_dtype == FP8 else {},
    )
    fingerprint = f"{spec.fingerprint()}/{dtype}"
    digest, plain = (
        rows_digest(fingerprint, [rows for each in found for rows in each.groups])
        for found in (layouts, [each.with_dtype(dtype) for each in layouts])
    )
    unrounded = {plain: dtype} if kv_dtype == FP8 else {}
    return _Loaded(
        resolved,
        spec,
        layout,
        runner,
        num_slots,
        fingerprint,
        digest,
        unrounded,
        max_len,
        links.num_bytes,
    )


def _load_of(runner: ModelRunner) -> ExpertLoad | None:
    counts = runner.model.expert_load
    return ExpertLoad(counts) if counts else None


def _give_memory(
    loaded: _Loaded, sampling_bytes: int, progress: StartProgress, group: RankGroup
) -> int:
    """Allocate the KV cache, with as many blocks as every rank has room for. sampling_bytes: the
    memory that this rank needs for sampling."""
    runner = loaded.runner
    is_profiled = runner.device.type == "cuda" and loaded.config.num_kv_blocks is None
    reserved = 0
    if is_profiled:
        progress.enter("compile")
        reserved = _step_bytes(loaded.config, runner) + sampling_bytes
    progress.enter("kv_memory")
    num_blocks = num_blocks_for(
        loaded.config, loaded.layout, runner.device, reserved, loaded.links_bytes
    )
    num_blocks = min(group.agree("kv_memory", num_blocks))
    runner.use_kv_cache(allocate_kv_cache(loaded.layout, num_blocks, runner.device, runner.scales))
    return num_blocks


def _compile(
    hands: LocalExecutor | Follower,
    config: ResolvedEngineConfig,
    device: torch.device,
    progress: StartProgress,
    group: RankGroup,
) -> None:
    if device.type == "cuda":
        progress.enter("graphs")
        decodes = decode_sizes(config.max_num_seqs) if config.cuda_graphs else []
        hands.compile(decodes, _prompt_sizes(config, hands.runner), progress.report)
        group.agree("graphs")


def _step_bytes(config: ResolvedEngineConfig, runner: ModelRunner) -> int:
    """Device memory that the largest step and the graphs need, in addition to weights, KV cache and
    sampling."""
    rows = config.max_num_batched_tokens
    samples = _home_samples(config)
    step = trial_steps.peak_bytes(runner, rows, samples)
    if not config.cuda_graphs:
        return step
    captured = max([samples, *_prompt_sizes(config, runner)])
    return step + trial_steps.peak_bytes(runner, captured, samples)  # all graphs share one memory


def _prompt_sizes(config: ResolvedEngineConfig, runner: ModelRunner) -> list[int]:
    """Numbers of rows of the steps with prompts that are captured. Attention over latents has no
    place where graphs could be cut."""
    spec = runner.model.spec
    if not config.cuda_graphs or spec.latent is not None:
        return []
    stage_ranks = runner.stage.dims.stage_size
    return prompt_sizes(config.max_num_batched_tokens, spec.experts is not None, stage_ranks)


def _home_samples(config: ResolvedEngineConfig) -> int:
    """Maximum number of rows of one home that sample in a step."""
    return min(config.max_num_batched_tokens, config.max_num_seqs)


def _device(name: str, index: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "engine.device is 'cuda', but torch sees no CUDA device: set it to cpu or auto"
        )
    if name != "cuda":
        return torch.device(name)
    if index >= torch.cuda.device_count():
        raise ValueError(
            "engine.tensor_parallel times engine.data_parallel times engine.pipeline_parallel "
            f"ranks need a GPU each, but torch sees {torch.cuda.device_count()}: lower one of "
            "them, or give the process more GPUs"
        )
    return torch.device(name, index)


def _wake(device: torch.device) -> None:
    """Create the device's context and load cuBLAS."""
    ones = torch.ones(16, 16, device=device)
    torch.mm(ones, ones)


def _dtype(name: str, spec: ModelSpec, device: torch.device) -> str:
    """The dtype to compute in. "auto" means the checkpoint's dtype on CUDA, and float32 on CPU.
    Float32 is exact enough there to be batch-invariant.
    """
    if name != "auto":
        return name
    return spec.dtype if device.type == "cuda" else "float32"


def _kv_dtype(config: ResolvedEngineConfig, spec: ModelSpec, dtype: str) -> str:
    """Choose the dtype of the KV cache of a model that computes in `dtype`."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if spec.latent is not None:
        raise ValueError(
            "engine.kv_cache_dtype: fp8 is not supported for latents, which stand for all heads at "
            "once (DeepSeek's attention): set it to auto"
        )
    return FP8
