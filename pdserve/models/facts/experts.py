"""ExpertSpec: the facts of a model's mixtures of experts, as each family's config.json says them.

The rows of models/families.py make it.
"""

from pydantic import BaseModel, ConfigDict

from pdserve.kernels.experts.routing import Routing
from pdserve.models.hf_config import HfConfig


class ExpertSpec(BaseModel):
    """The mixtures of experts of a model.

    size: width (intermediate size) of an expert.
    gated_size: width of one more expert that all rows go to, scaled by a sigmoid of each row; 0:
        there is none.
    has_bias: a bias corrects the router's choice.
    dense_layers: layers that have a plain MLP.
    has_biases: router and experts have biases, as other products do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    routing: Routing
    size: int
    gated_size: int = 0
    has_bias: bool = False
    dense_layers: tuple[int, ...] = ()
    has_biases: bool = False


def gpt_oss_experts(config: HfConfig) -> ExpertSpec:
    routing = Routing(_num_experts(config), _top_k(config), normalize=True)
    return ExpertSpec(routing=routing, size=config.intermediate_size, has_biases=True)


def mixtral_experts(config: HfConfig) -> ExpertSpec:
    routing = Routing(_num_experts(config), _top_k(config), normalize=True)
    return ExpertSpec(routing=routing, size=config.intermediate_size)


def qwen_experts(config: HfConfig) -> ExpertSpec:
    """Returns the facts of Qwen2-MoE, which has a shared expert, and of Qwen3-MoE."""
    num_layers = config.num_hidden_layers
    step = config.decoder_sparse_step
    if step < 1:
        raise ValueError(f"decoder_sparse_step={step} must be at least 1")
    only = config.mlp_only_layers or ()
    return ExpertSpec(
        routing=Routing(_num_experts(config), _top_k(config), normalize=config.norm_topk_prob),
        size=_size(config),
        gated_size=config.shared_expert_intermediate_size or 0,
        dense_layers=tuple(i for i in range(num_layers) if i in only or (i + 1) % step),
    )


def deepseek_v2_experts(config: HfConfig) -> ExpertSpec:
    """Returns the facts of DeepSeek V2. norm_topk_prob is refused: with it the authors' code leaves
    out the scaling, while transformers ignores it."""
    if config.norm_topk_prob:
        raise ValueError(
            "norm_topk_prob=true is not supported in DeepSeek V2: its implementations differ in it"
        )
    _check("scoring_func", config.scoring_func, "softmax")
    _check("topk_method", config.topk_method, "greedy", "group_limited_greedy")
    groups = (1, 1) if config.topk_method != "group_limited_greedy" else _groups(config)
    routing = Routing(
        _num_experts(config),
        _top_k(config),
        scaling=config.routed_scaling_factor,
        num_groups=groups[0],
        top_groups=groups[1],
        num_shared=config.n_shared_experts or 0,
    )
    return _deepseek(config, routing, has_bias=False)


def deepseek_v3_experts(config: HfConfig) -> ExpertSpec:
    _check("scoring_func", config.scoring_func, "sigmoid")
    _check("topk_method", config.topk_method, "noaux_tc")
    num_groups, top_groups = _groups(config)
    routing = Routing(
        _num_experts(config),
        _top_k(config),
        scoring="sigmoid",
        normalize=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score="top2",
        num_shared=config.n_shared_experts or 0,
    )
    return _deepseek(config, routing, has_bias=True)


def _deepseek(config: HfConfig, routing: Routing, has_bias: bool) -> ExpertSpec:
    if config.moe_layer_freq not in (None, 1):
        raise ValueError(f"moe_layer_freq={config.moe_layer_freq} is not supported: only 1 is")
    return ExpertSpec(
        routing=routing,
        size=_size(config),
        has_bias=has_bias,
        dense_layers=tuple(range(config.first_k_dense_replace)),
    )


def _check(name: str, said: str | None, *known: str) -> None:
    if said is not None and said not in known:
        raise ValueError(f"{name}={said!r} is not supported: only {' and '.join(known)}")


def _groups(config: HfConfig) -> tuple[int, int]:
    if config.n_group is None or config.topk_group is None:
        raise ValueError(
            f"n_group={config.n_group} and topk_group={config.topk_group} must be numbers: the "
            "router chooses among groups"
        )
    return config.n_group, config.topk_group


def _num_experts(config: HfConfig) -> int:
    if config.num_experts is None or config.num_experts < 1:
        raise ValueError(f"num_experts={config.num_experts}: a mixture has at least one expert")
    return config.num_experts


def _top_k(config: HfConfig) -> int:
    if config.num_experts_per_tok is None:
        raise ValueError("num_experts_per_tok is missing: a mixture must say how many are chosen")
    return config.num_experts_per_tok


def _size(config: HfConfig) -> int:
    if config.moe_intermediate_size is None or config.moe_intermediate_size < 1:
        raise ValueError(
            f"moe_intermediate_size={config.moe_intermediate_size}: a mixture must say how wide "
            "its experts are"
        )
    return config.moe_intermediate_size
