"""Every wrong setting of a logit rule is refused by the rule's name, with the cure."""

import json
from typing import Any

import pytest

from pdserve.protocol.logit_rules import asks_mask, check_served
from pdserve.protocol.sampling_params import SamplingParams

BUDGET = {"tokens": 3, "end": [7, 8], "start": None}
GOOD: list[dict[str, Any]] = [
    {"allowed_token_ids": [3]},
    {"allowed_token_ids": (0, 255)},
    {"bad_words": [[1], [2, 3]]},
    {"thinking_budget": BUDGET},
    {"thinking_budget": BUDGET | {"tokens": 0, "start": [9]}},
    {"thinking_budget": {"tokens": 3, "end": [7]}},
    {"grammar": "start: /a/"},
]
WRONG: list[tuple[str, Any, str]] = [
    ("allowed_token_ids", [], "must be a list of token ids >= 0 and not empty"),
    ("allowed_token_ids", [-1], "must be a list of token ids >= 0"),
    ("allowed_token_ids", [True], "must be a list of token ids >= 0"),
    ("allowed_token_ids", "12", "must be a list of token ids >= 0"),
    ("allowed_token_ids", [1] * (1 + (1 << 18)), "at most 262144 token ids"),
    ("bad_words", [], "must be a list of lists of token ids"),
    ("bad_words", "x", "must be a list of lists of token ids"),
    ("bad_words", [[1], []], "has a sequence 1 that must be a list of token ids"),
    ("bad_words", ["x"], "has a sequence 0 that must be a list of token ids"),
    ("bad_words", [[1]] * 1025, "at most 1024 sequences"),
    ("bad_words", [[1] * 100] * 100, "at most 8192 token ids in all, not 10000"),
    ("thinking_budget", 3, "must be an object with tokens, end and start"),
    ("thinking_budget", BUDGET | {"more": 1}, "must be an object with tokens, end and start"),
    ("thinking_budget", {"end": [1]}, "has tokens None: give an integer"),
    ("thinking_budget", BUDGET | {"tokens": -1}, "has tokens -1"),
    ("thinking_budget", BUDGET | {"tokens": True}, "has tokens True"),
    ("thinking_budget", BUDGET | {"end": []}, "has 'end' that must be a list of token ids"),
    ("thinking_budget", BUDGET | {"end": None}, "has 'end' that must be a list of token ids"),
    ("thinking_budget", BUDGET | {"start": [0.5]}, "has 'start' that must be a list of token"),
    ("thinking_budget", BUDGET | {"end": [1] * 65}, "has 'end' that must hold at most 64"),
    ("grammar", "", "must be the text of a grammar and not empty"),
    ("grammar", " \n", "must be the text of a grammar and not empty"),
    ("grammar", {"type": "object"}, "must be the text of a grammar"),
    ("grammar", "x" * ((1 << 18) + 1), "has 262145 bytes, but may have 262144: shorten it"),
    ("grammar", "\ud800", "half a surrogate pair"),
    ("logits_processors", [3], "must be a list of callables, and only in LLM.generate"),
    ("logits_processors", [], "must be a list of callables"),
]


@pytest.mark.parametrize("asked", GOOD, ids=repr)
def test_good_settings_are_taken_as_they_come_over_the_wire(asked: dict[str, Any]) -> None:
    SamplingParams(logit_rules=asked).check_vocab(256)
    SamplingParams(logit_rules=json.loads(json.dumps(asked))).check_vocab(256)
    assert asks_mask(asked)
    check_served(asked)


@pytest.mark.parametrize(("name", "settings", "message"), WRONG, ids=lambda value: repr(value)[:40])
def test_wrong_settings_are_refused(name: str, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^logit_rules: {name} ") as raised:
        SamplingParams(logit_rules={name: settings})
    assert message in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "asked",
    [
        {"allowed_token_ids": [1, 256]},
        {"bad_words": [[1], [1, 256]]},
        {"thinking_budget": BUDGET | {"end": [256]}},
        {"thinking_budget": BUDGET | {"start": [256]}},
    ],
    ids=repr,
)
def test_token_ids_beyond_the_vocabulary_are_refused(asked: dict[str, Any]) -> None:
    params = SamplingParams(logit_rules=asked)
    params.check_vocab(257)
    with pytest.raises(ValueError, match="holds token id 256, but the vocabulary ends at 255"):
        params.check_vocab(256)


def test_functions_are_refused_where_engines_are_served() -> None:
    asked = {"logits_processors": [lambda tokens, logits: logits]}
    assert SamplingParams(logit_rules=asked).logit_rules == asked
    assert not asks_mask(asked) and not asks_mask(None)
    with pytest.raises(
        ValueError, match=r"^logit_rules: logits_processors works only in LLM.generate"
    ):
        check_served(asked)
    check_served(None)
