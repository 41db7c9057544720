"""ModelSpec: the facts of one model that the rest of pdserve needs, read from a Hugging Face folder
or Hub id.

It refuses by name, with ValueError, every configuration that would be computed wrongly: a model
that loads is served exactly. This file knows no tensors and no devices. The engine reads the spec
once and passes it to models/loader.py.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from pdserve.configs.engine import ActivationDtype, OnlineScheme
from pdserve.kernels.experts.placement import place_experts
from pdserve.models.checkpoint import (
    LoadFormat,
    TensorEntry,
    read_entries,
    resolve_folder,
    weights_digest,
)
from pdserve.models.facts.experts import ExpertSpec
from pdserve.models.facts.latent import LatentSpec
from pdserve.models.facts.rope import RopeSpec, rope_of
from pdserve.models.families import FAMILIES, Family
from pdserve.models.formats.activations import check_experts, with_activations
from pdserve.models.formats.formats import Formats
from pdserve.models.formats.online import check_not_quantised, check_online
from pdserve.models.formats.read import read_formats
from pdserve.models.hf_config import HfConfig, read_hf_config, text_config_of
from pdserve.models.kv_scales import KvScales, scales_of_checkpoint, scales_of_file
from pdserve.parallel.dims import ParallelDims

SpecDtype = Literal["float32", "float16", "bfloat16"]
Activation = Literal[
    "silu", "gelu_tanh", "clamped_swiglu"
]  # kernels.norm.ops.Activation, without torch

# hidden_act, as transformers names it -> the name in pdserve
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class ModelSpec(BaseModel):
    """Architecture facts of a decoder-only model; make it with `read_spec`. Windows, soft caps and
    sinks are explained in AttentionSpec."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    family: str  # transformers' model_type
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int  # 1 with latent
    head_dim: int  # with latent, the columns that are rotated
    intermediate_size: int
    vocab_size: int
    max_position: int  # number of positions that the rope tables cover
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    qkv_bias: bool  # the attention projections to q, k and v have biases
    o_bias: bool  # the attention projection of the output has a bias
    mlp_bias: bool
    qk_norm: bool  # an RMSNorm over each head of q and k comes before the rotation
    dtype: SpecDtype  # the checkpoint's
    eos_token_ids: tuple[int, ...]  # of config.json and generation_config.json together
    weights: str  # their identity on any host: a digest of them, or the seed of dummy weights
    activation: Activation = "silu"
    attention_scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    windows: tuple[int | None, ...] = ()  # of each layer; () if no layer has one
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0  # factor of the embeddings
    plus_one_norms: bool = False  # norms scale by 1 + weight
    formats: Formats | None = None  # how each module is stored; None if all are in 16 bits
    online_quantization: OnlineScheme | None = None  # 16-bit weights become this while they load
    experts: ExpertSpec | None = None  # None if every layer has a plain MLP
    latent: LatentSpec | None = None  # None if heads have stored keys and values of their own
    kv_scales: KvScales | None = None  # of a KV cache in e4m3; None: all are 1
    extra_layers: int = 0  # layers after the last that the checkpoint has and nobody loads
    local_rope: RopeSpec | None = None  # of layers with a window; None: the same as the others
    qk_norm_of_all: bool = False  # one RMSNorm covers all heads of q, another all heads of k
    has_sinks: bool = False

    @property
    def longest_window(self) -> int | None:
        """Number of the last rows that later rows read; None if some layer reads all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if self.windows and len(windows) == len(self.windows) else None

    def fingerprint(self) -> str:
        """128-bit hex digest. It is equal only on workers that compute the same KV rows from the
        same tokens (in the same dtype). A fact that only some families have counts only if it is
        not the default."""
        plain = {
            name
            for name, field in type(self).model_fields.items()
            if not field.is_required() and getattr(self, name) == field.default
        }
        exclude: dict[str, Any] = dict.fromkeys(plain, True)
        for name in ("rope", "local_rope"):
            rope = getattr(self, name)
            if rope is not None:
                exclude[name] = rope.unused
        said = self.model_dump_json(exclude=exclude)
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def without_head(self) -> "ModelSpec":
        """Returns the spec of a model that embeds. Nobody asks for its logits, so the embeddings
        stand in for an output matrix that its checkpoint may lack."""
        return self.model_copy(update={"tie_embeddings": True})

    def rope_of(self, layer: int) -> RopeSpec:
        """Returns how a layer rotates; layers with a window may do so in their own way."""
        is_local = self.local_rope is not None and self.windows[layer] is not None
        return self.local_rope if is_local and self.local_rope else self.rope

    def for_length(self, length: int) -> "ModelSpec":
        """Returns the spec for an engine whose longest request has this many tokens. LongRoPE
        rotates by it, so only engines of one kind compute the same rows."""
        return self.model_copy(update={"rope": self.rope.for_length(length)})

    @property
    def mixture_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose MLP is a mixture of experts."""
        if self.experts is None:
            return ()
        dense = self.experts.dense_layers
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)

    def check_parallel(self, dims: ParallelDims, redundant_experts: int = 0) -> None:
        """Raises ValueError unless the ranks can share every layer, and the stages can share the
        layers. With expert parallelism, the ranks of a stage must be able to share the experts and
        the redundant copies."""
        degree = dims.tp
        if dims.ep > 1 and self.experts is None:
            raise ValueError(
                "engine.expert_parallel is true, but the model has no experts (config.json): set "
                "it to false"
            )
        is_whole = dims.ep > 1
        if uneven := self._uneven(degree, is_whole):
            fitting = [str(d) for d in range(1, degree) if not self._uneven(d, is_whole)]
            raise ValueError(
                f"engine.tensor_parallel ({degree}) does not fit the model: that many ranks cannot "
                f"share its {' and '.join(uneven)} (config.json) evenly. Set it to "
                f"{' or '.join(fitting)}"
            )
        dims.layers_of(self.num_layers)
        if dims.ep > 1 and self.experts is not None:
            place_experts(self.experts.routing.num_experts, dims.ep, redundant_experts)

    def _uneven(self, degree: int, has_whole_experts: bool) -> list[str]:
        """Sizes that this degree of tensor parallelism does not divide. Ranks may share one KV
        head. has_whole_experts: each expert is on one rank."""
        shared = {"num_attention_heads": self.num_heads}
        if self.experts is None or self.experts.dense_layers:
            shared["intermediate_size"] = self.intermediate_size
        if self.experts is not None:
            if not has_whole_experts:
                shared["moe_intermediate_size"] = self.experts.size
            shared["shared_expert_intermediate_size"] = self.experts.gated_size
        uneven = [f"{name} {size}" for name, size in shared.items() if size % degree]
        if self.num_kv_heads % degree and degree % self.num_kv_heads:
            uneven.append(f"num_key_value_heads {self.num_kv_heads}")
        return uneven

    def max_len(self, max_model_len: int | None) -> int:
        """Number of tokens that a request may have: as many as the model takes, or max_model_len.
        Raises ValueError if that is more than the model takes, as vLLM does.

        The number in config.json also holds for scaled ropes. Some models write the stretched
        length there and some the original one. (vLLM multiplies by the factor, which is too much
        for the former.)
        """
        if max_model_len is not None and max_model_len > self.max_position:
            stretch = ""
            if self.rope.kind in ("linear", "yarn"):
                by = f"{self.rope.kind} rope scaling by {self.rope.factor:g}"
                stretch = f"; if {by} is not in it yet, write the stretched length"
            raise ValueError(
                f"engine.max_model_len ({max_model_len}) must not be above what the model takes, "
                f"{self.max_position} "
                f"(max_position_embeddings in its config.json): lower it or leave it out{stretch}"
            )
        return max_model_len or self.max_position


