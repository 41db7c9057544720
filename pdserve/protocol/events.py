"""What a worker says to routers: one batch a step for each router."""

from typing import Literal

import msgspec

from pdserve.protocol.handoff import KVCacheMeta, Ticket
from pdserve.protocol.metric_families import MetricFamily
from pdserve.protocol.request_key import FinishReason


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of the token at one position, its rank (1 = likeliest), and the likeliest
    alternatives, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="hello"):
    """First event on a new stream: what this worker is, and which peers it is connected to already.
    protocol: PROTOCOL_VERSION; another one's events are not understood. kv_cache is None when it
    cannot hand KV over (aggregated mode). model_fingerprint, rows_digest: the keys of BlockHasher:
    a request may go on at a worker of the same model, and finds blocks of the same rows.
    parts_from: D may be prepared for prompts of so many tokens (0: none); long ones are published
    in parts. caches_prefixes: its computed blocks can be found again. cut_below: where D's link
    moves fewer bytes a second, such a prompt shall have a short last chunk (Submit.overlap).
    kv_pool: name of the KV pool it uses, equal for workers that share one ("": none), of chunks of
    pool_chunk tokens. fetches_prefixes: it fetches cached prefixes from others, and lends its own.
    grammar_engine: name and version of what enforces grammars there ("": nothing does).
    """

    protocol: int
    role: str
    model_fingerprint: str
    rows_digest: str
    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    block_size: int
    kv_cache: KVCacheMeta | None
    peers: tuple["PeerStatus", ...] = ()
    parts_from: int = 0
    cut_below: float = 0.0
    caches_prefixes: bool = True
    kv_pool: str = ""
    pool_chunk: int = 0
    fetches_prefixes: bool = False
    grammar_engine: str = ""


class LegTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of a leg at its worker up to now: waiting (for blocks, a slot, or a transfer), from
    its first step to the prompt's end, from there on; and for how much of the latter two the device
    was busy."""

    queue_s: float
    prefill_s: float
    decode_s: float
    device_s: float


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """New tokens of one choice. position: index of the first among the choice's generated tokens (0
    = first). logprobs: one a token when asked for. A gap between two positions of a leg means a
    lost message: the leg has failed.

    stop_reason: the stop token id when finish_reason is "stop" through stop_token_ids, else None.
    times: with the last token that the leg gives the choice.
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
    """The prompt is computed. cached_tokens: taken from the prefix cache. logprobs: of the prompt
    tokens from `start` on (the very first is None); long ones come in several events, `final` is
    the last."""

    request_id: str
    attempt: int
    cached_tokens: int
    start: int = 0
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    final: bool = True


class Embedded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="embedded"):
    """What a Submit of kind "embed" asked for: the hidden row of its prompt's last token, after the
    last norm, as little-endian float32. cached_tokens: see PromptScored. times: see Delta."""

    request_id: str
    attempt: int
    cached_tokens: int
    values: bytes
    times: LegTimes | None = None


class PackedScores(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="prompt_scored"):
    """PromptScored as a router reads it: the log-probabilities stay as they came, which takes an
    eighth of what their objects do. These are made when an answer is."""

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
    """P published the prompt's blocks. Always follows the first tokens' Deltas in the same
    batch."""

    request_id: str
    attempt: int
    ticket: Ticket


class Arrived(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="arrived"):
    """How D came by the prompt's KV. source: "p2p", "cache" (all was cached here), "recompute"
    (reason says why), or "pool" or "prefix" (the first cached_tokens, from the KV pool or from
    another worker's prefix cache; may follow a "recompute", and comes from P too).
    num_early_bytes: of num_bytes, moved before the Submit came.

    seconds: from the Submit to the end, of which wait_s until blocks were free and the pull began
    (0 when it had begun before). read_s: how long reads were under way, also before the Submit.
    lag_s: "p2p" only: from Ticket.written_at until the last byte was verified here, by the clocks
    of both hosts, so it may be wrong by their difference, and below 0. detail: of the reason, in
    words."""

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
    """The attempt ended without finishing. kind "invalid": never retry; "internal": another worker
    may do."""

    request_id: str
    attempt: int
    kind: Literal["invalid", "internal"]
    message: str


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="peer"):
    """Whether this worker can pull from the peer; told to every router on every change. transport:
    what the timed self-test saw; bytes_per_s: its bandwidth."""

    engine_id: str
    incarnation: int
    connected: bool
    transport: str = ""
    bytes_per_s: float = 0.0
    detail: str = ""


