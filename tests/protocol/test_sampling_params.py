"""SamplingParams refuses by name whatever it cannot do, and every message survives its encoded
form."""

import math
from typing import Any, cast

import msgspec
import pytest

from pdserve.protocol import logit_rules
from pdserve.protocol.block_digests import ContentPart
from pdserve.protocol.codec import (
    PROTOCOL_VERSION,
    decode_batch,
    decode_command,
    decode_routed,
    encode,
)
from pdserve.protocol.commands import (
    AskExpertLoad,
    Cancel,
    Command,
    ConnectPeer,
    DisconnectPeer,
    Resync,
    RouterLost,
    Start,
    Stop,
    Submit,
    Subscribe,
)
from pdserve.protocol.events import (
    Arrived,
    CacheChange,
    CacheState,
    Delta,
    Embedded,
    EventBatch,
    ExpertCounts,
    Failed,
    Handoff,
    Hello,
    Load,
    PaceState,
    PackedScores,
    PeerStatus,
    PromptScored,
    Snapshot,
    TokenLogprob,
)
from pdserve.protocol.handoff import GroupMemory, KVCacheMeta, RankMemory, Ticket
from pdserve.protocol.metric_families import MetricFamily, Sample
from pdserve.protocol.request_key import RequestKey, check_request_id
from pdserve.protocol.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)

INTEGERS = ["n", "top_k", "seed", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs"]
NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]
BOOLEANS = ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"]
OPTIONAL = {"seed", "max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "logit_rules"}
NOT_NUMBERS = ["1", True, [1], {}, math.nan, math.inf, -math.inf]

BAD: list[tuple[str, Any]] = [
    *((name, value) for name in INTEGERS for value in [*NOT_NUMBERS, 1.0, 1.5]),
    *((name, value) for name in NUMBERS for value in NOT_NUMBERS),
    *((name, value) for name in BOOLEANS for value in [0, 1, "false", None]),
    *((name, None) for name in [*INTEGERS, *NUMBERS] if name not in OPTIONAL),
    *[
        ("n", 0),
        ("n", -1),
        ("n", 1 << 20),
        ("top_k", -2),
        ("seed", MAX_SEED + 1),
        ("seed", -(1 << 63) - 1),
    ],
    *[
        ("min_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
    ],
    *[
        ("temperature", -0.1),
        ("temperature", 101),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
    ],
    *[("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", 101)],
    *[
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 3),
        ("frequency_penalty", -3),
    ],
    *[
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 5),
        ("stop", True),
        ("stop", b"x"),
        ("stop", {"a": 1}),
    ],
    ("stop", {"a": 1}),
    *[("stop_token_ids", value) for value in (3, [-1], [True], ["5"], [1.0], "5", {"5": 1})],
    *[
        ("logit_bias", value)
        for value in ([1], "x", {"5": 1.0}, {-1: 1.0}, {5: "1"}, {5: 101}, {5: math.nan})
    ],
    *[("logit_bias", {True: 1.0}), ("logit_bias", {5: True})],
    *[("logit_rules", value) for value in ([1], "x", 3)],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r}" for name, value in BAD])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "top_k": -1, "seed": -(1 << 63), "min_tokens": 0, "max_tokens": 1, "logprobs": 0},
        {
            "n": 1 << 16,
            "top_k": 1 << 31,
            "seed": MAX_SEED,
            "max_tokens": None,
            "min_tokens": 5,
            "prompt_logprobs": 0,
        },
        {"temperature": 0, "top_p": 1e-9, "min_p": 0, "repetition_penalty": 1e-9},
        {"temperature": 100, "top_p": 1, "min_p": 1, "repetition_penalty": 100},
        {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {0: -100, 5: 100.0}},
        {"stop": None, "stop_token_ids": None, "seed": None, "logprobs": None, "logit_bias": None},
    ],
)
def test_the_borders_are_allowed(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name, value in fields.items():
        assert getattr(params, name) == (() if name in ("stop", "stop_token_ids") else value)


def test_every_field_is_tested_here() -> None:
    assert {name for name, _ in BAD} == set(SamplingParams.__struct_fields__)


def test_min_tokens_within_max_tokens() -> None:
    with pytest.raises(ValueError, match=r"min_tokens \(17\) must not exceed max_tokens \(16\)"):
        SamplingParams(min_tokens=17)
    assert SamplingParams(min_tokens=16).min_tokens == 16


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_greedy() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_vocabulary() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[9]).check_vocab(10)
    with pytest.raises(
        ValueError, match="logit_bias holds token id 10, but the vocabulary ends at 9"
    ):
        SamplingParams(logit_bias={10: 1.0}).check_vocab(10)
    with pytest.raises(ValueError, match="stop_token_ids holds token id 10"):
        SamplingParams(stop_token_ids=[10]).check_vocab(10)


