"""Gemma 3 checkpoints that see images: the text model is served as transformers computes it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.engine.llm import LLM, SamplingParams
from pdserve.models.config import read_spec

PROMPT = list(range(3, 40))
NEW = 24
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(5)
    config = Gemma3Config(
        text_config=TEXT,
        vision_config=VISION,
        mm_tokens_per_image=4,
        image_token_index=255,
        tie_word_embeddings=False,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.0, 0.5 if "norm" in name else 0.2)
    folder = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(folder)
    return folder, model


def test_texts_get_the_tokens_of_transformers(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    llm = LLM(str(folder), tokenizer=False, device="cpu", num_kv_blocks=32)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    made = output.outputs[0]
    ids = torch.tensor([PROMPT + made.token_ids])
    with torch.inference_mode():
        logits = model(ids, token_type_ids=torch.zeros_like(ids)).logits[0, len(PROMPT) - 1 : -1]
    assert made.token_ids == logits.argmax(-1).tolist()
    assert len(set(made.token_ids)) > 5, "a model that repeats itself proves little"
    want = logits.log_softmax(-1).amax(-1).tolist()
    assert [entry.logprob for entry in made.logprobs or []] == pytest.approx(want, abs=1e-4)


def test_the_two_ropes_and_windows_are_read(saved: tuple[Path, Any]) -> None:
    spec = read_spec(str(saved[0]))
    assert spec.windows == (16, None, 16) and spec.longest_window is None
    assert [spec.rope_of(layer).theta for layer in range(3)] == [1e3, 1e5, 1e3]
    assert spec.rope.factor == 8.0 and spec.rope_of(0).kind == "default"


def test_as_published(tmp_path: Path) -> None:
    """The config.json is from before transformers 5, and leaves most to defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(str(tmp_path), "dummy")
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert spec.windows[:6] == (1024,) * 5 + (None,) and len(spec.windows) == 34
    assert (spec.rope.theta, spec.rope.kind, spec.rope.factor) == (1e6, "linear", 8.0)
    assert spec.local_rope is not None and spec.local_rope.theta == 1e4
    assert (spec.dtype, spec.eos_token_ids, spec.vocab_size) == ("bfloat16", (1, 106), 262208)
    assert spec.tie_embeddings and spec.plus_one_norms and spec.attention_scale == 256**-0.5


def test_without_text_config_it_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="text_config is missing; restore the file"):
        read_spec(str(tmp_path), "dummy")