class LegsWaiting(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="legs_waiting"):
    """Legs of this router, as (request id, attempt), that have nothing to say yet although nothing
    is wrong: they wait for their turn behind work that goes on, for blocks, a transfer or the KV
    pool, or more of their prompt was computed since the last such event. Sent before each Snapshot
    unless there are none. A leg that is neither here nor has events hangs, or its Submit never
    came.
    """

    legs: tuple[tuple[str, int], ...]


class HomeState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of a worker's KV caches: sequences that run in it, and its free blocks. A request lives
    in one."""

    num_running: int
    free_blocks: int


class PaceState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a worker paces its steps, for the prediction of what one more request costs there
    (docs/design/pacing.md). Milliseconds, by the worker's own measurements.

    tpot_ms: mean time between two tokens that it holds its streams to. base_step_ms: duration of a
    step of its present decodes alone. row_ms: what one more decode adds to that.
    prompt_tokens_per_s: speed of prompts beside the present decodes; full speed when none decodes.
    It was measured when prompts waited lately, and is predicted otherwise. burst_tokens: of
    prompts, that it computes at full speed where none came lately, because its streams have saved
    time, or will gain it.
    """

    tpot_ms: float
    base_step_ms: float
    row_ms: float
    prompt_tokens_per_s: float
    burst_tokens: int = 0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="snapshot"):
    """The worker's state, pushed by the engine itself about once a second, also when nothing
    changed: a sign of life.

    queue_tokens: prompt tokens waiting to be computed. metrics: the worker's own prometheus
    families. cache_number: of the last CacheChange before this. prefill_tokens_per_s: measured over
    the latest steps that were mostly prompt, in one home; 0: none yet. busy: share of the latest
    seconds that it computed prompts. token_interval_s: between two tokens of a running sequence,
    lately; 0: none runs. homes: its KV caches, of which free_blocks and total_blocks are the sums.
    pace: None where the engine has no pace (several stages). role_by: who chose its role, as in
    SetRole; "": it is the deployment's. role_age_s: seconds since then.
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
    homes: tuple[HomeState, ...] = ()
    pace: PaceState | None = None
    role_by: str = ""
    role_age_s: float = 0.0


class Load(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="load"):
    """The part of a Snapshot that changes quickly, sent to every router between two Snapshots when
    it changed much: at most every 0.1 s. The fields mean what they mean there."""

    queue_tokens: int
    num_running: int
    num_waiting: int
    pace: PaceState | None


CACHE_KEY_BYTES = 8


class CacheChange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cache_change"):
    """What this worker's prefix cache gained and lost, to all routers. number: one more than the
    last one's. stored, dropped: the first CACHE_KEY_BYTES of each block's digest
    (`protocol.block_digests`), one behind the other."""

    number: int
    stored: bytes
    dropped: bytes


class CacheState(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="cache_state"):
    """All that the prefix cache held behind CacheChange `number`, in parts, counted from 0, to one
    router; changes may come between two parts. stored: as in CacheChange."""

    number: int
    part: int
    final: bool
    stored: bytes


class PoolChange(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="pool_change"):
    """What this worker stored in its KV pool or read there, and what it looked for in vain: of each
    chunk the key of the block that ends it, as in CacheChange. Hints: the pool is shared, and tells
    nobody what it drops."""

    found: bytes
    missed: bytes


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
)
Event = _Other | PromptScored
RoutedEvent = _Other | PackedScores


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One message a step for one router: everything that happened to its requests, in order. What
    comes up to and with each PromptScored that has log-probabilities goes before, in a message of
    its own."""

    worker_id: str
    incarnation: int
    events: tuple[Event, ...]


class RoutedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """An EventBatch as a router reads it."""

    worker_id: str
    incarnation: int
    events: tuple[RoutedEvent, ...]


_scores_decoder = msgspec.msgpack.Decoder(tuple[TokenLogprob | None, ...])
