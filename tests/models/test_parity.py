"""Our models against transformers, float32: logits of every position, greedy tokens, and mutations
that must show."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dense_model import dense_attend, our_logits
from support.tiny_models import LONG_ROPE, YARN_ROPE, make_tiny

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.kernels.kv.reference import norm_heads
from pdserve.kernels.ops import ops_for
from pdserve.models.config import ModelSpec, read_spec
from pdserve.models.loader import load_model
from pdserve.models.registry import CausalLM
from pdserve.models.step_context import Attend, RopeTables
from pdserve.models.weights import StoredTensor, Weight

pytestmark = pytest.mark.lengthy

CPU = torch.device("cpu")
TOLERANCE = 1e-4
PROMPT_TOKENS = 200  # past original_max_position_embeddings of the scaled models
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

LATE_WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama2", {}),
    "llama2-tied": ("llama2", {"tie_word_embeddings": True}),
    "llama2-linear-rope": ("llama2", {"rope_parameters": LINEAR_ROPE}),
    "llama3": ("llama3", {}),
    "llama3-tied": ("llama3", {"tie_word_embeddings": True}),
    "llama3-biases": ("llama3", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("qwen2", LATE_WINDOWS),
    "qwen3": ("qwen3", {}),
    "qwen3-windows": ("qwen3", LATE_WINDOWS),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_attention_heads": 8}),
    "phi3": ("phi3", {}),
    "phi4-mini": ("phi4-mini", {"tie_word_embeddings": True}),
    "phi4-mini-short": (
        "phi4-mini",
        {
            "original_max_position_embeddings": 512,
            "rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 512},
        },
    ),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gemma3-tied": ("gemma3", {"tie_word_embeddings": True, "final_logit_softcapping": 20.0}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 16}),
    "gpt-oss": ("gpt-oss", {}),
    "qwen2-moe": ("qwen2-moe", {}),
    "qwen2-moe-normalized": ("qwen2-moe", {"norm_topk_prob": True, "mlp_only_layers": []}),
    "qwen2-moe-windows": ("qwen2-moe", LATE_WINDOWS),
    "qwen3-moe": ("qwen3-moe", {"tie_word_embeddings": True}),
    "qwen3-moe-window": ("qwen3-moe", LATE_WINDOWS),
    "qwen2-yarn": ("qwen2", {"rope_parameters": {**YARN_ROPE, "beta_fast": 4.0, "beta_slow": 1.5}}),
    "deepseek-v2": ("deepseek-v2", {}),
    "deepseek-v2-greedy": ("deepseek-v2", {"topk_method": "greedy", "q_lora_rank": 20}),
    "deepseek-v3": ("deepseek-v3", {}),
    "deepseek-v3-halves": (
        "deepseek-v3",
        {"rope_interleave": False, "attention_bias": True, "rope_parameters": YARN_ROPE},
    ),
}

REPEATING = {"gemma3-tied"}  # scaled embeddings as output matrix: the last token is most likely
SAMPLE = {
    "llama3-biases",
    "mistral",
    "qwen2-yarn",
    "qwen3-tied",
    "olmo2-biases",
    "phi3",
    "phi4-mini",
    "glm4",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "qwen2-moe",
    "deepseek-v2",
    "deepseek-v3-halves",
}
each_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in SAMPLE else pytest.mark.slow) for case in CASES],
)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in made:
            family, overrides = CASES[case]
            made[case] = make_tiny(family, tmp_path_factory.mktemp(case), seed=7, **overrides)
        return made[case]

    return get


def load(folder: Path, spec: ModelSpec | None = None) -> CausalLM:
    return load_model(str(folder), spec or read_spec(str(folder)), torch.float32, CPU, ops_for(CPU))


def prompt(num_tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    return torch.randint(256, (num_tokens,), generator=torch.Generator().manual_seed(1))


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def reference_logits(folder: Path) -> torch.Tensor:
    with torch.inference_mode():
        return reference(folder)(prompt()[None]).logits[0]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@each_case
def test_logits_of_every_position_equal_transformers(
    case: str, folder_of: Callable[[str], Path]
) -> None:
    logits = our_logits(load(folder_of(case)), prompt())
    assert logits.dtype == torch.float32 and logits.shape == (PROMPT_TOKENS, 256)
    assert gap(logits, reference_logits(folder_of(case))) < TOLERANCE


@pytest.mark.sampled(3)
@each_case
def test_greedy_tokens_equal_transformers(case: str, folder_of: Callable[[str], Path]) -> None:
    ids = start = prompt(64)
    model = load(folder_of(case))
    for _ in range(64):
        ids = torch.cat([ids, our_logits(model, ids)[-1].argmax().view(1)])
    with torch.inference_mode():
        expected = reference(folder_of(case)).generate(
            start[None],
            attention_mask=torch.ones(1, 64, dtype=torch.long),
            max_new_tokens=64,
            do_sample=False,
        )
    assert ids.tolist() == expected[0].tolist()
    assert case in REPEATING or len(set(ids[64:].tolist())) > 8, (
        "a model that repeats itself proves little"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_logits_on_gpu_equal_those_on_cpu(case: str, folder_of: Callable[[str], Path]) -> None:
    spec = read_spec(str(folder_of(case)))
    cuda = torch.device("cuda")
    model = load_model(str(folder_of(case)), spec, torch.float32, cuda, ops_for(cuda))
    ids = prompt().to(cuda)
    logits = our_logits(model, ids)
    assert gap(logits.cpu(), our_logits(load(folder_of(case)), prompt())) < 10 * TOLERANCE


def test_position_and_batch_are_free(folder_of: Callable[[str], Path]) -> None:
    """Tokens of a sequence in any order on the flat axis give the same rows."""
    model = load(folder_of("llama3"))
    ids = prompt(24)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))

    def attend(
        layer: int,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: RopeTables,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        back = order.argsort()
        return dense_attend()(layer, spec, q[back], k[back], v[back], rope, norms, sinks)[order]

    shuffled = our_logits(model, ids[order], attend)
    assert gap(shuffled, our_logits(model, ids)[order]) < TOLERANCE


def rope_changed(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: spec.model_copy(update={"rope": spec.rope.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("case", "mutate"),
    [
        ("llama2", rope_changed(theta=10500.0)),
        ("llama2-linear-rope", rope_changed(factor=4.2)),
        ("llama3", rope_changed(kind="default")),
        ("llama3", rope_changed(original_max_position=72)),
        ("llama3", rope_changed(low_freq_factor=1.2)),
        ("llama3", rope_changed(high_freq_factor=3.5)),
        ("qwen2", lambda spec: spec.model_copy(update={"rms_eps": 1e-3})),
    ],
)
def test_a_wrong_fact_shows(
    case: str, mutate: Callable[[ModelSpec], ModelSpec], folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(case)
    mutant = load(folder, mutate(read_spec(str(folder))))
    assert gap(our_logits(mutant, prompt()), reference_logits(folder)) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "attend", [dense_attend(window=64), dense_attend(scale=1.02)], ids=["mask", "scale"]
)
def test_a_wrong_attention_shows(attend: Attend, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("mistral-no-window")
    assert (
        gap(our_logits(load(folder), prompt(), attend), reference_logits(folder)) > 10 * TOLERANCE
    )


@pytest.mark.parametrize("dropped", ["q", "k"])
def test_a_dropped_head_norm_shows(dropped: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")

    def attend(
        layer: int,
        spec: AttentionSpec,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rope: RopeTables,
        norms: HeadNorms | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert norms is not None
        normed_q, normed_k = norm_heads(q, k, norms)
        q, k = (q, normed_k) if dropped == "q" else (normed_q, k)
        return dense_attend()(layer, spec, q, k, v, rope, None, sinks)

    assert gap(our_logits(load(folder), prompt(), attend), reference_logits(folder)) > (
        10 * TOLERANCE
    )


@pytest.mark.parametrize(
    "case",
    [
        "llama3-biases",
        "qwen2",
        "qwen3",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("olmo2-biases", "phi4-mini", "glm4", "gemma2", "gemma3", "gpt-oss")
        ),
    ],
)
def test_every_weight_matters(
    case: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeroing any checkpoint tensor, a bias or a head norm too, leaves parity."""
    folder = folder_of(case)
    expected = reference_logits(folder)
    taken = Weight.load
    zeroed = ""

    class Zeros:
        def __init__(self, stored: StoredTensor) -> None:
            self.shape = stored.shape
            self.dtype = stored.dtype
            self._stored = stored

        def read(self, window: tuple[slice, ...]) -> torch.Tensor:
            return torch.zeros_like(self._stored.read(window))

    def load_all_but_one(weight: Weight, name: str, stored: StoredTensor) -> None:
        taken(weight, name, Zeros(stored) if name == zeroed else stored)

    monkeypatch.setattr(Weight, "load", load_all_but_one)
    for zeroed in load(folder).weights.by_name:
        # k_proj.bias turns every key of a head alike, yet the rotation makes it count by distance
        assert gap(our_logits(load(folder), prompt()), expected) > 10 * TOLERANCE, zeroed
    zeroed = ""
    assert gap(our_logits(load(folder), prompt()), expected) < TOLERANCE
