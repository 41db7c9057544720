"""Grammars at workers: who waits for a build waits alone, every phase has its grammar, and what
cannot be built fails its own request."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from support.grammars import (
    ListedGrammars,
    assert_follows_schema,
    demo_builder,
    demo_tokenizer,
    json_grammar,
)
from support.pair import (
    ROUTER,
    SESSION,
    Pair,
    Worker,
    cancel,
    deltas,
    of,
    prompt_of,
    submit,
    tokens_of,
)
from support.tiny_models import DEMO

from pdserve.engine.grammars.builder import GrammarBuilder
from pdserve.engine.llm import LLM
from pdserve.kvtransfer.transport.local_agent import LocalAgent
from pdserve.protocol.commands import Prepare, RouterLost, Start
from pdserve.protocol.events import Failed, Hello, LegsWaiting
from pdserve.protocol.handoff import Source
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams

Listed = tuple[Pair, ListedGrammars]


@pytest.fixture
def listed(tiny_llama: Any) -> Iterator[Listed]:
    """A pair whose D builds listed grammars; P has none to offer."""
    grammars = ListedGrammars()
    builder = GrammarBuilder(lambda: grammars, build_s=60)
    pair = Pair(tiny_llama, d={"grammars": builder})
    yield pair, grammars
    grammars.go.set()
    builder.close()
    pair.close()


def key_of(name: str) -> RequestKey:
    return RequestKey(ROUTER, SESSION, name)


def asking(text: str, **more: Any) -> SamplingParams:
    values = {"seed": 1, "temperature": 0, "max_tokens": 3, **more}
    return SamplingParams(**values, logit_rules={"grammar": text})


PLAIN = SamplingParams(seed=1, temperature=0, max_tokens=3)


def failed(worker: Worker, key: RequestKey) -> list[Failed]:
    return [event for event in of(worker, key) if isinstance(event, Failed)]


def is_done(worker: Worker, key: RequestKey) -> bool:
    return any(delta.finish_reason for delta in deltas(worker, key))


def test_a_slow_build_stops_nobody_else(listed: Listed) -> None:
    pair, grammars = listed
    worker = pair.d
    slow, plain, quick = map(key_of, ("slow", "plain", "quick"))
    worker.command(submit(slow, "full", prompt_of(20), asking("![[5], [6, 7], [8]]")))
    worker.command(submit(plain, "full", prompt_of(21), PLAIN))
    worker.command(submit(quick, "full", prompt_of(22), asking("[[1], [2], [3]]")))
    pair.until(lambda: is_done(worker, plain) and is_done(worker, quick))
    assert tokens_of(worker, quick) == {0: [1, 2, 3]}
    assert not of(worker, slow)
    assert worker.loop.grammars.keys() == {slow}
    snapshot = worker.loop.snapshot()
    assert (snapshot.num_waiting, snapshot.queue_tokens) == (1, 20)
    worker.loop._status.hurry()
    worker.loop.turn()
    waiting = [event for event in worker.events if isinstance(event, LegsWaiting)]
    assert waiting and waiting[-1].legs == ((slow.request_id, slow.attempt),)
    grammars.go.set()
    pair.until(lambda: is_done(worker, slow))
    assert tokens_of(worker, slow)[0][0] == 5 and tokens_of(worker, slow)[0][2] == 8
    assert worker.loop.snapshot().num_waiting == 0
    pair.assert_empty()


def test_a_grammar_that_cannot_be_built_fails_its_request_alone(listed: Listed) -> None:
    pair, _ = listed
    bad, good = key_of("bad"), key_of("good")
    pair.d.command(submit(bad, "full", prompt_of(20), asking("?")))
    pair.d.command(submit(good, "full", prompt_of(20), asking("[[1], [2], [3]]")))
    pair.until(lambda: is_done(pair.d, good) and failed(pair.d, bad))
    [event] = failed(pair.d, bad)
    assert event.kind == "invalid"
    assert event.message == (
        "logit_rules: grammar cannot be built: it has a question mark; mend or simplify it"
    )
    pair.d.loop.turn()
    assert not pair.d.loop._legs.is_here(bad)


def test_a_worker_without_a_tokenizer_refuses(listed: Listed) -> None:
    pair, _ = listed
    key = key_of("none")
    pair.p.command(submit(key, "prefill", prompt_of(20), asking("[[1]]")))
    pair.until(lambda: failed(pair.p, key))
    assert "needs a tokenizer, and this worker has none" in failed(pair.p, key)[0].message


def test_hello_says_what_builds_grammars(listed: Listed) -> None:
    pair, _ = listed
    hellos = [
        next(event for event in worker.events if isinstance(event, Hello))
        for worker in (pair.p, pair.d)
    ]
    assert [hello.grammar_engine for hello in hellos] == ["", "listed 1"]


def test_a_request_is_cancelled_while_its_grammar_is_built(listed: Listed) -> None:
    pair, grammars = listed
    worker = pair.d
    whole, part = key_of("whole"), key_of("part")
    worker.command(submit(whole, "full", prompt_of(20), asking("![[1], [2], [3]]")))
    worker.command(submit(part, "full", prompt_of(20), asking("![[1], [2], [4]]", n=3)))
    cancel(worker, whole)
    cancel(worker, part, (0, 2))
    worker.loop.turn()
    assert worker.loop.grammars.keys() == {part}
    assert not worker.loop._legs.is_here(whole)
    grammars.go.set()
    pair.until(lambda: is_done(worker, part))
    assert tokens_of(worker, part) == {1: [1, 2, 4]}
    assert not of(worker, whole)
    pair.assert_empty()


def test_a_lost_router_takes_its_waiting_requests_along(listed: Listed) -> None:
    pair, grammars = listed
    pair.d.command(submit(key_of("a"), "full", prompt_of(20), asking("![[1], [2], [3]]")))
    pair.d.command(RouterLost(router_id=ROUTER, session=SESSION))
    assert not pair.d.loop.grammars.keys()
    grammars.go.set()
    pair.turn_for(0.05)
    assert not pair.d.engine.has_work
    pair.assert_empty()


def test_forced_tokens_that_a_grammar_rejects_fail_their_request(listed: Listed) -> None:
    pair, _ = listed
    key = key_of("resumed")
    starts = (Start(0, (1, 2)),)
    pair.d.command(submit(key, "full", prompt_of(20), asking("[[1], [3], [4]]"), starts=starts))
    pair.until(lambda: failed(pair.d, key))
    assert "does not allow forced token 2 at position 1" in failed(pair.d, key)[0].message
    pair.assert_empty()


def test_a_prepare_begins_the_build(listed: Listed) -> None:
    pair, grammars = listed
    asked = asking("[[1], [2], [3]]")
    meta = pair.p.sender.meta()
    key = key_of("prepared")
    ahead = submit(key, "decode", prompt_of(40), asked)
    source = Source(meta.engine_id, meta.incarnation, key)
    pair.d.command(Prepare(submit=ahead, source=source))
    pair.until(lambda: grammars.built == ["[[1], [2], [3]]"])
    cancel(pair.d, key)
    pair.assert_empty()


# --- llguidance, split over P and D ---


@pytest.fixture
def demo() -> Iterator[Pair]:
    builders = [demo_builder(), demo_builder()]
    pair = Pair(DEMO, p={"grammars": builders[0]}, d={"grammars": builders[1]})
    yield pair
    pair.close()
    for builder in builders:
        builder.close()


@pytest.mark.parametrize("more", [{"temperature": 0}, {"temperature": 1.4, "n": 3}], ids=repr)
def test_split_answers_are_those_of_one_engine(demo: Pair, more: dict[str, Any]) -> None:
    assert isinstance(demo.d.rank_receivers[0].agent, LocalAgent)
    tokenizer = demo_tokenizer()
    llm = LLM(str(DEMO), device="cpu", num_kv_blocks=128)
    for text in ("Tom lives in Oakdale. Who lives where?", "What is 3 + 4?"):
        prompt = tokenizer.encode(text)
        params = asking(json_grammar(), max_tokens=80, **more)
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        expected = {choice.index: choice.token_ids for choice in alone.outputs}
        assert demo.split(prompt, params) == expected
        for tokens in expected.values():
            assert_follows_schema(tokenizer.decode(tokens))
    demo.assert_empty()


def test_a_row_without_a_token_to_draw_fails_its_request(demo: Pair) -> None:
    """At P, where nothing is handed over, and in whole requests."""
    rules = {"grammar": json_grammar(), "allowed_token_ids": [40]}
    params = SamplingParams(seed=1, max_tokens=9, logit_rules=rules)
    for worker, phase in ((demo.p, "prefill"), (demo.d, "full")):
        key = key_of(phase)
        worker.command(submit(key, phase, [9, 10, 11], params))  # type: ignore[arg-type]
        demo.until(partial(failed, worker, key))
        [event] = failed(worker, key)
        assert event.kind == "invalid" and "leave no token to draw" in event.message
        assert not deltas(worker, key)
    demo.assert_empty()


def test_what_grammars_cost_is_counted(demo: Pair) -> None:
    demo.split([9, 10, 11], asking(json_grammar(), max_tokens=40))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in demo.d.loop.snapshot().metrics
        for sample in family.samples
    }
    assert samples["pdserve_token_masks_total",] > 5
    assert samples["pdserve_token_mask_seconds_total",] > 0
    assert samples["pdserve_grammar_requests_total",] >= 1
    assert samples["pdserve_grammar_builds_total",] == 1
    assert samples["pdserve_grammar_build_seconds_total",] > 0
    assert samples["pdserve_grammar_errors_total", "invalid"] == 0