def test_params_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


EVERYTHING = SamplingParams(
    n=3,
    temperature=0.5,
    top_p=0.9,
    top_k=7,
    min_p=0.1,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias={3: 1.5},
    seed=MAX_SEED,
    stop="x",
    stop_token_ids=[4],
    include_stop_str_in_output=True,
    ignore_eos=True,
    min_tokens=2,
    max_tokens=9,
    logprobs=1,
    prompt_logprobs=0,
    skip_special_tokens=False,
)


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING], ids=["defaults", "everything"])
def test_params_survive_their_encoded_form(params: SamplingParams) -> None:
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(params), type=SamplingParams) == params


def test_encoded_defaults_are_left_out() -> None:
    assert msgspec.json.encode(SamplingParams()) == b"{}"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b'{"temprature": 1.0}', "temprature"),
        (b'{"temperature": -1}', "temperature must"),
        (b'{"temperature": "1"}', "temperature"),
        (b'{"n": true}', "n`"),
        (b'{"max_tokens": 1.5}', "max_tokens"),
        (b'{"stop": [""]}', "stop must"),
        (b'{"logit_bias": {"3": 1000}}', "logit_bias must"),
    ],
)
def test_what_comes_from_outside_is_checked_as_well(data: bytes, named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.json.decode(data, type=SamplingParams)


KEY = RequestKey("router-1", 1 << 60, "request-1", 3)
TICKET = Ticket(
    engine_id="p",
    incarnation=1 << 62,
    key=KEY,
    content=b"\0" * 16,
    block_size=16,
    block_ids=(5, 9),
    generations=(1, 1 << 40),
    num_tokens=20,
    lease_s=30.0,
    written_at=1.75e9,
    home=2,
)
GROUP = GroupMemory((0, 1, 2), (0, 1), 0, 1 << 18)
META = KVCacheMeta(
    engine_id="p",
    incarnation=7,
    connector="nixl",
    model="ab",
    rows="cd",
    block_size=64,
    num_blocks=9,
    generation_address=1 << 47,
    mailbox="tcp://10.0.0.1:5",
    ranks=(
        RankMemory("p-0", b"\xff\0", 1 << 47, "VRAM", 3, 1 << 21, (GROUP,)),
        RankMemory("p-1", b"", 1 << 47, "VRAM", 0, 1 << 21, (GROUP,), home=1),
    ),
)
COMMANDS: list[Command] = [
    Submit(
        key=KEY,
        phase="decode",
        prompt_token_ids=(1, 2),
        sampling=EVERYTHING,
        starts=(Start(0, (5, 6), 12.5), Start(2)),
        ticket=TICKET,
        priority=-1,
        cache_salt="s",
        kind="embed",
        adapter="a",
        parts=(ContentPart(3, 4, b"\xff" * 16),),
        waited_ms=2.25,
    ),
    Submit(
        key=KEY, phase="full", prompt_token_ids=(1,), sampling=SamplingParams(), starts=(Start(0),)
    ),
    Cancel(key=KEY),
    Cancel(key=KEY, choices=(0, 2)),
    ConnectPeer(meta=META),
    DisconnectPeer(engine_id="p", incarnation=7),
    Subscribe(router_id="r", session=1),
    Resync(router_id="r", session=1),
    RouterLost(router_id="r", session=1),
    AskExpertLoad(router_id="r", session=1),
    Stop(),
]
PEER = PeerStatus(
    engine_id="p",
    incarnation=7,
    connected=True,
    transport="cuda_ipc",
    bytes_per_s=1e11,
    detail="ok",
)
LOGPROB = TokenLogprob(3, -0.5, 2, ((9, -0.1), (3, -0.5)))
PACE = PaceState(tpot_ms=10.0, base_step_ms=6.5, row_ms=0.01, prompt_tokens_per_s=9000.0)
EVENTS = (
    Hello(
        protocol=PROTOCOL_VERSION,
        role="both",
        model_fingerprint="f",
        rows_digest="f",
        vocab_size=9,
        max_model_len=8,
        max_request_tokens=7,
        block_size=16,
        kv_cache=META,
        peers=(PEER,),
    ),
    Delta("request-1", 3, 1, 0, (5,)),
    Embedded(request_id="request-1", attempt=3, cached_tokens=16, values=b"\0\0\x80?"),
    Delta("request-1", 3, 1, 4, (5, 6), "stop", 6, (LOGPROB, LOGPROB)),
    PromptScored(
        request_id="r", attempt=1, cached_tokens=16, start=4, logprobs=(None, LOGPROB), final=False
    ),
    Handoff(request_id="r", attempt=1, ticket=TICKET),
    Arrived(
        request_id="r", attempt=2, source="p2p", num_bytes=1 << 33, num_descriptors=3, seconds=0.5
    ),
    Failed(request_id="r", attempt=2, kind="internal", message="full"),
    PEER,
    Snapshot(
        role="decode",
        num_waiting=1,
        num_running=2,
        queue_tokens=3,
        free_blocks=4,
        total_blocks=5,
        pinned_blocks=6,
        quarantined_blocks=7,
        metrics=(MetricFamily("m", "gauge", "help", (Sample("m", {"a": "b"}, 1.5),)),),
        cache_number=8,
        prefill_tokens_per_s=9.5,
        pace=PACE,
    ),
    Load(queue_tokens=2048, num_running=3, num_waiting=1, pace=PACE),
    Load(queue_tokens=0, num_running=0, num_waiting=0, pace=None),
    CacheChange(number=9, stored=b"12345678", dropped=b""),
    CacheState(number=9, part=1, final=True, stored=b"1234567812345678"),
    ExpertCounts(layers={1: (1 << 40, 0, 3), 47: (0, 0, 1)}),
    ExpertCounts(layers={}),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_commands_survive_their_encoded_form(command: Any) -> None:
    decoded = decode_command(encode(command))
    assert decoded == command and type(decoded) is type(command)


def test_events_survive_their_encoded_form() -> None:
    batch = EventBatch(worker_id="w", incarnation=1 << 62, events=EVENTS)
    decoded = decode_batch(encode(batch))
    assert decoded == batch
    assert [type(event) for event in decoded.events] == [type(event) for event in EVENTS]


@pytest.mark.parametrize("count", [None, 1, 15, 16, 70_000])
def test_a_router_leaves_log_probabilities_as_they_came(count: int | None) -> None:
    entries = None if count is None else (None, *(LOGPROB,) * (count - 1))
    scored = PromptScored(
        request_id="r", attempt=1, cached_tokens=16, start=4, logprobs=entries, final=False
    )
    batch = EventBatch(worker_id="w", incarnation=1, events=(*EVENTS, scored))
    routed = decode_routed(encode(batch)).events
    others = [event for event in routed if not isinstance(event, PackedScores)]
    assert others == [event for event in batch.events if not isinstance(event, PromptScored)]
    read = routed[-1]
    assert isinstance(read, PackedScores) and (
        read.request_id,
        read.attempt,
        read.cached_tokens,
    ) == ("r", 1, 16)
    assert (read.start, read.final, read.num_tokens) == (4, False, count or 0)
    assert read.num_bytes == (len(msgspec.msgpack.encode(entries)) if entries else 0)
    assert entries is None or read.entries() == entries


@pytest.mark.parametrize("decode", [decode_command, decode_batch, decode_routed])
@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"hello", b"\x80", b"\x81\xa4type\xa4none", b"\x93\x01\x02\x03"]
)
def test_malformed_bytes_raise(decode: Any, data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_cut_messages_raise(command: Any) -> None:
    data = encode(command)
    for end in range(0, len(data), 7):
        with pytest.raises(msgspec.DecodeError):
            decode_command(data[:end])
    with pytest.raises(msgspec.DecodeError):
        decode_command(data + b"\0")


def test_a_message_of_the_wrong_kind_raises() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_batch(encode(COMMANDS[0]))
    with pytest.raises(msgspec.DecodeError):
        decode_command(encode(EventBatch(worker_id="w", incarnation=1, events=EVENTS)))


def test_bad_params_inside_a_command_raise() -> None:
    data = encode(COMMANDS[0]).replace(b"\xa5top_k\x07", b"\xa5top_k\xf0")  # -16
    assert data != encode(COMMANDS[0])
    with pytest.raises(msgspec.DecodeError, match="top_k must"):
        decode_command(data)


@pytest.mark.parametrize("name", ["a", "x" * 256, "cmpl-1234", "!~"])
def test_request_ids(name: str) -> None:
    assert check_request_id(name) == name


@pytest.mark.parametrize("name", ["", "x" * 257, "a b", "a\n", "é", "\x7f", "a\t"])
def test_bad_request_ids(name: str) -> None:
    with pytest.raises(ValueError, match="request_id must"):
        check_request_id(name)


SIZES: list[tuple[str, Any, Any]] = [
    ("stop", [f"{i:02}" for i in range(MAX_STOPS)], [f"{i:02}" for i in range(MAX_STOPS + 1)]),
    ("stop", ["x" * MAX_STOP_CHARS], ["x" * (MAX_STOP_CHARS + 1)]),
    (
        "stop",
        [c * MAX_STOP_CHARS for c in "abcdefgh"],
        [c * MAX_STOP_CHARS for c in "abcdefgh"] + ["i"],
    ),
    ("stop_token_ids", list(range(MAX_STOP_TOKEN_IDS)), list(range(MAX_STOP_TOKEN_IDS + 1))),
    (
        "logit_bias",
        dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0),
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
    ),
]


