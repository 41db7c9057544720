"""The Python client sends sampling given as an object, as keywords, or both. Nothing is started."""

from typing import Any

import pytest

from pdserve.cluster.client import _call, _chat_call, _embed_call
from pdserve.cluster.links.handle_api import EmbedFields, decode_call, encode
from pdserve.protocol.sampling_params import SamplingParams

DEFAULTS: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9}
SAID = [{"role": "user", "content": "x"}]


def test_keywords_stand_beside_the_models_defaults() -> None:
    options = {"max_tokens": 64, "temperature": 0.2, "stop": ["."], "priority": 3}
    call = decode_call(encode(_call("x", None, False, options)))
    expected = SamplingParams(temperature=0.2, top_p=0.9, max_tokens=64, stop=["."])
    assert call.resolved(DEFAULTS) == (expected, False)
    assert call.priority == 3 and call.sampling is None


def test_keywords_take_the_place_of_an_objects_fields() -> None:
    given = SamplingParams(temperature=0.7, n=2, max_tokens=9)
    call = decode_call(encode(_call([5], given, True, {"max_tokens": 64, "seed": 1})))
    expected = SamplingParams(temperature=0.7, n=2, max_tokens=64, seed=1)
    assert call.resolved(DEFAULTS) == (expected, False)
    assert given.max_tokens == 9


def test_without_either_the_model_decides() -> None:
    assert _call("x", None, False, {}).resolved(DEFAULTS) == (None, True)
    given = SamplingParams(max_tokens=9)
    assert _call("x", given, False, {}).resolved(DEFAULTS) == (given, False)


def test_without_max_tokens_an_answer_ends_where_there_is_no_room() -> None:
    sampling, open_ended = _call("x", None, False, {"temperature": 0.0}).resolved(DEFAULTS)
    assert sampling == SamplingParams(temperature=0.0, top_p=0.9) and open_ended
    call = _chat_call(SAID, None, False, {"temperature": 0.0, "reasoning_effort": "low"})
    sampling, open_ended = call.resolved(DEFAULTS)
    assert sampling == SamplingParams(temperature=0.0, top_p=0.9, max_tokens=None) and open_ended
    assert call.turn is not None and call.turn.reasoning_effort == "low"


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ValueError, match=r"unknown keyword 'max_token': known are .*max_tokens"):
        _call("x", None, False, {"max_token": 5})
    with pytest.raises(ValueError, match=r"^max_tokens must be"):
        _call("x", SamplingParams(), False, {"max_tokens": 0})
    with pytest.raises(ValueError, match=r"^temperature must be"):
        _call("x", None, False, {"temperature": "hot"}).resolved(DEFAULTS)


def test_keywords_of_a_prompt_to_embed() -> None:
    call = _embed_call("a", {"dimensions": 3, "normalize": None, "priority": 2})
    assert call.embed == EmbedFields(dimensions=3) and call.priority == 2
    with pytest.raises(ValueError, match="dimensions must be of type int, not '3'"):
        _embed_call("a", {"dimensions": "3"})
    for name in ("max_tokens", "structured_outputs", "timeline"):
        with pytest.raises(ValueError, match=f"unknown keyword '{name}': known are dimensions"):
            _embed_call("a", {name: 1})
