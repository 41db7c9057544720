"""Masks of tokens, row by row: what each source allows, how several come together, and what happens
where they leave nothing."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from engine.whole_sampler import WholeSampler
from support.grammars import ListedGrammar

from pdserve.engine.grammars.grammar import Grammar, GrammarFailed
from pdserve.engine.sampling.rules.masks import grammar_mask
from pdserve.engine.sampling.rules.masks.source import full_mask, mask_of
from pdserve.engine.sampling.rules.masks.thinking_budget import Delimiter
from pdserve.engine.sampling.rules.token_mask import TokenMask
from pdserve.engine.sampling.sample_row import SampleRow
from pdserve.protocol.sampling_params import SamplingParams

VOCAB = 50
EOS = 9


def make_row(
    rules: dict[str, Any] | None,
    generated: list[int] | None = None,
    slot: int = 1,
    grammar: Grammar | None = None,
    stops: frozenset[int] = frozenset(),
    **params: Any,
) -> SampleRow:
    tokens = generated or []
    sampling = SamplingParams(**{"temperature": 0, "seed": 1, **params}, logit_rules=rules)
    stops |= frozenset(sampling.stop_token_ids)
    row = SampleRow(sampling, 0, slot, [7, *tokens], 1, stops, len(tokens))
    row.grammar = grammar
    return row


def allowed(row: SampleRow, sampler: WholeSampler | None = None) -> set[int]:
    """The tokens that may be drawn for the row."""
    sampler = sampler or WholeSampler(VOCAB, 4)
    logits = torch.zeros(1, VOCAB)
    staged = sampler.stage([row])
    for name, arrays in staged.rules.items():
        [rule] = [rule for rule in sampler.rules if rule.name == name]
        rule.apply(logits, {key: torch.from_numpy(array) for key, array in arrays.items()})
    return set(torch.isfinite(logits[0]).nonzero()[:, 0].tolist())


def push(row: SampleRow, token: int) -> None:
    row.token_ids.append(token)
    row.position += 1


ALL = set(range(VOCAB))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100])
def test_words_of_bits(vocab: int) -> None:
    ids = [token for token in range(vocab) if token % 3 != 1]
    mask = mask_of([*ids, vocab, vocab + 40], vocab)
    assert mask.dtype == np.uint32 and len(mask) == -(-vocab // 32)
    assert [t for t in range(32 * len(mask)) if mask[t // 32] >> np.uint32(t % 32) & 1] == ids
    assert np.array_equal(mask_of(range(vocab), vocab), full_mask(vocab))


def test_rows_without_masks_stage_none() -> None:
    sampler = WholeSampler(VOCAB, 4)
    assert not sampler.stage([make_row(None), make_row(None, slot=2)]).rules
    mixed = sampler.stage([make_row(None), make_row({"allowed_token_ids": [3]}, slot=3)])
    assert mixed.rules["token_mask"]["rows"].tolist() == [1]


def test_only_allowed_tokens() -> None:
    assert allowed(make_row({"allowed_token_ids": [3, 49, 3]})) == {3, 49}
    # bias and penalties come first
    row = make_row({"allowed_token_ids": [3]}, logit_bias={5: 100.0}, presence_penalty=2.0)
    assert WholeSampler(VOCAB, 4).sample(torch.zeros(1, VOCAB), [row]).fetch()[0].token_ids == (3,)


def test_masks_that_are_filled_together_are_those_of_single_rows() -> None:
    class Failing(ListedGrammar):
        def copy(self) -> ListedGrammar:
            return Failing(self._allowed, self._position)

        def fill(self, mask: np.ndarray) -> None:
            if self._position == 1:
                raise GrammarFailed("too many items")
            super().fill(mask)

    def rows() -> list[SampleRow]:
        grammars = [
            ListedGrammar([[3, 4], [5]]),
            Failing([[3], [5]]),
            None,
            ListedGrammar([[3]]),
            ListedGrammar([[3], [8, 9]]),
            ListedGrammar([[5]]),
        ]
        rules: list[dict[str, Any]] = [{"grammar": "x"} if one else {} for one in grammars]
        rules[2] = {"allowed_token_ids": [6]}
        rules[4]["bad_words"] = [[8]]
        generated = [[3], [3], [3], [3], [3], []]
        slots = range(1, 7)
        return [
            make_row(*each, frozenset({EOS}))
            for each in zip(rules, generated, slots, grammars, strict=True)
        ]

    together, alone = rows(), rows()
    arrays = WholeSampler(VOCAB, 8).stage(together).rules["token_mask"]
    words = arrays["words"].reshape(len(arrays["rows"]), -1)
    for row in alone:
        staged = WholeSampler(VOCAB, 8).stage([row]).rules.get("token_mask")
        at = alone.index(row)
        if staged is None:
            assert row.error and at not in arrays["rows"]
        else:
            [place] = np.flatnonzero(arrays["rows"] == at)
            assert words[place].tolist() == staged["words"].tolist()
    assert [row.error for row in together] == [row.error for row in alone]
    assert [bool(row.error) for row in alone] == [False, True, False, False, False, False]


def test_bad_words() -> None:
    words = [[1], [2, 3], [2, 2, 4], [5, 6, 7], [6, 8]]
    rules = {"bad_words": words}
    assert allowed(make_row(rules)) == ALL - {1}
    assert allowed(make_row(rules, [2])) == ALL - {1, 3}
    assert allowed(make_row(rules, [2, 2])) == ALL - {1, 3, 4}
    assert allowed(make_row(rules, [5, 6])) == ALL - {1, 7, 8}
    assert allowed(make_row(rules, [6])) == ALL - {1, 8}
    # the prompt, which ends with 7, does not count
    assert allowed(make_row({"bad_words": [[7, 8]]})) == ALL


def test_no_bad_word_is_ever_completed() -> None:
    rng = random.Random(5)
    for seed in range(20):
        words = [[rng.randrange(6) for _ in range(rng.randint(1, 4))] for _ in range(6)]
        row = make_row({"bad_words": words, "allowed_token_ids": list(range(8))})
        sampler = WholeSampler(VOCAB, 1)
        torch.manual_seed(seed)
        for _ in range(60):
            [token] = sampler.sample(torch.randn(1, VOCAB), [row]).fetch()[0].token_ids
            push(row, token)
        text = row.token_ids[1:]
        for word in words:
            found = [text[i : i + len(word)] == word for i in range(len(text))]
            assert not any(found)


def budget(tokens: int, **more: Any) -> dict[str, Any]:
    return {"thinking_budget": {"tokens": tokens, "end": [20, 20, 21], **more}}


def test_a_delimiter_is_found_wherever_it_begins() -> None:
    rng = random.Random(3)
    for _ in range(200):
        wanted = [rng.randrange(2) for _ in range(rng.randint(1, 5))]
        delimiter = Delimiter(wanted)
        seen: list[int] = []
        for _ in range(60):
            seen.append(rng.randrange(2))
            is_complete = delimiter.push(seen[-1])
            assert is_complete == (seen[-len(wanted) :] == wanted)
            if is_complete:
                seen = []  # none of its tokens belongs to another one


def test_the_end_is_forced_token_by_token_after_the_budget() -> None:
    row = make_row(budget(3))
    sampler = WholeSampler(VOCAB, 1)
    seen = []
    for token in (1, 2, 3, 20, 20, 21, 5):
        seen.append(allowed(row, sampler))
        push(row, token)
    assert seen == [ALL, ALL, ALL, {20}, {20}, {21}, ALL]


def test_an_end_that_was_begun_is_completed() -> None:
    assert allowed(make_row(budget(3), [1, 2, 20])) == {20}
    assert allowed(make_row(budget(3), [1, 20, 20])) == {21}
    # three of them: the last two may begin the delimiter
    assert allowed(make_row(budget(3), [20, 20, 20])) == {21}
    assert allowed(make_row(budget(0))) == {20}


def test_nothing_is_forced_when_reasoning_ended_in_time() -> None:
    assert allowed(make_row(budget(4), [1, 20, 20, 21])) == ALL
    assert allowed(make_row(budget(4), [1, 20, 20, 21, 5, 5, 5, 5])) == ALL


def test_reasoning_that_begins_later_is_counted_from_there() -> None:
    rules = budget(2, start=[30, 31])
    assert allowed(make_row(rules, [1, 1, 1, 1, 30])) == ALL
    assert allowed(make_row(rules, [1, 1, 1, 30, 31])) == ALL
    assert allowed(make_row(rules, [1, 30, 31, 2])) == ALL
    assert allowed(make_row(rules, [1, 30, 31, 2, 2])) == {20}
    # over all stretches together, the end's own tokens too
    ended = [1, 30, 31, 2, 20, 20, 21]
    assert allowed(make_row(rules, ended)) == ALL
    assert allowed(make_row(rules, [*ended, 30, 31])) == {20}


def test_values_are_needed_only_where_they_matter() -> None:
    rule = next(rule for rule in WholeSampler(VOCAB, 1).rules if isinstance(rule, TokenMask))

    def needs(position: int, rules: dict[str, Any], grammar: Grammar | None = None) -> bool:
        state = rule.join(make_row(rules, grammar=grammar))
        assert state is not None
        return rule.needs_values_at(state, position)

    assert not needs(5, {"allowed_token_ids": [1], "bad_words": [[2]]})
    assert needs(1, {"bad_words": [[2, 3]]}) and not needs(0, {"bad_words": [[2, 3]]})
    assert not needs(4, budget(5)) and needs(5, budget(5))
    listed = ListedGrammar([[1]])
    assert needs(1, {"grammar": "x"}, listed) and not needs(0, {"grammar": "x"}, listed)


def test_several_sources_come_together() -> None:
    rules = {"grammar": "x", "allowed_token_ids": [1, 2, 3], "bad_words": [[2]]}
    assert allowed(make_row(rules, grammar=ListedGrammar([[2, 3, 4]]))) == {3}


def test_a_grammar_ends_where_it_accepts() -> None:
    listed = ListedGrammar([[1, 2], [3]])
    rules = {"grammar": "x"}
    stops = frozenset({EOS})
    assert allowed(make_row(rules, grammar=listed, stops=stops)) == {1, 2}
    assert allowed(make_row(rules, [2], grammar=listed, stops=stops)) == {3}
    more = make_row(rules, [2, 3], grammar=listed, stops=stops, stop_token_ids=[4])
    assert allowed(more) == {EOS, 4}
    assert listed.copy().advance(1), "the prototype has not moved"


def test_where_nothing_ends_a_whole_answer_the_models_ends_follow() -> None:
    """With ignore_eos nothing could be drawn otherwise before max_tokens."""

    class WithEos(ListedGrammar):
        eos_token_ids: tuple[int, ...] = (EOS,)

        def copy(self) -> ListedGrammar:
            return WithEos(self._allowed, self._position)

    rules = {"grammar": "x"}
    for generated in ([1], [1, EOS], [1, EOS, EOS]):
        row = make_row(rules, list(generated), grammar=WithEos([[1]]), ignore_eos=True)
        assert allowed(row) == {EOS}
        assert not row.error


def test_min_tokens_hides_ends_unless_nothing_else_is_allowed() -> None:
    stops = frozenset({EOS})
    asked = {"allowed_token_ids": [EOS, 3]}
    assert allowed(make_row(asked, stops=stops, min_tokens=2, max_tokens=9)) == {3}
    assert allowed(make_row(asked, [3, 3], stops=stops, min_tokens=2, max_tokens=9)) == {EOS, 3}
    only = make_row({"allowed_token_ids": [EOS]}, stops=stops, min_tokens=2, max_tokens=9)
    assert allowed(only) == {EOS}
    whole = make_row(
        {"grammar": "x"}, [1], grammar=ListedGrammar([[1]]), stops=stops, min_tokens=3, max_tokens=9
    )
    assert allowed(whole) == {EOS}
    late = make_row(budget(9), stops=stops, min_tokens=2, max_tokens=9)
    assert allowed(late) == ALL - {EOS}


@pytest.mark.parametrize(
    ("rules", "generated", "message", "reason"),
    [
        (
            {"allowed_token_ids": [4], "bad_words": [[4]]},
            [],
            "allowed_token_ids and bad_words leave no token to draw at position 0: allow more",
            "empty",
        ),
        ({"grammar": "x"}, [1], "grammar leave no token to draw at position 1", "empty"),
        ({"grammar": "x"}, [2], "grammar does not allow token 2 at position 0", "replay"),
        (budget(1) | {"bad_words": [[20]]}, [1], "bad_words and thinking_budget leave", "empty"),
    ],
)
def test_nothing_is_drawn_from_an_empty_mask(
    rules: dict[str, Any], generated: list[int], message: str, reason: str
) -> None:
    sampler = WholeSampler(VOCAB, 4)
    bad = make_row(rules, generated, grammar=ListedGrammar([[1]]))
    good = make_row({"allowed_token_ids": [6]}, slot=2)
    staged = sampler.stage([bad, good])
    assert message in bad.error and bad.error.startswith("logit_rules: ")
    assert not good.error
    assert staged.rules["token_mask"]["rows"].tolist() == [1]
    assert sampler.staging.mask_totals.errors == {reason: 1}
    sampler.stage([bad, good])
    assert sampler.staging.mask_totals.errors == {reason: 1}, "one request, one error"


def test_a_limit_of_the_library_ends_the_row() -> None:
    class Limited(ListedGrammar):
        def copy(self) -> ListedGrammar:
            return Limited(self._allowed)

        def fill(self, mask: np.ndarray) -> None:
            raise GrammarFailed("too many items")

    row = make_row({"grammar": "x"}, grammar=Limited([[1]]))
    WholeSampler(VOCAB, 4).stage([row])
    assert row.error == (
        "logit_rules: grammar cannot go on at position 0: too many items; simplify it"
    )


class FakeTime:
    """The module time with clocks that the test moves."""

    def __init__(self, now: list[float]) -> None:
        self.thread_time = self.perf_counter = lambda: now[0]


def test_the_third_slow_mask_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(ListedGrammar):
        seconds = 0.09

        def copy(self) -> ListedGrammar:
            return Slow(self._allowed)

        def fill(self, mask: np.ndarray) -> None:
            super().fill(mask)
            now[0] += Slow.seconds

    monkeypatch.setattr(grammar_mask, "time", FakeTime(now))
    row = make_row({"grammar": "x"}, grammar=Slow([[1]] * 20))
    sampler = WholeSampler(VOCAB, 4)
    for seconds in (0.09, 0.2, 0.09, 0.2, 0.09):
        Slow.seconds = seconds
        assert allowed(row, sampler) == {1}
        push(row, 1)
    Slow.seconds = 0.2
    allowed(row, sampler)
    assert "took more than engine.grammar_mask_s (0.1 s) for a mask 3 times" in row.error


def test_a_slow_row_is_found_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow(ListedGrammar):
        def copy(self) -> ListedGrammar:
            return Slow(self._allowed)

        def fill(self, mask: np.ndarray) -> None:
            super().fill(mask)
            now[0] += 0.2

    monkeypatch.setattr(grammar_mask, "time", FakeTime(now))
    rows = [
        make_row({"grammar": "x"}, slot=slot, grammar=kind([[1]] * 20))
        for slot, kind in enumerate((ListedGrammar, Slow, ListedGrammar), 1)
    ]
    sampler = WholeSampler(VOCAB, 4)
    for _ in range(4):
        assert not any(row.error for row in rows)
        sampler.stage(rows)
        for row in rows:
            push(row, 1)
    assert [bool(row.error) for row in rows] == [False, True, False]
    for _ in range(10):
        sampler.stage([rows[0], rows[2]])
        for row in (rows[0], rows[2]):
            push(row, 1)
    assert not rows[0].error and not rows[2].error
