"""The events that a worker sends to routers: one batch per step for each router."""

from typing import Literal

import msgspec

from pdserve.protocol.handoff import KVCacheMeta, Ticket
from pdserve.protocol.metric_families import MetricFamily
from pdserve.protocol.request_key import FinishReason, LegName


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Holds the log-probability of the token at one position, its rank (1 = likeliest), and the
    likeliest alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello"):
    """First event on a new stream: what this worker is, and which peers it is already connected
    to."""

    protocol: int  # PROTOCOL_VERSION. Events of another version are not understood.
    role: str
    # The two keys of BlockHasher. A request may go on at a worker with the same model_fingerprint,
    # and finds blocks of the same rows_digest.
    model_fingerprint: str
    rows_digest: str
    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    block_size: int
    kv_cache: KVCacheMeta | None  # None if it has no connector.
    peers: tuple["PeerStatus", ...] = ()
    # D may be prepared for prompts from this length on (0: none). Long ones are published in parts.
    parts_from: int = 0
    # If D's link moves fewer bytes per second, such a prompt should have a short last chunk
    # (Submit.overlap).
    cut_below: float = 0.0
    caches_prefixes: bool = True  # Its computed blocks can be found again.
    kv_pool: str = ""  # Name of its KV pool, equal for workers that share one; "": it has none.
    pool_chunk: int = 0  # Tokens of the pool's chunks.
    fetches_prefixes: bool = False  # It fetches cached prefixes from others, and lends its own.
    grammar_engine: str = ""  # Name and version of what enforces grammars there; "": nothing does.
    hands_over: bool = True  # False: it does whole requests only (aggregated mode).


class LegTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a leg has spent at its worker up to now."""

    queue_s: float  # Waiting for blocks, a slot, or a transfer.
    prefill_s: float  # From its first step to the prompt's end.
    decode_s: float  # After the prompt's end.
    device_s: float  # Part of prefill and decode in which the device was busy.


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """New tokens of one choice.

    `position` is the index of the first one among the choice's generated tokens. A gap between two
    positions of a leg means a lost message: the leg has failed. `logprobs` has one entry per token
    if it was asked for. `stop_reason` is the stop token's id if a stop token id ended the choice,
    else None. `times` comes with the last token that the leg gives the choice.
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
    """The prompt is computed. `cached_tokens` of it were taken from the prefix cache.

    `logprobs` are those of the prompt tokens from `start` on; the very first is None. Long ones
    come in several events, of which the last is `final`.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    start: int = 0
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    final: bool = True


class Embedded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="embedded"):
    """The answer to a Submit of kind "embed".

    `values` is the hidden row of the prompt's last token, after the last norm, as little-endian
    float32. For cached_tokens see PromptScored, for times Delta.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    values: bytes
    times: LegTimes | None = None


