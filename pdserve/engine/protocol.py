"""The messages between processes, as msgspec types: router <-> worker, and what a hand-off ticket holds.

Torch-free: the router imports this file and nothing else of the engine. Knows no sockets: who carries the bytes is
`worker.engine_client` and `cluster`. One rule rules them all: the router's record is the only authority on a request's
tokens, so every message about a request carries its `RequestKey`, and messages of an older attempt are dropped.

    router --Command--> worker        Submit, Prepare, Cancel, ConnectPeer, DisconnectPeer, Subscribe, Resync,
                                      RouterLost
    worker --EventBatch--> router     Hello, Delta, PromptScored, Handoff, Arrived, Failed, PeerStatus, LegsWaiting,
                                      Snapshot, CacheChange, CacheState, PoolChange
"""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Phase = Literal["full", "prefill", "decode"]
FinishReason = Literal["stop", "length"]

MAX_SEED = 2**63 - 1

# One small body must not cost everybody else time. vLLM's table of biases holds as many (MAX_NUM_LOGIT_BIAS_TOKENS).
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_CHARS_IN_ALL = 8192  # the tables of `text.stop` take about a microsecond each


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the tokens of a request are drawn; the names and defaults are vLLM's. Every field is validated by name.

    n: choices per prompt. temperature: 0 (below 1e-5) is greedy. top_p, top_k (0 or -1: off), min_p: filters, applied
    in the order top_k, top_p, min_p after the temperature. repetition_penalty: over prompt and output;
    presence_penalty, frequency_penalty: over the output. logit_bias: added to the logits of at most MAX_LOGIT_BIAS
    token ids. seed: None lets the receiver draw one. stop: at most MAX_STOPS strings that end the text, of at most
    MAX_STOP_CHARS characters each and MAX_STOP_CHARS_IN_ALL together; stop_token_ids (at most MAX_STOP_TOKEN_IDS) end
    the tokens. ignore_eos: go on past end-of-sequence. min_tokens: no stop token before. max_tokens: None means as many
    as fit the engine that generates them. logprobs,
    prompt_logprobs: how many alternatives to report a position, besides the chosen one (0: the chosen one only; None:
    nothing), of the distribution before any of the above.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_integers(self)
        _check_numbers(self)
        _check_booleans(self)
        if self.stop != ():
            msgspec.structs.force_setattr(self, "stop", _checked_stops(self.stop))
        if self.stop_token_ids != ():
            msgspec.structs.force_setattr(self, "stop_token_ids", _checked_stop_ids(self.stop_token_ids))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @classmethod
    def from_defaults(cls, defaults: Mapping[str, Any]) -> "SamplingParams":
        """Those of a request that says nothing, for a model with these defaults (`models.generation_defaults`).
        ValueError names the one that cannot be.
        """
        try:
            return cls(**defaults)
        except ValueError as error:
            raise ValueError(
                f"generation_config.json: {error}; mend the file, or set model.generation_config to 'none'"
            ) from error

    def with_seed(self, seed: int) -> "SamplingParams":
        """A copy with this seed that is not checked again: a call of thousands of prompts makes one for each."""
        drawn = copy.copy(self)
        msgspec.structs.force_setattr(drawn, "seed", seed)
        return drawn

    def check_vocab(self, vocab_size: int) -> None:
        """ValueError when a token id lies outside the vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias or ()), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(f"{name} holds token id {token}, but the vocabulary ends at {vocab_size - 1}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


# name -> (lowest, highest, None allowed)
INTEGERS: dict[str, tuple[int, int, bool]] = {
    "n": (1, 1 << 16, False),
    "top_k": (-1, 1 << 31, False),
    "seed": (-(1 << 63), MAX_SEED, True),
    "min_tokens": (0, 1 << 31, False),
    "max_tokens": (1, 1 << 31, True),
    "logprobs": (0, 1 << 20, True),
    "prompt_logprobs": (0, 1 << 20, True),
}

# name -> (lowest, highest, lowest itself allowed)
NUMBERS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 100.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}


def _check_integers(params: SamplingParams) -> None:
    for name, (low, high, optional) in INTEGERS.items():
        value = getattr(params, name)
        if value is None and optional:
            continue
        if not _is_int(value) or not low <= value <= high:
            raise ValueError(f"{name} must be an integer in [{low}, {high}], not {value!r}")


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, closed) in NUMBERS.items():
        value = getattr(params, name)
        if not _is_number(value) or value > high or value < low or (value == low and not closed):
            raise ValueError(f"{name} must be a number in {'[' if closed else '('}{low:g}, {high:g}], not {value!r}")


def _check_booleans(params: SamplingParams) -> None:
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise ValueError(f"{name} must be true or false, not {getattr(params, name)!r}")


def _checked_stops(given: Any) -> tuple[str, ...]:
    """Each once. How many there are is looked at first: a list of millions must not be walked through."""
    stops = (given,) if isinstance(given, str) else () if given is None else given
    if not _is_list(stops):
        raise ValueError(f"stop must be a non-empty string or a list of non-empty strings, not {given!r}")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop must hold at most {MAX_STOPS} strings, not {len(stops)}: send fewer")
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"stop must be a non-empty string or a list of non-empty strings, not {given!r}")
    lengths = [len(stop) for stop in stops]
    if max(lengths, default=0) > MAX_STOP_CHARS or sum(lengths) > MAX_STOP_CHARS_IN_ALL:
        raise ValueError(
            f"stop must hold strings of at most {MAX_STOP_CHARS} characters, {MAX_STOP_CHARS_IN_ALL} in all, not "
            f"{max(lengths)} and {sum(lengths)}: send fewer or shorter ones"
        )
    return tuple(dict.fromkeys(stops))


def _checked_stop_ids(given: Any) -> tuple[int, ...]:
    """Each once, as `_checked_stops`."""
    ids = () if given is None else given
    if not _is_list(ids):
        raise ValueError(f"stop_token_ids must be a list of token ids >= 0, not {given!r}")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"stop_token_ids must hold at most {MAX_STOP_TOKEN_IDS} ids, not {len(ids)}: send fewer")
    if not all(_is_int(token) and token >= 0 for token in ids):
        raise ValueError(f"stop_token_ids must be a list of token ids >= 0, not {given!r}")
    return tuple(dict.fromkeys(ids))


def _check_bias(given: Any) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"logit_bias must map token ids to numbers, not {given!r}")
    bias: dict[Any, Any] = given
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias must hold at most {MAX_LOGIT_BIAS} token ids, not {len(bias)}: send fewer")
    for token, value in bias.items():
        if not _is_int(token) or token < 0 or not _is_number(value) or not -100 <= value <= 100:
            raise ValueError(f"logit_bias must map token ids >= 0 to numbers in [-100, 100], not {token!r}: {value!r}")


# A field added at the end of an array, with a default, does not change it: older readers skip it, newer ones do
# without.
PROTOCOL_VERSION = 5


class RequestKey(msgspec.Struct, frozen=True, array_like=True):
    """Names one Submit. (router_id, session) is the event stream its events go to; session is new whenever a router
    opens a stream to a worker. attempt is unique per Submit of a request: P's leg and D's leg of one hand-off have
    different ones."""

    router_id: str
    session: int
    request_id: str
    attempt: int = 0


class RankPool(msgspec.Struct, frozen=True, array_like=True):
    """One rank's registered memory. heads: global KV head ids there, in order. memory: NIXL's "DRAM" or "VRAM"."""

    agent_name: str
    agent_metadata: bytes
    pool_address: int
    memory: str
    device_id: int
    heads: tuple[int, ...]


class PoolMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer needs once to read from an engine's pool. incarnation: the engine process's start, in ns of its
    host's clock; between two of one engine_id the higher is the living one. mailbox: the address of its letters.
    block_size: tokens of a block, which need not be the reader's."""

    engine_id: str
    incarnation: int
    connector: str
    compat: str
    block_size: int
    num_blocks: int
    block_bytes: int
    head_bytes: int
    generation_address: int
    mailbox: str
    ranks: tuple[RankPool, ...]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to read published blocks: valid while the generations still match and the incarnation lives.

    block_ids: P's blocks, of block_size tokens, in order of position from token 0; the last may be partly filled.
    generations: one a block, as they were when the block's rows were written. num_tokens: rows published (0: a part of
    a prompt, of whole blocks). lease_s: P unpins after this long
    unless renewed. content: digest of the tokens, salt and model whose rows these are; D computes its own and refuses
    another's. key: of P's Submit; D's has another attempt (and session). written_at: seconds since the epoch by P's
    clock when its engine knew that the last of these rows is written.
    """

    engine_id: str
    incarnation: int
    key: RequestKey
    content: bytes
    block_size: int
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    num_tokens: int
    lease_s: float
    written_at: float


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt is being computed, and as what. key: of P's Submit."""

    engine_id: str
    incarnation: int
    key: RequestKey


