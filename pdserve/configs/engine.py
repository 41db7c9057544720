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
"""Into what 16-bit weights may be quantised while they are loaded."""


class ModelConfig(Config):
    """Which model is served and under which name.

    path: a local folder in Hugging Face format or a Hub id. A relative folder is looked for in the
    working directory, then in the `pdserve` package (so the shipped demo is found wherever Ray
    starts its processes). name: the `model` clients send; defaults to the folder's last part.
    served_names: several of them, instead of `name`; answers carry the one that was asked for,
    metrics and logs the first.
    revision: of a model of the Hub: a branch, a tag or a commit; None: main. tokenizer: another
    folder or Hub id to take the tokenizer from. chat_template: a file that stands for the model's
    own, on every node of a router, or the template itself.
    load_format: "auto" reads safetensors; "dummy" draws random weights from config.json alone.
    seed: of the dummy weights. quantization: "fp8" quantises 16-bit weights while they are loaded
    (docs/use/models.md); None leaves them as they are. kv_scales: a file of
    `pdserve calibrate-kv` with scales for a KV cache in fp8; None takes the checkpoint's, or 1.
    generation_config: "auto" takes temperature, top_p, top_k, min_p, repetition_penalty and
    max_new_tokens of the folder's generation_config.json for requests that do not say them, as vLLM
    does; "none" takes none of them. tool_format, reasoning_format: how the model writes calls of
    tools and its reasoning (docs/use/tools.md); "auto" finds them in the chat template and the
    vocabulary, "none" reads all text as content. tool_enforcement: what of a call is enforced while
    tokens are drawn, where workers have a grammar engine: "schema" its form and its arguments,
    "syntax" its form alone, "off" neither, unless a request demands a call. task: what the model is
    for (docs/use/embeddings.md): "generate" or "embed"; "auto" finds it in the checkpoint.
    """

    path: str = "demo/pdserve-demo"
    name: str | None = Field(None, min_length=1)
    served_names: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    dtype: Dtype = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    quantization: OnlineScheme | None = None
    kv_scales: str | None = None
    generation_config: Literal["auto", "none"] = "auto"
    tool_format: ToolFormat = "auto"
    reasoning_format: ReasoningFormatName = "auto"
    tool_enforcement: Literal["schema", "syntax", "off"] = "schema"
    task: Literal["auto", "generate", "embed"] = "auto"

    @field_validator("served_names", mode="before")
    @classmethod
    def _one_is_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_names(self) -> "ModelConfig":
        if self.name is not None and self.served_names:
            raise ValueError(
                f"model.name ({self.name!r}) and model.served_names say the same: write all names "
                "into model.served_names, the one for metrics first"
            )
        twice = [name for name, count in Counter(self.served_names).items() if count > 1]
        if twice:
            raise ValueError(f"model.served_names has {twice[0]!r} twice: write it once")
        return self

    @property
    def served_name(self) -> str:
        """The first of `all_names`."""
        return self.all_names[0]

    @property
    def all_names(self) -> tuple[str, ...]:
        """The names that clients may send as `model`."""
        return self.served_names or (self.name or Path(self.path).name,)

    @property
    def resolved_path(self) -> str:
        """An existing folder, or `path` as it is (then taken for a Hub id)."""
        return _found(self.path)

    @property
    def resolved_tokenizer(self) -> str | None:
        """As `resolved_path`; None: the model's own."""
        return None if self.tokenizer is None else _found(self.tokenizer)

    def template(self) -> str | None:
        """The chat template that stands for the model's own. ValueError when there is no such
        file."""
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
    """Where a path is that may be relative: to the working directory, or to the package, which has
    the demo model. What is nowhere stays as it is."""
    for base in (Path(), Path(pdserve.__file__).parent):
        if (base / path).exists():
            return str((base / path).resolve())
    return path


class EngineConfig(Config):
    """One engine: batch limits, KV cache, device. What is None is chosen by device: `for_device`.

    block_size: tokens in a KV block (16 on CPU, 64 on CUDA, where larger blocks are read faster;
    prefixes are shared by whole blocks). max_num_batched_tokens: token budget of one step (2,048;
    CUDA 8,192); prompts of 2,048 tokens or more do not share a step. max_num_seqs: sequences in one
    step (256; CUDA 512). num_kv_blocks: size of the KV cache in blocks; None sizes it from
    kv_memory_bytes (CPU) or from a profiling step and kv_memory_fraction (CUDA). kv_cache_dtype: of
    keys and values in it; "fp8" (e4m3) holds twice as many; "auto" is the
    model's. deterministic: batch-invariant arithmetic (always so on CPU; refused on CUDA for now).
    async_scheduling: plan and queue a step while the device computes the one before (on CUDA).
    cuda_graphs: replay captured decode steps (CUDA only). tensor_parallel: so many ranks, each with
    a GPU of its own, share every layer (docs/design/parallel.md). data_parallel: so many homes,
    each a KV cache with its own sequences and as many ranks, attend side by side and share the
    experts; max_num_seqs, max_num_batched_tokens and num_kv_blocks are of each. expert_parallel:
    each rank of a stage has some of a mixture's experts whole, instead of a part of each.
    redundant_experts: number of further copies of experts, of those that expert_load_file says are
    busiest. expert_load_file: rows that went to each expert, by layer, as `LLM.save_expert_load`
    writes them. pipeline_parallel: so many stages, each of as many ranks as tensor_parallel times
    data_parallel, have some of the layers each. step_deadline_s: a step that takes longer hangs,
    and the engine ends (600; CUDA 60). grammar_build_s: seconds that building a request's grammar
    may take, before the request fails. grammar_mask_s: seconds that a grammar may take for one mask
    of tokens; the third one over them fails its request.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: Literal[16, 32, 64, 128] | None = None
    max_model_len: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=16)
    max_num_seqs: int | None = Field(None, ge=1)
    num_kv_blocks: int | None = Field(None, ge=2)
    kv_memory_bytes: int = Field(256 << 20, ge=1)
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_memory_fraction: float = Field(0.9, gt=0, le=1)
    enable_prefix_caching: bool = True
    deterministic: bool = False
    async_scheduling: bool | None = None
    cuda_graphs: bool = True
    tensor_parallel: int = Field(1, ge=1, le=MAX_RANKS)
    data_parallel: int = Field(1, ge=1, le=MAX_RANKS)
    expert_parallel: bool = False
    redundant_experts: int = Field(0, ge=0)
    expert_load_file: str | None = None
    pipeline_parallel: int = Field(1, ge=1, le=MAX_STAGES)
    step_deadline_s: float | None = Field(None, gt=0)
    grammar_build_s: float = Field(5.0, gt=0, le=600)
    grammar_mask_s: float = Field(0.1, gt=0, le=600)

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
        return self.stage_ranks * self.pipeline_parallel

    def for_device(self, device: Device) -> "ResolvedEngineConfig":
        """The same with nothing left to choose."""
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
    """An EngineConfig for one device: made by `EngineConfig.for_device`."""

    block_size: Literal[16, 32, 64, 128]
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool
    step_deadline_s: float

    @property
    def max_steps_in_flight(self) -> int:
        """With stages one more than they are: each has one, and one is on its way back. On CPU
        rank 0 computes a step when it sends it."""
        if self.pipeline_parallel > 1:
            return self.pipeline_parallel + 1
        return 2 if self.async_scheduling else 1
