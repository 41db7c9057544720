"""`LLM.generate(structured_outputs=...)`: the grammar is checked and reaches every request."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.engine.grammars import forms
from pdserve.engine.llm import LLM, SamplingParams
from pdserve.protocol.logit_rules import RULES, RuleKind
from pdserve.text.grammars.checker import shared_checker

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    shared_checker().close()


@pytest.fixture
def llm() -> LLM:
    """Makes an LLM without an engine."""
    made = LLM.__new__(LLM)
    made._default_sampling = SamplingParams()
    made._embedding = None
    return made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The sampling parameters that an LLM without an engine would compute."""
    found: list[SamplingParams] = []

    def make_run(self: LLM, prompt: Any, params: SamplingParams, *others: Any) -> Any:
        found.append(params)
        return SimpleNamespace(output=None)

    monkeypatch.setitem(RULES, "grammar", RuleKind("grammar:Grammar", lambda settings, size: None))
    monkeypatch.setattr(LLM, "_make_run", make_run)
    monkeypatch.setattr(LLM, "_run", lambda self, runs, use_tqdm: None)
    return found


def test_every_request_has_the_grammar(llm: LLM, sent: list[SamplingParams]) -> None:
    each = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)]
    llm.generate(["a", "b"], each, structured_outputs={"choice": ["yes", "no"]})
    assert [params.max_tokens for params in sent] == [3, 4]
    for params in sent:
        assert params.logit_rules == {"grammar": 'start: CHOICE\nCHOICE: "yes" | "no"\n'}
    assert all(params.logit_rules is None for params in each)


def test_what_cannot_be_used_is_refused_before_anything_is_computed(
    llm: LLM,
    sent: list[SamplingParams],
) -> None:
    for asked, message in (
        ({"regex": "("}, "structured_outputs.regex cannot be used"),
        ({"yaml": 1}, "structured_outputs.yaml is unknown"),
        ({}, "structured_outputs is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(["a"], SamplingParams(), structured_outputs=asked)
    ruled = SamplingParams(logit_rules={"grammar": "start: /a/"})
    with pytest.raises(ValueError, match="logit_rules holds grammar already"):
        llm.generate(["a"], ruled, structured_outputs={"regex": "a"})
    assert not sent


def test_keywords_that_are_not_enforced_are_logged_once(
    llm: LLM, sent: list[SamplingParams], caplog: pytest.LogCaptureFixture
) -> None:
    forms._warn.cache_clear()
    for _ in range(2):
        for schema in ({"not": {}, "minProperties": 3}, {"type": "integer"}):
            llm.generate(["a"], SamplingParams(), structured_outputs={"json": schema})
    records = [r for r in caplog.records if r.name == forms.__name__]
    assert [record.getMessage() for record in records] == [
        "structured_outputs.json: the schema uses keywords that are not enforced: minProperties, "
        "not"
    ]
    assert len(sent) == 4