class Start(msgspec.Struct, frozen=True, array_like=True):
    """One choice to generate: `forced` are the tokens the router already accepted; generation goes on behind them."""

    choice: int
    forced: tuple[int, ...] = ()


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Run (a phase of) a request. phase "prefill": compute the prompt, sample one token of each
    start (no forced ones), publish the blocks; "decode": pull the ticket's blocks, or recompute, and generate; "full":
    everything here. Dropped without an answer when the key's session is not open (any more). sampling.seed is set;
    sampling.stop is empty, because routers look for stop strings themselves.

    starts: distinct choices < n, at least one. All limits (max_tokens, min_tokens) and positions count forced tokens;
    the next draw has position len(forced); forced tokens enter the penalties of their own choice. A start that forced
    tokens already finish is invalid. sampling.prompt_logprobs asks for PromptScored.logprobs: the router clears it once
    it has them. cache_salt: prefix-cache blocks are shared only between equal salts. priority: lower runs first.
    overlap: D pulls while P computes: the prompt's last chunk is kept short, so that little is left to move behind it.
    """

    key: RequestKey
    phase: Phase
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    starts: tuple[Start, ...]
    ticket: Ticket | None = None
    priority: int = 0
    cache_salt: str = ""
    overlap: bool = False


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """A hint: a Submit of phase "decode" with the same key, prompt and salt will follow when `source` has computed the
    prompt; reserve blocks and pull what is ready meanwhile. Never answered; everything works without it. Ended by that
    Submit, a Cancel of the key, or the router's loss.
    """

    submit: Submit
    source: Source


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Idempotent: stop what the Submit of exactly this key started, drop its ticket, free its blocks; may come before
    that Submit, which is then dropped. choices: only these (None: all; all that are left is the same as None)."""

    key: RequestKey
    choices: tuple[int, ...] | None = None