def read_spec(
    path: str,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    quantization: OnlineScheme | None = None,
    kv_scales: str | None = None,
    activation_dtype: ActivationDtype = "auto",
) -> ModelSpec:
    """Returns the spec of the model in folder (or of Hub id) `path`.

    "auto" also reads samples of the weights for the fingerprint. "dummy" needs config.json alone,
    and `seed` stands in for the weights. quantization, kv_scales, activation_dtype: ModelConfig's.
    ValueError names what cannot be served: architecture, sliding_window, rope type, activation,
    quantisation.
    """
    folder = resolve_folder(path, load_format)
    raw, architecture, hf = _read_config_file(folder)
    family = FAMILIES[architecture]
    _refuse_unservable(raw, hf, family)
    generation = _read_json(folder / "generation_config.json") or {}
    entries = None if load_format == "dummy" else read_entries(folder)
    formats = _formats(folder, raw, hf, family, entries)
    check_online(formats, quantization)
    formats = with_activations(formats, activation_dtype, quantization)
    weights = f"dummy:{seed}" if entries is None else weights_digest(entries)
    try:
        values = _values(hf) | family.facts(hf)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error
    if (experts := values.get("experts")) is not None:
        if experts.has_biases:
            check_not_quantised(formats, quantization)
        check_experts(formats, activation_dtype)
    return ModelSpec(
        architecture=architecture,
        family=family.model_type,
        eos_token_ids=_eos_ids(hf.eos_token_id, generation.get("eos_token_id")),
        weights=weights,
        formats=formats,
        online_quantization=quantization,
        kv_scales=_kv_scales(kv_scales, weights, entries or (), values),
        **values,
    )


def read_hidden_size(folder: Path) -> int:
    """Size of a hidden row of the model in `folder`. Raises ValueError like `read_spec`."""
    return _read_config_file(folder)[2].hidden_size


def _read_config_file(folder: Path) -> tuple[dict[str, Any], str, HfConfig]:
    """Returns config.json as it is, the architecture, and the fields."""
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ValueError(
            f"{folder} holds no config.json: it is not a model folder in Hugging Face format"
        )
    architecture = _architecture(raw)
    family = FAMILIES[architecture]
    try:
        text = text_config_of(raw) if family.is_nested else raw
        return raw, architecture, read_hf_config(text, family.model_type, family.defaults)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is {error}") from error


