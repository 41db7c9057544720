"""A prefix that one worker has cached is fetched by another: what comes, what does not, and who is
let wait."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_pool_backend import LocalPoolServer
from support.local_transfer import LocalTransferConfig
from support.pair import (
    ROUTER,
    SESSION,
    Worker,
    cancel,
    deltas,
    expected,
    of,
    owned,
    prompt_of,
    submit,
    tokens_of,
)
from support.waiting import until

from pdserve.configs.transfer import PoolConfig
from pdserve.engine.llm import LLM
from pdserve.kvtransfer.connector import PullFailed, PullSettled
from pdserve.kvtransfer.transport.local_agent import LocalFaults
from pdserve.protocol.commands import ConnectPeer, PrefixHint, RouterLost
from pdserve.protocol.events import Arrived, Failed, PromptScored
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.worker import peers

GREEDY = SamplingParams(temperature=0, max_tokens=8, seed=1, ignore_eos=True)
_names = itertools.count()


class Two:
    """A holder and a worker that fetches from it. Fetches are patient, unless the test says
    otherwise."""

    def __init__(
        self,
        model: Path,
        holder: dict[str, Any] | None = None,
        asker: dict[str, Any] | None = None,
        **transfer: Any,
    ) -> None:
        config = LocalTransferConfig(
            **{"pull_deadline_s": 300.0, "staging_bytes": 1 << 22, **transfer}
        )
        common: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 128}
        number = next(_names)
        self.holder = Worker(model, f"H{number}", "both", config, **{**common, **(holder or {})})
        self.asker = Worker(model, f"X{number}", "both", config, **{**common, **(asker or {})})
        self.asker.fetch.least_patience_s = 300.0
        self.connect(self.asker, self.holder)

    def connect(self, asker: Worker, holder: Worker) -> None:
        meta = holder.sender.meta()
        asker.command(ConnectPeer(meta=meta, for_prefixes=True))
        self.until(lambda: asker.loop._peers.link(meta.engine_id, meta.incarnation) is not None)

    def turn(self) -> None:
        self.holder.loop.turn()
        self.asker.loop.turn()

    def until(self, done: Any) -> None:
        until(done, doing=self.turn, pause_s=0.0005)

    def hint(self, num_tokens: int, holder: Worker | None = None) -> PrefixHint:
        meta = (holder or self.holder).sender.meta()
        return PrefixHint(meta.engine_id, meta.incarnation, num_tokens)

    def ask(self, worker: Worker, prompt: list[int], **more: Any) -> RequestKey:
        sampling = more.pop("sampling", GREEDY)
        key = RequestKey(ROUTER, SESSION, f"f{next(_names)}", 1)
        worker.command(submit(key, more.pop("phase", "full"), prompt, sampling, **more))
        return key

    def finish(self, worker: Worker, key: RequestKey, num_choices: int = 1) -> dict:
        self.until(lambda: len([d for d in deltas(worker, key) if d.finish_reason]) == num_choices)
        return tokens_of(worker, key)

    def warm(self, prompt: list[int]) -> None:
        """The holder computes a prompt, and is done with it."""
        self.finish(self.holder, self.ask(self.holder, prompt))
        self.until(lambda: not owned(self.holder))

    def at_rest(self) -> None:
        self.until(lambda: not owned(self.holder) and not owned(self.asker))
        for worker in (self.holder, self.asker):
            worker.loop.check_integrity()

    @property
    def computed(self) -> int:
        return self.asker.engine.stats.prompt_tokens

    @property
    def faults(self) -> LocalFaults:
        return self.holder.faults

    def close(self) -> None:
        self.faults.frozen = False
        self.asker.close()
        self.holder.close()


@pytest.fixture
def two(tiny_llama: Path) -> Iterator[Two]:
    made = Two(tiny_llama)
    yield made
    made.close()


def outcome(worker: Worker, name: str) -> float:
    return (
        worker.loop._metrics.registry.get_sample_value(
            "pdserve_prefix_fetches_total", {"outcome": name}
        )
        or 0.0
    )


def total(worker: Worker, name: str) -> float:
    return worker.loop._metrics.registry.get_sample_value(f"pdserve_prefix_fetch_{name}") or 0.0


def arrived(worker: Worker, key: RequestKey) -> list[Arrived]:
    return [event for event in of(worker, key) if isinstance(event, Arrived)]


def test_a_prefix_that_another_worker_holds_is_not_computed(two: Two, llm: LLM) -> None:
    prompt = prompt_of(100)
    two.warm(prompt)
    longer = prompt + prompt_of(30, 1)
    key = two.ask(two.asker, longer, prefix=two.hint(96))
    assert two.finish(two.asker, key) == expected(llm, longer, GREEDY)
    assert two.computed == 130 - 96
    [news] = arrived(two.asker, key)
    block_bytes = two.asker.engine.layout.block_bytes
    assert (news.source, news.cached_tokens, news.num_bytes) == ("prefix", 96, 6 * block_bytes)
    [scored] = [event for event in of(two.asker, key) if isinstance(event, PromptScored)]
    assert scored.cached_tokens == 96
    assert (outcome(two.asker, "done"), total(two.asker, "tokens_total")) == (1, 96)
    assert total(two.asker, "bytes_total") == 6 * block_bytes
    assert total(two.asker, "seconds_count") == 1
    two.at_rest()
    # it is cached here now: nobody is asked again, and the next one may fetch it from here
    again = two.ask(two.asker, longer, prefix=two.hint(96))
    two.finish(two.asker, again)
    assert not arrived(two.asker, again)


def test_what_ended_here_is_lent_too(two: Two, llm: LLM) -> None:
    """The answer is part of the next turn's prompt; and a prefix passes from hand to hand."""
    chat = prompt_of(60)
    key = two.ask(two.holder, chat)
    answer = two.finish(two.holder, key)[0]
    turn = chat + answer + prompt_of(20, 2)
    key = two.ask(two.asker, turn, prefix=two.hint(len(turn)))
    assert two.finish(two.asker, key) == expected(llm, turn, GREEDY)
    assert two.computed == len(turn) - 64
    two.connect(two.holder, two.asker)
    two.holder.fetch.least_patience_s = 300.0
    more = turn + prompt_of(40, 3)
    key = two.ask(two.holder, more, prefix=two.hint(80, two.asker))
    before = two.holder.engine.stats.prompt_tokens
    assert two.finish(two.holder, key) == expected(llm, more, GREEDY)
    assert two.holder.engine.stats.prompt_tokens - before == len(more) - 80