class ConnectPeer(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Prepare to pull from this pool; answered by a PeerStatus. Idempotent."""

    meta: PoolMeta


class DisconnectPeer(msgspec.Struct, frozen=True, kw_only=True, tag="disconnect"):
    engine_id: str
    incarnation: int


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """A router opened its event stream; answered by a Hello to it. Sent by the replica shell, not by the router, which
    sends nothing to the worker before that Hello."""

    router_id: str
    session: int


class Resync(msgspec.Struct, frozen=True, kw_only=True, tag="resync"):
    """This stream missed a CacheChange, or a part of a CacheState: send it a new CacheState."""

    router_id: str
    session: int


class RouterLost(msgspec.Struct, frozen=True, kw_only=True, tag="router_lost"):
    """The event stream (router_id, session) ended: all requests it owns are aborted, its later Submits are dropped."""

    router_id: str
    session: int


class SetRole(msgspec.Struct, frozen=True, kw_only=True, tag="set_role"):
    """What the worker is for, from now on; answered by a Snapshot to every router. What runs goes on, and every phase
    is still served. Only "both" without a connector: any other role is ignored there."""

    role: Literal["prefill", "decode", "both"]


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The engine process leaves its loop and releases its resources."""


Command = Submit | Prepare | Cancel | ConnectPeer | DisconnectPeer | Subscribe | Resync | RouterLost | SetRole | Stop


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of the token at one position, its rank (1 = likeliest), and the likeliest alternatives, best
    first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello"):
    """First event on a new stream: what this worker is, and which peers it is connected to already. protocol:
    PROTOCOL_VERSION; another one's events are not understood. pool is None when it cannot hand KV over (aggregated
    mode). parts_from: D may be prepared for prompts of so many tokens (0: none); long ones are published in parts.
    caches_prefixes: its computed blocks can be found again.
    cut_below: where D's link moves fewer bytes a second, such a prompt shall have a short last chunk (Submit.overlap).
    kv_pool: name of the KV pool it uses, equal for workers that share one ("": none), of chunks of pool_chunk tokens.
    """

    protocol: int
    role: str
    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    block_size: int
    pool: PoolMeta | None
    peers: tuple["PeerStatus", ...] = ()
    parts_from: int = 0
    cut_below: float = 0.0
    caches_prefixes: bool = True
    kv_pool: str = ""
    pool_chunk: int = 0


class LegTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a leg at its worker up to now: waiting (for blocks, a slot, or a transfer), from its first step to the
    prompt's end, from there on; and for how much of the latter two the device was busy."""

    queue_s: float
    prefill_s: float
    decode_s: float
    device_s: float


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """New tokens of one choice. position: index of the first among the choice's generated tokens (0 = first). logprobs:
    one a token when asked for. A gap between two positions of a leg means a lost message: the leg has failed.

    stop_reason: the stop token id when finish_reason is "stop" through stop_token_ids, else None. times: with the last
    token that the leg gives the choice.
    """

    request_id: str
    attempt: int
    choice: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    times: LegTimes | None = None


class PromptScored(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt_scored"):
    """The prompt is computed. cached_tokens: taken from the prefix cache. logprobs: of the prompt tokens from `start`
    on (the very first is None); long ones come in several events, `final` is the last."""

    request_id: str
    attempt: int
    cached_tokens: int
    start: int = 0
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    final: bool = True


class PackedScores(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt_scored"):
    """PromptScored as a router reads it: the log-probabilities stay as they came, which takes an eighth of what their
    objects do. These are made when an answer is."""

    request_id: str
    attempt: int
    cached_tokens: int
    start: int = 0
    logprobs: msgspec.Raw = msgspec.Raw(b"\xc0")
    final: bool = True

    @property
    def num_tokens(self) -> int:
        """How many have an entry; 0 when there are no log-probabilities. Read from the head of
        msgpack's array."""
        data = memoryview(self.logprobs)
        if data[0] == 0xDC or data[0] == 0xDD:  # the array's length comes after its first byte
            return int.from_bytes(data[1 : 3 if data[0] == 0xDC else 5])
        return data[0] & 0xF if data[0] >> 4 == 9 else 0

    @property
    def num_bytes(self) -> int:
        """Size of the log-probabilities; 0 when there are none."""
        return memoryview(self.logprobs).nbytes if self.num_tokens else 0

    def entries(self) -> tuple[TokenLogprob | None, ...]:
        """Raises msgspec.DecodeError when they are not well-formed."""
        return _scores_decoder.decode(self.logprobs)


class Handoff(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="handoff"):
    """P published the prompt's blocks. Always follows the first tokens' Deltas in the same batch."""

    request_id: str
    attempt: int
    ticket: Ticket


class Arrived(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="arrived"):
    """How D came by the prompt's KV. source: "p2p", "cache" (all was cached here), "recompute" (reason says
    why), or "pool" (the first cached_tokens; may follow a "recompute", and comes from P too).
    num_early_bytes: of num_bytes, moved before the Submit came.

    seconds: from the Submit to the end, of which wait_s until blocks were free and the pull began (0 when it had begun
    before). read_s: how long reads were under way, also before the Submit. lag_s: "p2p" only: from Ticket.written_at
    until the last byte was verified here, by the clocks of both hosts, so it may be wrong by their difference, and
    below 0. detail: of the reason, in words."""

    request_id: str
    attempt: int
    source: str
    num_bytes: int = 0
    num_descriptors: int = 0
    transport: str = ""
    seconds: float = 0.0
    cached_tokens: int = 0
    reason: str = ""
    num_early_bytes: int = 0
    wait_s: float = 0.0
    lag_s: float = 0.0
    read_s: float = 0.0
    detail: str = ""


class Failed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="failed"):
    """The attempt ended without finishing. kind "invalid": never retry; "internal": another worker may do."""

    request_id: str
    attempt: int
    kind: Literal["invalid", "internal"]
    message: str


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="peer"):
    """Whether this worker can pull from the peer; told to every router on every change. transport: what the timed
    self-test saw; bytes_per_s: its bandwidth."""

    engine_id: str
    incarnation: int
    connected: bool
    transport: str = ""
    bytes_per_s: float = 0.0
    detail: str = ""


class LegsWaiting(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="legs_waiting"):
    """Legs of this router, as (request id, attempt), that have nothing to say yet although nothing is wrong: they wait
    for their turn behind work that goes on, for blocks, a transfer or the KV pool, or more of their prompt was computed
    since the last such event. Sent before each Snapshot unless there are none. A leg that is neither here nor has
    events hangs, or its Submit never came.
    """

    legs: tuple[tuple[str, int], ...]


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One exposed sample of a metric: its name with suffix (`_bucket`, `_total` ...), labels and value."""

    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="snapshot"):
    """The worker's state, pushed by the engine itself about once a second, also when nothing changed: a sign of life.

    queue_tokens: prompt tokens waiting to be computed. metrics: the worker's own prometheus families. cache_number: of
    the last CacheChange before this. prefill_tokens_per_s: measured over the latest steps that were mostly prompt; 0:
    none yet. busy: share of the latest seconds that it computed prompts. token_interval_s: between two tokens of a
    running sequence, lately; 0: none runs.
    """

    role: str
    num_waiting: int
    num_running: int
    queue_tokens: int
    free_blocks: int
    total_blocks: int
    pinned_blocks: int
    quarantined_blocks: int
    metrics: tuple[MetricFamily, ...] = ()
    cache_number: int = 0
    prefill_tokens_per_s: float = 0.0
    busy: float = 0.0
    token_interval_s: float = 0.0


CACHE_KEY_BYTES = 8


class CacheChange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cache_change"):
    """What this worker's prefix cache gained and lost, to all routers. number: one more than the last one's. stored,
    dropped: the first CACHE_KEY_BYTES of each block's digest (`engine.block_hasher`), one behind the other."""

    number: int
    stored: bytes
    dropped: bytes


class CacheState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cache_state"):
    """All that the prefix cache held behind CacheChange `number`, in parts, counted from 0, to one router; changes may
    come between two parts. stored: as in CacheChange."""

    number: int
    part: int
    final: bool
    stored: bytes


class PoolChange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pool_change"):
    """What this worker stored in its KV pool or read there, and what it looked for in vain: of each chunk the key of
    the block that ends it, as in CacheChange. Hints: the pool is shared, and tells nobody what it drops."""

    found: bytes
    missed: bytes


_Other = (
    Hello
    | Delta
    | Handoff
    | Arrived
    | Failed
    | PeerStatus
    | LegsWaiting
    | Snapshot
    | CacheChange
    | CacheState
    | PoolChange
)
Event = _Other | PromptScored
RoutedEvent = _Other | PackedScores


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message a step for one router: everything that happened to its requests, in order. What comes up to and with
    each PromptScored that has log-probabilities goes before, in a message of its own."""

    worker_id: str
    incarnation: int
    events: tuple[Event, ...]


class RoutedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """An EventBatch as a router reads it."""

    worker_id: str
    incarnation: int
    events: tuple[RoutedEvent, ...]


_command_decoder = msgspec.msgpack.Decoder(Command)
_batch_decoder = msgspec.msgpack.Decoder(EventBatch)
_routed_decoder = msgspec.msgpack.Decoder(RoutedBatch)
_scores_decoder = msgspec.msgpack.Decoder(tuple[TokenLogprob | None, ...])
_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | EventBatch) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.DecodeError on anything that is not a well-formed command."""
    return _command_decoder.decode(data)


def decode_batch(data: bytes) -> EventBatch:
    """Raises msgspec.DecodeError on anything that is not a well-formed batch."""
    return _batch_decoder.decode(data)


def decode_routed(data: bytes) -> RoutedBatch:
    """`decode_batch`, but a prompt's log-probabilities are passed over: some 200 KB in an event."""
    return _routed_decoder.decode(data)


_ID = re.compile(r"[\x21-\x7e]{1,256}")


def check_request_id(request_id: str) -> str:
    """The id itself; ValueError unless it is 1 to 256 printable ASCII characters without spaces."""
    if not _ID.fullmatch(request_id):
        raise ValueError("request_id must be 1 to 256 printable ASCII characters without spaces")
    return request_id
