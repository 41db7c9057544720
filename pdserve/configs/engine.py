"""The configuration of a model and of one engine that runs it."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

import pdserve
from pdserve.configs.base import Config

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Device = Literal["cpu", "cuda"]
# the names in docs/use/tools.md
ToolFormat = Literal[
    "auto",
    "none",
    "hermes",
    "llama3-json",
    "mistral",
    "mistral-args",
    "qwen3-coder",
    "deepseek-v3",
    "deepseek-v3.1",
]
ReasoningFormatName = Literal["auto", "none", "think", "mistral-think"]
MAX_RANKS = 32  # of tensor parallelism: more than any node has GPUs
MAX_STAGES = 64


OnlineScheme = Literal["fp8"]
"""Formats into which 16-bit weights can be quantised while they are loaded."""
ActivationDtype = Literal["auto", "16-bit", "fp8"]


class ModelConfig(Config):
    """The model that is served, and its names."""

    path: str = "demo/pdserve-demo"
    """A local folder in Hugging Face format, or a Hub id. A relative folder is looked for in the
    working directory, then in the `pdserve` package, which holds the demo model."""
    name: str | None = Field(None, min_length=1)
    """Name that clients send as `model`; None: the last part of `path`."""
    served_names: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Several names, instead of `name`. Answers carry the name that was asked for; metrics and logs
    carry the first."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model; None: `main`."""
    tokenizer: str | None = None
    """Another folder or Hub id to take the tokenizer from; None: the model's own."""
    chat_template: str | None = None
    """A chat template, or a file with one on every node that has routers; None: the model's own."""
    dtype: Dtype = "auto"
    """Data type of weights and activations; `auto` takes the checkpoint's."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`auto` reads safetensors. `dummy` draws random weights and needs only config.json."""
    seed: int = 0
    """Seed of the `dummy` weights."""
    quantization: OnlineScheme | None = None
    """`fp8` quantises 16-bit weights while they are loaded (docs/use/quantisation.md); None leaves
    them as they are."""
    activation_dtype: ActivationDtype = "auto"
    """Data type of the activations that int4 weights are multiplied by (docs/use/quantisation.md).
    `fp8` makes steps of many tokens faster and rounds more; `16-bit` does not round; `auto` takes
    what the checkpoint asks for, which is 16 bits for AWQ and GPTQ."""
    kv_scales: str | None = None
    """File of scales for a KV cache in fp8, made by `pdserve calibrate-kv`; None: the checkpoint's
    scales, else 1."""
    generation_config: Literal["auto", "none"] = "auto"
    """Source of the sampling parameters that a request leaves out. `auto`: the model's
    generation_config.json, as with vLLM. `none`: OpenAI's defaults."""
    tool_format: ToolFormat = "auto"
    """Format in which the model writes tool calls (docs/use/tools.md). `auto` finds it in the chat
    template and the vocabulary; `none` reads all text as content."""
    reasoning_format: ReasoningFormatName = "auto"
    """Format in which the model writes its reasoning (docs/use/tools.md). `auto` and `none` mean
    the same as for `tool_format`."""
    tool_enforcement: Literal["schema", "syntax", "off"] = "schema"
    """Part of a tool call that is enforced while tokens are drawn. `schema`: its format, and
    arguments that follow the function's schema. `syntax`: only its format. `off`: nothing, unless
    `tool_choice` forces a call."""
    task: Literal["auto", "generate", "embed"] = "auto"
    """Whether the model generates or embeds (docs/use/embeddings.md); `auto` finds it in the
    checkpoint."""

    @field_validator("served_names", mode="before")
    @classmethod
    def _one_is_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_names(self) -> "ModelConfig":
        if self.name is not None and self.served_names:
            raise ValueError(
                f"model.name ({self.name!r}) and model.served_names exclude each other: write all "
                "names into model.served_names, the one for metrics first"
            )
        twice = [name for name, count in Counter(self.served_names).items() if count > 1]
        if twice:
            raise ValueError(f"model.served_names has {twice[0]!r} twice: write it once")
        return self

    @property
    def served_name(self) -> str:
        """The name in metrics and logs: the first of `all_names`."""
        return self.all_names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that clients may send as `model`."""
        return self.served_names or (self.name or Path(self.path).name,)

    @property
    def resolved_path(self) -> str:
        """The absolute path of an existing folder, or `path` unchanged, which is then a Hub id."""
        return _found(self.path)

    @property
    def resolved_tokenizer(self) -> str | None:
        """The tokenizer's folder or Hub id, as in `resolved_path`; None: the model's own."""
        return None if self.tokenizer is None else _found(self.tokenizer)

    def template(self) -> str | None:
        """The chat template that replaces the model's own; None: there is none. Raises ValueError
        when its file cannot be read."""
        said = self.chat_template
        if said is None or "{{" in said or "{%" in said:
            return said
        try:
            return Path(_found(said)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"model.chat_template: {said!r} is neither a template nor a file that can be read "
                f"({error})"
            ) from error


def _found(path: str) -> str:
    """The absolute form of a path that exists relative to the working directory or to the package,
    which holds the demo model. Any other path is returned unchanged."""
    for base in (Path(), Path(pdserve.__file__).parent):
        if (base / path).exists():
            return str((base / path).resolve())
    return path


class EngineConfig(Config):
    """One engine: batch limits, KV cache, device and ranks.

    `for_device` replaces each None that depends on the device.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine computes; `auto` takes CUDA where there is a GPU."""
    block_size: Literal[16, 32, 64, 128] | None = None
    """Tokens per KV block. Prefixes are shared in whole blocks; None: 16 on CPU, 64 on CUDA, where
    larger blocks are read faster."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence (prompt and output), in tokens; None: what the model allows."""
    max_num_batched_tokens: int | None = Field(None, ge=16)
    """Most tokens in one step; None: 2,048 on CPU, 8,192 on CUDA. A prompt of 2,048 tokens or more
    does not share a step with other prompts, except while running streams limit the step."""
    max_num_seqs: int | None = Field(None, ge=1)
    """Most sequences in one step; None: 256 on CPU, 512 on CUDA."""
    num_kv_blocks: int | None = Field(None, ge=2)
    """Size of the KV cache, in blocks. None: what fits into `kv_memory_bytes` on CPU; on CUDA, what
    `kv_memory_fraction` leaves after a profiling step."""
    kv_memory_bytes: int = Field(256 << 20, ge=1)
    """Memory for the KV cache on CPU, in bytes."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of keys and values in the KV cache; `fp8` (e4m3) holds twice as many tokens, `auto`
    takes the model's."""
    kv_memory_fraction: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory for weights, activations and KV cache together. A higher share
    gives more KV blocks, and leaves less to other processes."""
    enable_prefix_caching: bool = True
    """Whether prompts reuse the KV blocks of earlier prompts with the same beginning."""
    deterministic: bool = False
    """Whether results are independent of the batch. On CPU they always are; CUDA refuses it."""
    async_scheduling: bool | None = None
    """Whether the next step is planned and queued while the device computes; None: true on CUDA,
    false on CPU."""
    cuda_graphs: bool = True
    """Whether steps on CUDA are captured once and replayed: those of decodes, and those with
    prompts of up to 1,024 rows. With experts, or if several ranks share layers: of up to 3,072
    rows. With both: of up to 8,192."""
    tensor_parallel: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of ranks that share every layer, each with its own GPU (docs/design/parallel.md)."""
    data_parallel: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of homes: groups of ranks that have their own sequences and KV cache, and share the
    experts. `max_num_seqs`, `max_num_batched_tokens` and `num_kv_blocks` are per home."""
    expert_parallel: bool = False
    """Whether each rank of a stage holds some experts whole, instead of a slice of every expert."""
    redundant_experts: int = Field(0, ge=0)
    """Number of additional copies of the busiest experts, as counted in `expert_load_file`."""
    expert_load_file: str | None = None
    """File with the number of rows that each expert received, by layer, as written by
    `pdserve expert-load` or `LLM.save_expert_load`."""
    pipeline_parallel: int = Field(1, ge=1, le=MAX_STAGES)
    """Number of stages. Each stage has some of the layers, on `tensor_parallel` times
    `data_parallel` ranks."""
    peer_stages: int = Field(1, ge=1, le=MAX_STAGES)
    """Number of stages of the workers that exchange KV with this one. Inside a block, the layers of
    each of those stages lie together, so that a hand-off takes few, long transfers. A cluster sets
    it from the other deployment."""
    step_deadline_s: float | None = Field(None, gt=0)
    """Seconds after which a step counts as hung and the engine ends; None: 600 on CPU, 60 on CUDA.
    """
    grammar_build_s: float = Field(5.0, gt=0, le=600)
    """Seconds that building a request's grammar may take before the request fails."""
    grammar_mask_s: float = Field(0.1, gt=0, le=600)
    """Seconds that a grammar may take for one token mask. With the third slower mask its request
    fails."""

    @model_validator(mode="after")
    def _check_experts(self) -> "EngineConfig":
        if self.data_parallel > 1 and not self.expert_parallel:
            raise ValueError(
                f"data_parallel is {self.data_parallel} without expert_parallel: engines that "
                "share no experts are replicas. Raise the number of replicas instead, or set "
                "expert_parallel: true"
            )
        for name in ("redundant_experts", "expert_load_file"):
            if getattr(self, name) and not self.expert_parallel:
                raise ValueError(
                    f"{name} places experts on ranks: set expert_parallel: true, or leave it out"
                )
        return self

    @property
    def stage_ranks(self) -> int:
        """Number of ranks that have the same layers."""
        return self.tensor_parallel * self.data_parallel

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.stage_ranks * self.pipeline_parallel

    def for_device(self, device: Device) -> "ResolvedEngineConfig":
        """These settings with a value for each None that depends on the device."""
        on_cuda = device == "cuda"
        chosen = {
            "block_size": 64 if on_cuda else 16,
            "max_num_batched_tokens": 8192 if on_cuda else 2048,
            "max_num_seqs": 512 if on_cuda else 256,
            "async_scheduling": on_cuda,
            "step_deadline_s": 60.0 if on_cuda else 600.0,
        }
        given = self.model_dump(exclude_none=True)
        return ResolvedEngineConfig(**chosen | given | {"device": device})


class ResolvedEngineConfig(EngineConfig):
    """An EngineConfig for one device, made by `EngineConfig.for_device`."""

    block_size: Literal[16, 32, 64, 128]
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool
    step_deadline_s: float

    @property
    def max_steps_in_flight(self) -> int:
        """Number of steps that may be in flight. With stages it is one more than their number: each
        stage computes one, and one is on its way back. On CPU, rank 0 computes a step when it sends
        it."""
        if self.pipeline_parallel > 1:
            return self.pipeline_parallel + 1
        return 2 if self.async_scheduling else 1
