"""Grammars before the engine has them: what llguidance makes of texts, and how the builder builds,
remembers and gives up."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.clock import Clock
from support.grammars import (
    ListedGrammar,
    ListedGrammars,
    demo_builder,
    demo_tokenizer,
    json_grammar,
)
from support.tiny_models import DEMO
from support.waiting import until

from pdserve.engine.grammars import builder as builders
from pdserve.engine.grammars.builder import GrammarBuilder, GrammarLate, GrammarOrder
from pdserve.engine.grammars.grammar import Grammar, GrammarFailed
from pdserve.engine.grammars.llguidance_engine import LLGuidanceEngine
from pdserve.engine.grammars.replay import replay
from pdserve.protocol.logit_rules import MAX_GRAMMAR_BYTES

# --- llguidance ---


@pytest.fixture(scope="module")
def engine() -> LLGuidanceEngine:
    return LLGuidanceEngine.load(DEMO, (5,))


def tokens_of(grammar: Grammar, vocab: int = 1792) -> set[int]:
    mask = np.zeros(-(-vocab // 32), dtype=np.uint32)
    grammar.fill(mask)
    return {t for t in range(32 * len(mask)) if mask[t // 32] >> np.uint32(t % 32) & 1}


def test_a_grammar_goes_through_an_answer_of_its_own(engine: LLGuidanceEngine) -> None:
    tokenizer = demo_tokenizer()
    grammar = engine.build(json_grammar())
    ids = tokenizer.encode('{"name":"Tom","age":12,"tags":[true]}', add_special_tokens=False)
    copy = grammar.copy()
    for token in ids:
        assert not copy.is_accepting()
        assert token in tokens_of(copy)
        assert copy.advance(token)
    assert copy.is_accepting() and tokens_of(copy) == set()
    assert not copy.advance(ids[0])
    # the prototype has not moved
    assert ids[0] in tokens_of(grammar) and not grammar.is_accepting()


def test_what_is_not_allowed_changes_nothing(engine: LLGuidanceEngine) -> None:
    grammar = engine.build('start: "ab"').copy()
    before = tokens_of(grammar)
    wrong = next(token for token in range(12, 1792) if token not in before)
    assert not grammar.advance(wrong)
    assert tokens_of(grammar) == before
    assert grammar.advance(min(before))


def test_ends_of_sequence_are_all_known_and_never_in_a_mask(engine: LLGuidanceEngine) -> None:
    """The demo's generation_config.json names 1 and 5."""
    assert set(engine.eos_token_ids) == {1, 5}
    grammar = engine.build("start: /[a-z]*/").copy()
    assert grammar.is_accepting()
    assert tokens_of(grammar) and not tokens_of(grammar) & {1, 5}
    assert not grammar.advance(1) and not grammar.advance(5)