@pytest.mark.parametrize(("name", "most", "more"), SIZES)
def test_lists_have_a_largest_size(name: str, most: Any, more: Any) -> None:
    assert len(getattr(SamplingParams(**{name: most}), name)) == len(most)
    with pytest.raises(ValueError, match=f"^{name} must hold .*at most"):
        SamplingParams(**{name: more})


class Unread(list[Any]):
    """A list that is too long to be walked through."""

    def __iter__(self) -> Any:
        raise AssertionError("it was walked through")


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_list_that_is_too_long_is_not_walked_through(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must hold at most"):
        SamplingParams(**{name: cast(Any, Unread([7] * 5000))})


def test_each_id_and_each_string_counts_once() -> None:
    params = SamplingParams(stop=["b", "a", "b"], stop_token_ids=[5, 3, 5])
    assert (params.stop, params.stop_token_ids) == (("b", "a"), (5, 3))


def test_a_drawn_seed_changes_nothing_else() -> None:
    drawn = EVERYTHING.with_seed(5)
    assert drawn == msgspec.structs.replace(EVERYTHING, seed=5) and EVERYTHING.seed == MAX_SEED


def test_logit_rules_are_checked_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="there is no rule 'even'; known: allowed_token_ids"):
        SamplingParams(logit_rules={"even": True})

    def check(settings: Any, vocab_size: int | None) -> None:
        if settings is not True:
            raise ValueError(f"must be true, not {settings!r}")
        if vocab_size is not None and vocab_size % 2:
            raise ValueError("needs an even vocabulary")

    monkeypatch.setitem(logit_rules.RULES, "even", logit_rules.RuleKind("even:Even", check))
    params = SamplingParams(logit_rules={"even": True})
    assert decode_command(
        encode(Submit(key=KEY, phase="full", prompt_token_ids=(1,), sampling=params, starts=()))
    ).sampling.logit_rules == {"even": True}  # type: ignore[union-attr]
    params.check_vocab(10)
    with pytest.raises(ValueError, match=r"^logit_rules: even needs an even vocabulary"):
        params.check_vocab(11)
    with pytest.raises(ValueError, match=r"^logit_rules: even must be true, not 3"):
        SamplingParams(logit_rules={"even": 3})
    with pytest.raises(ValueError, match=r"there is no rule 'odd'; known: .*even"):
        SamplingParams(logit_rules={"odd": 3})