def _read_json(file: Path) -> dict[str, Any] | None:
    return json.loads(file.read_text()) if file.is_file() else None


def _architecture(raw: dict[str, Any]) -> str:
    """Returns the architecture that config.json names. If it names none (a config saved alone), its
    model_type decides. A bare decoder ("Qwen3Model") counts as the one with a head."""
    named = raw.get("architectures") or [
        a for a, family in FAMILIES.items() if family.model_type == raw.get("model_type")
    ]
    architecture = named[0] if named else raw.get("model_type")
    if isinstance(architecture, str) and architecture.endswith("Model"):
        with_head = f"{architecture.removesuffix('Model')}ForCausalLM"
        architecture = with_head if with_head in FAMILIES else architecture
    if architecture not in FAMILIES:
        code = (
            ", and the code that its repository brings (auto_map) is not run"
            if raw.get("auto_map")
            else ""
        )
        raise ValueError(
            f"architecture {architecture!r} is not known{code}; known: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    return architecture


def _refuse_unservable(raw: dict[str, Any], hf: HfConfig, family: Family) -> None:
    # It is also None if Qwen's use_sliding_window is false.
    if hf.sliding_window is not None and not family.has_windows:
        raise ValueError(
            f"sliding_window={hf.sliding_window} is not supported yet: attention would see tokens "
            "that the model must not; where the model was trained without a window, set it to "
            "null in config.json"
        )
    known = {"full_attention", *(["sliding_attention"] if family.has_windows else [])}
    if set(hf.layer_types or ()) - known:
        raise ValueError(
            f"layer_types {sorted(set(hf.layer_types or ()))}: only {', '.join(sorted(known))} is "
            "supported"
        )
    factor = hf.rope_parameters.partial_rotary_factor
    if factor != 1.0 and not family.rotates_parts:
        raise ValueError(
            f"partial_rotary_factor={factor} is not supported: {family.model_type} rotates whole "
            "heads; remove it from config.json"
        )
    if hf.hidden_act not in family.activations:
        raise ValueError(
            f"hidden_act={hf.hidden_act!r} is not supported: only "
            f"{' and '.join(map(repr, family.activations))} is"
        )
    if hf.num_attention_heads % hf.num_kv_heads:
        raise ValueError(
            f"num_attention_heads={hf.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={hf.num_kv_heads}"
        )


def _formats(
    folder: Path,
    raw: dict[str, Any],
    hf: HfConfig,
    family: Family,
    entries: Sequence[TensorEntry] | None,
) -> Formats | None:
    """Reads the formats of all modules, except for those that nobody loads."""
    extra = range(hf.num_hidden_layers, hf.num_hidden_layers + hf.num_nextn_predict_layers)
    layers = tuple(f"{family.prefix}model.layers.{n}." for n in extra)
    return read_formats(folder, raw, entries, layers + family.unused)


def _kv_scales(
    file: str | None, weights: str, entries: Iterable[TensorEntry], values: Mapping[str, Any]
) -> KvScales | None:
    """Returns the KV scales. Those of a file take precedence over those of the checkpoint."""
    sizes = values["num_layers"], values["num_kv_heads"]
    if file is not None:
        return scales_of_file(file, weights, *sizes)
    return None if values.get("latent") else scales_of_checkpoint(entries, *sizes)


def _values(hf: HfConfig) -> dict[str, Any]:
    """Returns the fields of ModelSpec that config.json has as fields of its own."""
    return dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_kv_heads,
        head_dim=hf.even_head_dim,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        max_position=hf.max_position_embeddings,
        rms_eps=hf.rms_norm_eps,
        rope=rope_of(hf),
        tie_embeddings=hf.tie_word_embeddings,
        qkv_bias=hf.attention_bias,
        o_bias=hf.attention_bias,
        mlp_bias=hf.mlp_bias,
        qk_norm=False,
        dtype=_dtype(hf.dtype),
        activation=ACTIVATIONS[hf.hidden_act],
        attention_scale=None
        if hf.query_pre_attn_scalar is None
        else hf.query_pre_attn_scalar**-0.5,
        windows=hf.windows,
        extra_layers=hf.num_nextn_predict_layers,
        attention_soft_cap=hf.attn_logit_softcapping,
        logit_soft_cap=hf.final_logit_softcapping,
    )


def _dtype(dtype: str | None) -> SpecDtype:
    """Returns config.json's dtype, or float32 if it has none, as in transformers."""
    name = "float32" if dtype is None else dtype.removeprefix("torch.")
    for known in get_args(SpecDtype):
        if name == known:
            return known
    raise ValueError(
        f"dtype={name!r} is not supported; supported: {', '.join(get_args(SpecDtype))}"
    )


def _eos_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """Returns all ids of the sources, in order and each once."""
    ids: dict[int, None] = {}
    for source in sources:
        ids.update(dict.fromkeys([source] if isinstance(source, int) else source or []))
    return tuple(ids)