def test_the_last_token_is_always_computed(two: Two, llm: LLM) -> None:
    prompt = prompt_of(96)
    two.warm(prompt)
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert two.computed == 16
    assert arrived(two.asker, key)[0].cached_tokens == 80


def test_a_hint_that_is_wrong_costs_a_question(two: Two, llm: LLM) -> None:
    prompt = prompt_of(100)
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert outcome(two.asker, "miss") == 1 and two.computed == 100 and not arrived(two.asker, key)
    # it holds less than the hint says
    two.warm(prompt)
    longer = prompt + prompt_of(60, 1)
    key = two.ask(two.asker, longer, prefix=two.hint(160))
    assert two.finish(two.asker, key) == expected(llm, longer, GREEDY)
    two.at_rest()


def test_prompts_that_are_computed_at_once(two: Two, llm: LLM) -> None:
    """Unknown holders, an old incarnation, scored prompts, a hint of less than a block."""
    prompt = prompt_of(100)
    two.warm(prompt)
    known = two.hint(96)
    scored = GREEDY.__class__(temperature=0, max_tokens=8, seed=1, prompt_logprobs=0)
    for number, (hint, sampling) in enumerate(
        [
            (PrefixHint("nobody", 1, 96), GREEDY),
            (PrefixHint(known.engine_id, known.incarnation + 1, 96), GREEDY),
            (PrefixHint(known.engine_id, known.incarnation, 15), GREEDY),
            (known, scored),
        ]
    ):
        asked = [*prompt, number]
        key = two.ask(two.asker, asked, prefix=hint, sampling=sampling)
        two.finish(two.asker, key)
        two.asker.engine.homes[0].blocks.allocate(127)  # forget it
        two.asker.engine.homes[0].blocks.release(range(1, 128))
        assert not [event for event in of(two.asker, key) if isinstance(event, Failed)]
    assert two.computed == 4 * 101 and total(two.asker, "seconds_count") == 0


