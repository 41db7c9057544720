"""Tests what is read from generation_config.json, and the error for a file that is not valid."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.models.generation_defaults import described, read_generation_defaults
from pdserve.protocol.sampling_params import SamplingParams

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "transformers_version": "4.51.0",
}


def written(folder: Path, text: str) -> Path:
    (folder / "generation_config.json").write_text(text)
    return folder


def test_sampling_parameters_are_taken_and_nothing_else(tmp_path: Path) -> None:
    folder = written(tmp_path, json.dumps(QWEN | {"max_new_tokens": 512, "num_beams": 1}))
    defaults = read_generation_defaults(folder, "auto")
    expected: dict[str, Any] = {
        "repetition_penalty": 1.05,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    expected["max_tokens"] = 512
    assert defaults == expected
    assert SamplingParams.from_defaults(defaults) == SamplingParams(**expected)
    assert set(described(defaults).split(", ")) == {
        f"{name}={value}" for name, value in expected.items()
    }


def test_none_takes_nothing(tmp_path: Path) -> None:
    assert read_generation_defaults(written(tmp_path, json.dumps(QWEN)), "none") == {}


@pytest.mark.parametrize("text", [None, "{}", '{"eos_token_id": 2}'])
def test_without_recommendations_there_are_none(tmp_path: Path, text: str | None) -> None:
    folder = tmp_path if text is None else written(tmp_path, text)
    assert read_generation_defaults(folder, "auto") == {}
    assert SamplingParams.from_defaults({}) == SamplingParams()


@pytest.mark.parametrize(
    ("text", "named"), [("{", "not valid JSON"), ("[1]", "must hold a JSON object, not list")]
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=f"generation_config.json .*{named}"):
        read_generation_defaults(written(tmp_path, text), "auto")


@pytest.mark.parametrize(
    "change", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": 2.5}, {"max_new_tokens": -1}]
)
def test_a_value_that_cannot_be_is_named_with_the_cure(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    defaults = read_generation_defaults(written(tmp_path, json.dumps(QWEN | change)), "auto")
    [name] = change
    named = name.replace("max_new_tokens", "max_tokens")
    with pytest.raises(
        ValueError,
        match=f"generation_config.json: {named} must .*model.generation_config to 'none'",
    ):
        SamplingParams.from_defaults(defaults)