@pytest.mark.parametrize("vocab", [512, 1792, 2000])
def test_masks_of_many_grammars_are_those_of_each(engine: LLGuidanceEngine, vocab: int) -> None:
    texts = [json_grammar(), 'start: "ab"', "start: /[a-z]*/", "start: /[0-9]{2}/"]
    rows = [engine.build(text).copy() for text in texts for _ in range(3)]
    draw = np.random.default_rng(0)
    words = -(-vocab // 32)
    for _ in range(12):
        alone = [tokens_of(row, vocab) for row in rows]
        masks = np.full((len(rows), words), 0xFFFFFFFF, dtype=np.uint32)
        assert rows[0].fill_all(rows, masks) == [None] * len(rows)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        assert [set(np.flatnonzero(row).tolist()) for row in bits] == alone
        for row, allowed in zip(rows, alone, strict=True):
            assert not allowed or row.advance(int(draw.choice(sorted(allowed))))
    assert any(not allowed for allowed in alone), "some have come to their end"


def test_a_failed_grammar_does_not_harm_its_neighbours(engine: LLGuidanceEngine) -> None:
    good, bad = engine.build("start: /[a-z]+/"), engine.build("start: /[a-z]+/").copy()
    bad._matcher.consume_token(10**6)  # an error for the library
    masks = np.zeros((2, 56), dtype=np.uint32)
    failures = good.fill_all([bad, good], masks)
    assert isinstance(failures[0], GrammarFailed) and failures[1] is None
    assert not masks[0].any() and masks[1].any()


def test_a_vocabulary_that_is_padded_or_cut(engine: LLGuidanceEngine) -> None:
    grammar = engine.build("start: /[a-z]+/")
    exact = tokens_of(grammar)
    assert tokens_of(grammar, 2000) == exact
    assert tokens_of(grammar, 512) == {token for token in exact if token < 512}


def test_special_tokens_may_be_named(engine: LLGuidanceEngine) -> None:
    special = demo_tokenizer().special_ids - set(engine.eos_token_ids)
    token = min(special)
    grammar = engine.build(f'start: <[{token}]> "a"').copy()
    assert tokens_of(grammar) == {token}
    assert grammar.advance(token) and tokens_of(grammar)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: foo", "unknown name"),
        ("start: /(/", "regex"),
        ("nonsense", "Expected token"),
        ('start: %json {"type": 3}', "type must be a string"),
        ("start: /[^\\s\\S]/", "nothing can match it"),
    ],
)
def test_a_bad_text_is_refused_with_its_fault(
    engine: LLGuidanceEngine, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        engine.build(text)
    assert 0 < len(str(raised.value)) <= 500 and "\n" not in str(raised.value)


HOSTILE = {
    "nested schema": "start: %json " + '{"properties": {"a": ' * 900 + "{}" + "}}" * 900,
    "nested groups": "start: " + "(" * 5000 + '"a"' + ")" * 5000,
    "nested repeats": "start: /(a{1,1000}){1,1000}{1,1000}/",
    "long repeats": "start: " + " ".join(['"a"{1,100000}'] * 50),
    "chained rules": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(1_000)),
    "chained ends": "start: a0\n"
    + "\n".join(f"a{i}: a{i + 1}" for i in range(18_000))
    + '\na18000: "x"',
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_grammars_end_nobody(text: str) -> None:
    """Each is built or refused, in time; chained rules overflow the stack of a usual thread."""
    builder = demo_builder(grammar_build_s=60)
    assert len(text) < MAX_GRAMMAR_BYTES
    order = builder.order(text)
    until(lambda: builder.is_due(order))
    try:
        grammar = builder.take(order).copy()
    except ValueError as error:
        assert "mend or simplify it" in str(error)
    else:
        assert tokens_of(grammar)
    builder.close()


def test_replay() -> None:
    listed = ListedGrammar([[1, 2], [3]])
    for tokens, rejected in (
        ((), None),
        ((1, 3), None),
        ((1, 3, 9), None),
        ((1, 3, 9, 9), None),
        ((1, 3, 9, 3), 3),
        ((1, 9), 1),
        ((3,), 0),
        ((1, 3, 3), 2),
    ):
        assert replay(listed.copy(), tokens, {9}) == rejected


# --- the builder ---


@pytest.fixture
def listed() -> Iterator[ListedGrammars]:
    made = ListedGrammars()
    yield made
    made.go.set()


@pytest.fixture
def make(listed: ListedGrammars) -> Iterator[Callable[..., GrammarBuilder]]:
    made: list[GrammarBuilder] = []

    def make(**options: object) -> GrammarBuilder:
        made.append(GrammarBuilder(lambda: listed, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    listed.go.set()
    for each in made:
        each.close()


Make = Callable[..., GrammarBuilder]


def wait(builder: GrammarBuilder, order: GrammarOrder) -> Grammar:
    until(lambda: builder.is_due(order))
    return builder.take(order)


def test_a_text_is_built_once(make: Make, listed: ListedGrammars) -> None:
    builder = make()
    first = wait(builder, builder.order("[[1]]"))
    again = builder.order("[[1]]")
    assert builder.is_due(again) and builder.take(again) is first
    assert wait(builder, builder.order("[[2]]")) is not first
    assert listed.built == ["[[1]]", "[[2]]"]
    totals = builder.totals
    assert (totals.num_asked, totals.num_known, totals.num_built) == (3, 1, 2)


def test_a_refusal_is_remembered(make: Make, listed: ListedGrammars) -> None:
    builder = make()
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"^logit_rules: grammar cannot be built: it has a question mark; mend or simpl",
        ):
            wait(builder, builder.order("?"))
    assert listed.built == ["?"]
    assert builder.totals.errors == {"invalid": 2}


def test_few_texts_are_kept(
    make: Make, listed: ListedGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "NUM_KEPT", 2)
    builder = make()
    for text in ("[[1]]", "[[2]]", "[[1]]", "[[3]]", "[[1]]", "[[2]]"):
        wait(builder, builder.order(text))
    assert listed.built == ["[[1]]", "[[2]]", "[[3]]", "[[2]]"]
    monkeypatch.setattr(builders, "KEPT_BYTES", 20)
    wait(builder, builder.order("[[4, 5, 6, 7, 8, 9]]"))
    wait(builder, builder.order("[[1]]"))
    assert listed.built[-2:] == ["[[4, 5, 6, 7, 8, 9]]", "[[1]]"]


def test_a_slow_build_fails_at_its_deadline_and_may_help_a_later_one(
    make: Make, listed: ListedGrammars
) -> None:
    clock = Clock(100.0)
    builder = make(build_s=5.0, clock=clock)
    order = builder.order("![[1]]")
    until(lambda: listed.built)
    until(lambda: order.build.began is not None)
    assert not builder.is_due(order)
    assert wait(builder, builder.order("[[2]]")), "another one is built meanwhile"
    clock.seconds += 5
    assert builder.is_due(order)
    with pytest.raises(ValueError, match=r"took longer than engine.grammar_build_s \(5 s\)"):
        builder.take(order)
    listed.go.set()
    assert wait(builder, builder.order("![[1]]"))
    assert builder.totals.errors == {"deadline": 1}


def test_a_build_that_did_not_begin_is_nobodys_fault(make: Make, listed: ListedGrammars) -> None:
    clock = Clock(100.0)
    builder = make(build_s=5.0, clock=clock)
    blocking = [builder.order(f"![[{i}]]") for i in range(builders.NUM_THREADS)]
    until(lambda: len(listed.built) == len(blocking))
    order = builder.order("[[9]]")
    clock.seconds += 5
    with pytest.raises(GrammarLate, match="waited 5 s while other grammars"):
        builder.take(order)
    assert builder.totals.errors == {"queue": 1}


def test_small_texts_do_not_wait_for_large_ones(make: Make, listed: ListedGrammars) -> None:
    builder = make()
    large = [builder.order("!" + " " * builders.SMALL_TEXT + f"[[{i}]]") for i in range(4)]
    until(lambda: len(listed.built) == 1)
    assert wait(builder, builder.order("[[9]]", [(9,)], [3]))
    assert listed.built[1:] == ["[[9]]"], "one large text is built at a time"
    listed.go.set()
    for order in large:
        assert wait(builder, order)


def test_forced_tokens_are_replayed(make: Make) -> None:
    builder = make()
    for forced in ([], [()], [(1,)], [(1, 3), (2,)], [(1, 3, 9)]):
        assert wait(builder, builder.order("[[1, 2], [3]]", forced, [9]))
    with pytest.raises(
        ValueError,
        match="grammar does not allow forced token 4 at position 1: the tokens were sampled with",
    ):
        wait(builder, builder.order("[[1, 2], [3]]", [(1, 3), (2, 4)]))
    assert builder.totals.errors == {"replay": 1}


def test_waiters_are_woken(make: Make) -> None:
    woken: list[int] = []
    builder = make(wake=lambda: woken.append(1))
    order = builder.order("[[1, 2], [3]]", [(1,)])
    until(lambda: woken)
    count = len(woken)
    until(lambda: builder.is_due(order))
    until(lambda: len(woken) > count)


def test_a_panic_is_a_refusal(make: Make, listed: ListedGrammars) -> None:
    class Panic(BaseException):
        """As pyo3 raises them."""

    def build(text: str) -> ListedGrammar:
        raise Panic("index out of bounds")

    listed.build = build  # type: ignore[method-assign]
    builder = make()
    with pytest.raises(ValueError, match="index out of bounds; mend or simplify it"):
        wait(builder, builder.order("[[1]]"))


def test_a_model_without_a_tokenizer_refuses_grammars(tiny_llama: Path) -> None:
    builder = demo_builder(tiny_llama)
    assert builder.name() == ""
    with pytest.raises(
        ValueError,
        match=r"^logit_rules: grammar cannot be used with this model's tokenizer: .*holds no token",
    ):
        builder.build("start: /a/")
    assert builder.totals.errors == {"no-tokenizer": 1}
    builder.close()


def test_llguidance_says_its_version() -> None:
    builder = demo_builder()
    assert builder.name().startswith("llguidance 1.")
    builder.close()