def test_the_switch_turns_both_sides_off(tiny_llama: Path) -> None:
    config = LocalTransferConfig(fetch_prefixes=False)
    worker = Worker(tiny_llama, f"off{next(_names)}", "both", config, device="cpu")
    assert worker.loop.fetch is None and worker.engine.homes[0].blocks.written is None
    [hello] = [event for event in worker.events if hasattr(event, "fetches_prefixes")]
    assert not hello.fetches_prefixes
    worker.close()


def test_a_prefill_leg_fetches_too(two: Two, llm: LLM) -> None:
    prompt = prompt_of(100)
    two.warm(prompt)
    key = two.ask(two.asker, prompt, phase="prefill", prefix=two.hint(96))
    two.until(lambda: deltas(two.asker, key))
    assert tokens_of(two.asker, key)[0] == expected(llm, prompt, GREEDY)[0][:1]
    assert two.computed == 4
    cancel(two.asker, key)
    two.at_rest()


@pytest.mark.parametrize(("theirs", "ours"), [(32, 16), (16, 32), (16, 64)])
def test_other_block_sizes(tiny_llama: Path, llm: LLM, theirs: int, ours: int) -> None:
    """Whole blocks of both sizes come."""
    two = Two(
        tiny_llama,
        {"block_size": theirs, "num_kv_blocks": 2048 // theirs},
        {"block_size": ours, "num_kv_blocks": 2048 // ours},
    )
    prompt = prompt_of(150)
    two.warm(prompt)
    key = two.ask(two.asker, prompt, prefix=two.hint(150))
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert two.computed == 150 - 128
    two.at_rest()
    two.close()


def test_only_what_is_missing_comes(two: Two, llm: LLM) -> None:
    prompt = prompt_of(160)
    two.warm(prompt)
    two.finish(two.asker, two.ask(two.asker, prompt[:70]))
    before = two.computed
    key = two.ask(two.asker, prompt, prefix=two.hint(144))
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    [news] = arrived(two.asker, key)
    assert news.num_bytes == 5 * two.asker.engine.layout.block_bytes
    assert two.computed - before == 16 and news.cached_tokens == 144


# --- waiting together ---


def asked(two: Two) -> list[RequestKey]:
    """Three requests of one prefix; the holder does not answer yet."""
    prompt = prompt_of(100)
    two.warm(prompt)
    keys = []
    for number in range(3):
        hint = two.hint(96)
        keys.append(two.ask(two.asker, [*prompt, 7, number], prefix=hint))
    return keys


def test_requests_of_one_prefix_wait_for_one_fetch(two: Two, llm: LLM) -> None:
    keys = asked(two)
    fetch = two.asker.fetch
    assert fetch.num_waiting == 3 and fetch.queued_work(0.0) == 3 * 6
    assert fetch.queued_work(0.01) == pytest.approx(3 * (6 + 0.01 * 6 * 99)), "after 96 tokens"
    snapshot = two.asker.loop.snapshot()
    assert (snapshot.num_waiting, snapshot.queue_tokens) == (3, 18)
    for number, key in enumerate(keys):
        want = expected(llm, [*prompt_of(100), 7, number], GREEDY)
        assert two.finish(two.asker, key) == want
    assert total(two.asker, "seconds_count") == 1 and two.computed == 3 * 6
    two.at_rest()


def test_a_request_without_a_hint_waits_for_a_prefix_that_is_on_its_way(two: Two, llm: LLM) -> None:
    """Its router has sent that prefix here a moment ago, and so takes it for cached here. Who
    shares less of it, or asks for scores of the prompt, does not wait."""
    prompt = prompt_of(100)
    first, *_ = asked(two)
    fetch = two.asker.fetch
    later = two.ask(two.asker, [*prompt, 8])
    assert fetch.num_waiting == 4
    other = two.ask(two.asker, [*prompt[:64], 9, *prompt[:8]])
    scored = two.ask(
        two.asker,
        [*prompt, 10],
        sampling=SamplingParams(temperature=0, max_tokens=8, seed=1, prompt_logprobs=0),
    )
    assert fetch.num_waiting == 4 and fetch.keys() >= {first, later}
    assert two.finish(two.asker, later) == expected(llm, [*prompt, 8], GREEDY)
    for key in (first, other, scored):
        two.finish(two.asker, key)
    assert two.computed <= 4 * 6 + 73 + 101 and total(two.asker, "seconds_count") == 1
    two.at_rest()


def test_who_leaves_leaves_the_others_their_fetch(two: Two, llm: LLM) -> None:
    keys = asked(two)
    two.faults.frozen = True
    two.until(lambda: two.asker.decode.pulls.under_way)
    assert two.asker.fetch.keys() == set(keys)
    for key in keys[:2]:
        cancel(two.asker, key)
    assert two.asker.fetch.keys() == {keys[2]}
    two.faults.frozen = False
    assert two.finish(two.asker, keys[2]) == expected(llm, [*prompt_of(100), 7, 2], GREEDY)
    assert two.computed == 6 and not deltas(two.asker, keys[0])
    two.at_rest()


@pytest.mark.parametrize("lost", [False, True])
def test_what_nobody_waits_for_ends(two: Two, lost: bool) -> None:
    keys = asked(two)
    two.faults.frozen = True
    two.until(lambda: two.asker.decode.pulls.under_way)
    if lost:
        two.asker.command(RouterLost(router_id=ROUTER, session=SESSION))
    else:
        for key in keys:
            cancel(two.asker, key)
    assert not two.asker.fetch.keys() and outcome(two.asker, "left") == 1
    two.until(lambda: two.asker.engine.homes[0].blocks.num_quarantined)
    two.asker.loop.check_integrity()
    two.faults.frozen = False
    two.at_rest()
    assert not two.asker.decode.pulls.under_way


def test_choices_may_leave_one_by_one(two: Two, llm: LLM) -> None:
    prompt = prompt_of(100)
    two.warm(prompt)
    sampling = SamplingParams(n=3, temperature=0.8, max_tokens=8, seed=3, ignore_eos=True)
    key = two.ask(two.asker, prompt, prefix=two.hint(96), sampling=sampling)
    cancel(two.asker, key, (1,))
    assert two.asker.fetch.keys() == {key}
    want = expected(llm, prompt, sampling)
    assert two.finish(two.asker, key, 2) == {choice: want[choice] for choice in (0, 2)}


# --- what goes wrong ---


def test_a_frozen_holder_costs_the_deadline(two: Two, llm: LLM) -> None:
    prompt = prompt_of(100)
    two.warm(prompt)
    two.asker.fetch.least_patience_s = 0.05
    two.asker.fetch._speed = lambda: 1e9  # computing would take no time
    two.faults.frozen = True
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert outcome(two.asker, "deadline") == 1 and two.computed == 100
    assert two.asker.engine.homes[0].blocks.num_quarantined == 6
    two.asker.loop.check_integrity()
    two.faults.frozen = False
    two.at_rest()


def test_a_late_fetch_is_waited_for_while_computing_would_take_far_longer(
    two: Two, llm: LLM
) -> None:
    """Six times the predicted time has passed; computing would take 96 / 16 s."""
    prompt = prompt_of(100)
    two.warm(prompt)
    two.asker.fetch.least_patience_s = 0.05
    two.asker.fetch._speed = lambda: 16.0
    two.faults.frozen = True
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    two.until(lambda: reading(two))
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 0.3, doing=two.turn)
    assert two.asker.fetch.num_waiting == 1
    two.faults.frozen = False
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert outcome(two.asker, "done") == 1 and two.computed == 4
    two.at_rest()


def test_a_read_that_ends_at_once_after_it_was_given_up_leaves_no_quarantine(two: Two) -> None:
    """The failure and the settling come in one turn."""
    prompt = prompt_of(100)
    two.warm(prompt)
    two.asker.fetch.least_patience_s = 0.05
    two.asker.fetch._speed = lambda: 1e9
    two.faults.frozen = True
    two.ask(two.asker, prompt, prefix=two.hint(96))
    two.until(lambda: reading(two))
    [rank] = two.asker.rank_receivers
    until(lambda: any(isinstance(event, PullFailed) for event in rank._events))
    two.faults.frozen = False
    until(lambda: any(isinstance(event, PullSettled) for event in rank._events))
    two.at_rest()


def test_a_holder_that_does_not_answer_costs_the_deadline(two: Two, llm: LLM) -> None:
    prompt = prompt_of(100)
    two.warm(prompt)
    two.asker.fetch.least_patience_s = 0.05
    two.holder.sender.mailbox.send = lambda *_: None  # type: ignore[method-assign]
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    assert two.asker.loop.turn() <= 0.05, "it sleeps no longer than the question may take"
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert outcome(two.asker, "deadline") == 1
    two.at_rest()


def test_letters_twice_old_and_of_others_change_nothing(two: Two, llm: LLM) -> None:
    """Answers come twice, and again for later questions; a third party answers too."""
    mailbox = two.holder.sender.mailbox
    send = type(mailbox).send.__get__(mailbox)
    past: list[Any] = []

    def again(to: Any, notice: Any) -> None:
        past.append((to, notice))
        for letter in (*past, past[-1]):
            send(*letter)

    mailbox.send = again  # type: ignore[method-assign]
    for seed in range(3):
        prompt = prompt_of(100, seed)
        two.warm(prompt)
        before = two.computed
        key = two.ask(two.asker, prompt, prefix=two.hint(96))
        assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
        assert two.computed - before == 4
    two.at_rest()


def test_a_dead_holder_costs_a_recompute(two: Two, llm: LLM) -> None:
    prompt = prompt_of(100)
    two.warm(prompt)
    two.faults.frozen = True
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    two.until(lambda: two.asker.decode.pulls.under_way)
    two.faults.dead = True
    two.faults.frozen = False
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    two.until(lambda: not owned(two.asker))
    two.asker.loop.check_integrity()


def reading(two: Two) -> list[Any]:
    """Pieces on their way to the asker, as its link knows them."""
    [rank] = two.asker.rank_receivers
    return [piece for link in rank.links for pull in link.pulls.under_way for piece in pull.pieces]


def test_blocks_that_are_reused_meanwhile_are_not_believed(two: Two, llm: LLM) -> None:
    """Evicted between the data and the generations: stale, whatever was read."""
    prompt = prompt_of(100)
    two.warm(prompt)
    two.faults.frozen = True
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    two.until(lambda: reading(two))
    blocks = two.holder.engine.blocks
    taken = blocks.allocate(blocks.num_free)
    blocks.release(taken)
    two.faults.frozen = False
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert outcome(two.asker, "stale-generation") == 1 and two.computed == 100
    two.at_rest()


def test_the_same_prefix_in_the_same_blocks_again(two: Two, llm: LLM) -> None:
    """ABA: evicted and computed again between ticket and read: another generation."""
    prompt = prompt_of(100)
    two.warm(prompt)
    digests = two.holder.engine.homes[0].blocks.cached_digests()
    before = two.holder.engine.homes.find_written(digests[:1])
    two.faults.frozen = True
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    two.until(lambda: reading(two))
    blocks = two.holder.engine.blocks
    blocks.release(blocks.allocate(blocks.num_free))
    two.warm(prompt)
    assert two.holder.engine.homes.find_written(digests[:1]) != before
    two.faults.frozen = False
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert outcome(two.asker, "stale-generation") == 1


def test_what_was_verified_before_a_block_was_reused_is_kept(
    two: Two, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdserve.kvtransfer.p2p.link import link_pulls

    monkeypatch.setattr(link_pulls, "PIECE_BLOCKS", 2)
    monkeypatch.setattr(link_pulls, "PIECES_AT_ONCE", 1)
    prompt = prompt_of(200)
    two.warm(prompt)
    blocks = two.holder.engine.blocks
    hashes = _digests(two.holder, prompt)
    blocks.generations[blocks.match(hashes)[7]] += 1  # in the fourth piece
    key = two.ask(two.asker, prompt, prefix=two.hint(192))
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert arrived(two.asker, key)[0].cached_tokens == 96
    assert two.computed == 200 - 96 and outcome(two.asker, "stale-generation") == 1
    blocks.generations[blocks.match(hashes)[7]] -= 1
    two.at_rest()


def _digests(worker: Worker, prompt: list[int]) -> list[bytes]:
    from pdserve.protocol.block_digests import NOBODY

    digests: list[bytes] = []
    worker.engine.hasher.extend(digests, prompt, NOBODY)
    return digests


def test_a_fetch_gives_way_to_who_lacks_blocks(tiny_llama: Path, llm: LLM) -> None:
    two = Two(tiny_llama, asker={"num_kv_blocks": 21}, max_reserved_fraction=1.0)
    prompt = prompt_of(150)
    two.warm(prompt)
    two.faults.frozen = True
    first = two.ask(two.asker, prompt, prefix=two.hint(144))
    two.until(lambda: reading(two))
    other = two.ask(two.asker, prompt_of(200, 5))
    two.until(lambda: outcome(two.asker, "gave-way"))
    two.faults.frozen = False
    for key, asked_for in ((first, prompt), (other, prompt_of(200, 5))):
        assert two.finish(two.asker, key) == expected(llm, asked_for, GREEDY)
    two.at_rest()
    two.close()


def test_no_blocks_no_fetch(tiny_llama: Path, llm: LLM) -> None:
    two = Two(tiny_llama, max_reserved_fraction=0.05)
    prompt = prompt_of(150)
    two.warm(prompt)
    key = two.ask(two.asker, prompt, prefix=two.hint(144))
    assert two.finish(two.asker, key) == expected(llm, prompt, GREEDY)
    assert outcome(two.asker, "no-blocks") == 1
    two.close()


def test_the_pool_is_not_asked_behind_a_fetch(tiny_llama: Path, llm: LLM) -> None:
    """Without a hint the pool is; with one that fails, the engine computes."""
    pool = PoolConfig(mode="connect", address="127.0.0.1:1", chunk_tokens=32)
    server = LocalPoolServer()
    two = Two(tiny_llama, {"shared": server}, {"shared": server}, pool=pool)
    prompt = prompt_of(100)
    two.warm(prompt)
    two.until(lambda: len(server.chunks) >= 3)
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    two.finish(two.asker, key)
    assert [news.source for news in arrived(two.asker, key)] == ["prefix"]
    other = prompt_of(100, 1)
    two.warm(other)
    key = two.ask(two.asker, other)
    two.finish(two.asker, key)
    assert [news.source for news in arrived(two.asker, key)] == ["pool"]
    two.close()


def test_what_was_lent_is_evicted_last(two: Two) -> None:
    first, second = prompt_of(64), prompt_of(64, 1)
    two.warm(first)
    two.warm(second)
    two.finish(two.asker, two.ask(two.asker, [*first, 1], prefix=two.hint(64)))
    two.turn()
    blocks = two.holder.engine.blocks
    blocks.allocate(blocks.num_free - 4)
    assert len(blocks.match(_digests(two.holder, first))) == 4
    assert not blocks.match(_digests(two.holder, second))
    blocks.release([block for block in range(1, 128) if blocks.num_owners(block)])


def test_rows_of_a_step_in_flight_are_not_lent(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cached from the step's plan on, and lent from its end on."""
    prompt = prompt_of(64)
    engine = two.holder.engine
    digests = _digests(two.holder, prompt)
    seen = []
    forward = engine.executor.forward

    def looked(work: Any) -> Any:
        handle = forward(work)
        cached = len(engine.blocks.match(digests))
        seen.append((cached, len(engine.homes.find_written(digests)[1])))
        return handle

    monkeypatch.setattr(engine.executor, "forward", looked)
    two.warm(prompt)
    assert seen[0] == (4, 0) and seen[1] == (4, 4)


def test_idle_links_are_closed_the_least_used_first(
    two: Two, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_PREFIX_LINKS", 1)
    prompt = prompt_of(100)
    two.warm(prompt)
    config = LocalTransferConfig(pull_deadline_s=300.0)
    other = Worker(tiny_llama, f"O{next(_names)}", "both", config, device="cpu", num_kv_blocks=32)
    kept = Worker(tiny_llama, f"K{next(_names)}", "both", config, device="cpu", num_kv_blocks=32)
    two.asker.command(ConnectPeer(meta=kept.sender.meta()))  # to hand prompts over
    two.connect(two.asker, other)
    links = two.asker.loop._peers

    def is_linked(worker: Worker) -> bool:
        meta = worker.sender.meta()
        return links.link(meta.engine_id, meta.incarnation) is not None

    two.until(lambda: is_linked(kept) and not is_linked(two.holder))
    assert is_linked(other)
    two.asker.command(ConnectPeer(meta=two.holder.sender.meta(), for_prefixes=True))
    two.until(lambda: is_linked(two.holder) and not is_linked(other))
    key = two.ask(two.asker, prompt, prefix=two.hint(96))
    two.finish(two.asker, key)
    assert two.computed == 4
    # once it is for hand-overs it stays
    two.asker.command(ConnectPeer(meta=two.holder.sender.meta()))
    two.connect(two.asker, other)
    two.turn()
    assert is_linked(two.holder) and is_linked(other) and is_linked(kept)
    other.close()
    kept.close()