class PackedScores(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt_scored"):
    """PromptScored as a router reads it: the log-probabilities stay encoded until an answer is
    made.

    Encoded, they take an eighth of the memory of their objects.
    """

    request_id: str
    attempt: int
    cached_tokens: int
    start: int = 0
    logprobs: msgspec.Raw = msgspec.Raw(b"\xc0")
    final: bool = True

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have an entry; 0 if there are no log-probabilities.

        It is read from the head of msgpack's array.
        """
        data = memoryview(self.logprobs)
        if data[0] == 0xDC or data[0] == 0xDD:  # the array's length comes after its first byte
            return int.from_bytes(data[1 : 3 if data[0] == 0xDC else 5])
        return data[0] & 0xF if data[0] >> 4 == 9 else 0

    @property
    def num_bytes(self) -> int:
        """Size of the log-probabilities; 0 if there are none."""
        return memoryview(self.logprobs).nbytes if self.num_tokens else 0

    def entries(self) -> tuple[TokenLogprob | None, ...]:
        """Decodes the log-probabilities. Raises msgspec.DecodeError if they are not well-formed."""
        return _scores_decoder.decode(self.logprobs)


class Handoff(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="handoff"):
    """P published the prompt's blocks. It always follows the first tokens' Deltas in the same
    batch."""

    request_id: str
    attempt: int
    ticket: Ticket


class Arrived(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="arrived"):
    """The way in which D got the prompt's KV, by its `source`:

    - "p2p": from P.
    - "cache": everything was cached here.
    - "recompute": computed here; `reason` says why.
    - "pool" or "prefix": the first cached_tokens came from the KV pool, or from another worker's
      prefix cache. Such an event may follow a "recompute", and P sends it too.
    """

    request_id: str
    attempt: int
    source: str
    num_bytes: int = 0
    num_descriptors: int = 0
    transport: str = ""
    seconds: float = 0.0  # From the Submit to the end.
    cached_tokens: int = 0
    reason: str = ""
    num_early_bytes: int = 0  # Part of num_bytes that was moved before the Submit came.
    # Part of seconds before blocks were free and the pull began; 0 if it began before the Submit.
    wait_s: float = 0.0
    # "p2p" only: from Ticket.written_at to the last byte verified here. It uses the clocks of both
    # hosts, so it may be wrong by their difference, and negative.
    lag_s: float = 0.0
    read_s: float = 0.0  # How long reads were under way, including those before the Submit.
    detail: str = ""  # The reason in words.


class Failed(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="failed"):
    """The attempt ended without finishing.

    Kind "invalid" must never be retried; with "internal" another worker may succeed.
    """

    request_id: str
    attempt: int
    kind: Literal["invalid", "internal"]
    message: str


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="peer"):
    """Reports to every router, on every change, whether this worker can pull from the peer.

    `transport` is what the timed self-test saw, and `bytes_per_s` its bandwidth.
    """

    engine_id: str
    incarnation: int
    connected: bool
    transport: str = ""
    bytes_per_s: float = 0.0
    detail: str = ""
    for_prefixes: bool = False  # No hand-off needs this link.


class LegsWaiting(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="legs_waiting"):
    """Legs of this router, as (request id, attempt), that have nothing to report although all is
    well.

    They wait behind work that goes on, for blocks, a transfer or the KV pool. Or more of their
    prompt was computed since the last such event. It is sent before each Snapshot unless there are
    no such legs. A leg that is not named here and has no events hangs, or its Submit never came.

    A prompt is named once more after the turn in which it was read, unless it has an event by then.
    So before each report of load the router knows which of its prompts the report counts.
    """

    legs: tuple[LegName, ...]


class HomeState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of a worker's KV caches: sequences that run in it, and its free blocks.

    A request lives in one home.
    """

    num_running: int
    free_blocks: int


class PaceState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The pace of a worker's steps, from which routers predict what one more request costs there
    (docs/design/pacing.md). All values are the worker's own measurements."""

    tpot_ms: float  # Mean time between two tokens that it holds its streams to.
    base_step_ms: float  # Duration of a step of its present decodes alone.
    row_ms: float  # What one more decode adds to that.
    # Speed of prompts beside the present decodes; full speed if nothing decodes. It is measured if
    # prompts waited lately, and otherwise predicted.
    prompt_tokens_per_s: float
    # Prompt tokens that it computes at full speed now, because its streams have saved time or will
    # gain it. Prompts use it up.
    burst_tokens: int = 0
    # How long its present streams will still decode, on average; 0 if it does not decode.
    stream_ms: float = 0.0
    # How many prompt tokens one attended pair of tokens counts as, in the work of a prompt
    # (protocol.prompt_work). Speeds and queues are of work.
    pair_tokens: float = 0.0
    # Speed of prompts beside the present decodes if these held nothing back; 0 if nothing decodes.
    top_tokens_per_s: float = 0.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="snapshot"):
    """The worker's state. The engine itself pushes it about once per second, even if nothing
    changed, as a sign of life."""

    role: str
    num_waiting: int
    num_running: int
    queue_tokens: int  # Work of the prompts that wait or are in flight, in tokens.
    free_blocks: int
    total_blocks: int
    pinned_blocks: int
    quarantined_blocks: int
    metrics: tuple[MetricFamily, ...] = ()  # The worker's own prometheus families.
    cache_number: int = 0  # Number of the last CacheChange before this.
    # Measured in one home over the latest steps that were mostly prompt; 0: none yet.
    prefill_tokens_per_s: float = 0.0
    busy: float = 0.0  # Share of the latest seconds in which it computed prompts.
    token_interval_s: float = 0.0  # Recent time between two tokens of a sequence; 0: none runs.
    homes: tuple[HomeState, ...] = ()  # Its KV caches; free_blocks and total_blocks are their sums.
    pace: PaceState | None = None  # None if the engine has no pace (several stages).
    role_by: str = ""  # Who chose its role, as in SetRole; "": it is the deployment's.
    role_age_s: float = 0.0  # Seconds since then.
    # Seconds since it last read commands. Those that came since are not counted yet.
    unread_s: float = 0.0
    # True if no prompt has confirmed `prefill_tokens_per_s` for long, or if it comes from small
    # steps, which show only that the worker is at least as fast.
    is_prefill_speed_vague: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="load"):
    """The part of a Snapshot that changes quickly; its fields mean the same.

    It is sent to every router between two Snapshots if it changed much, at most every 0.1 s.
    """

    queue_tokens: int
    num_running: int
    num_waiting: int
    pace: PaceState | None
    unread_s: float = 0.0


CACHE_KEY_BYTES = 8


class CacheChange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cache_change"):
    """Reports to all routers what this worker's prefix cache gained and lost.

    `number` is one more than the last one's. `stored` and `dropped` are the first CACHE_KEY_BYTES
    of each block's digest (`protocol.block_digests`), joined.
    """

    number: int
    stored: bytes
    dropped: bytes


class CacheState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cache_state"):
    """Everything that the prefix cache held after CacheChange `number`, sent to one router in
    parts.

    Parts are counted from 0, and changes may come between two parts. `stored` is as in CacheChange.
    """

    number: int
    part: int
    final: bool
    stored: bytes


class PoolChange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pool_change"):
    """Chunks that this worker stored or found in its KV pool, and chunks that it looked for in
    vain.

    Each is named by the key of the block that ends it, as in CacheChange. These are hints: the pool
    is shared, and reports nothing of what it drops.
    """

    found: bytes
    missed: bytes


class ExpertCounts(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="experts"):
    """Answers an AskExpertLoad: the rows that went to each expert since the worker was ready, by
    layer. It is empty if the model has no experts."""

    layers: dict[int, tuple[int, ...]]


_Other = (
    Hello
    | Delta
    | Embedded
    | Handoff
    | Arrived
    | Failed
    | PeerStatus
    | LegsWaiting
    | Snapshot
    | Load
    | CacheChange
    | CacheState
    | PoolChange
    | ExpertCounts
)
Event = _Other | PromptScored
RoutedEvent = _Other | PackedScores


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message per step for one router: everything that happened to its requests, in order.

    A PromptScored with log-probabilities leaves earlier, in a message with all events before it.
    """

    worker_id: str
    incarnation: int
    events: tuple[Event, ...]


class RoutedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """An EventBatch as a router reads it."""

    worker_id: str
    incarnation: int
    events: tuple[RoutedEvent, ...]


_scores_decoder = msgspec.msgpack.Decoder(tuple[TokenLogprob | None, ...])
