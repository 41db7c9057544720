"""The engine's view of a running request: a Request, and a Sequence for each of its choices.

A fresh request starts as one sequence that computes the prompt. When the prompt is done, the other
choices fork off it and share its blocks. A request with forced tokens (resumed elsewhere, or pulled
from P) starts with all its sequences. Knows no scheduler and no device. Made by the engine from
protocol messages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pdserve.engine.grammars.grammar import Grammar
from pdserve.engine.pacing.promise import Promise
from pdserve.protocol.block_digests import NOBODY, BlockHasher, ContentPart, Tenant
from pdserve.protocol.commands import PrefixHint, Start
from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.request_key import FinishReason, RequestKey, RequestKind
from pdserve.protocol.sampling_params import SamplingParams


class Status(Enum):
    WAITING = "waiting"  # has work, is not in the running batch; may own imported blocks
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One attempt at one request. Times are those of the engine's clock, in seconds."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int  # of each choice, limited to what fits in the engine that decodes it
    stop_token_ids: frozenset[int]
    kind: RequestKind = "generate"
    prefill_only: bool = False  # sample the first tokens, then hold the prompt for a hand-off
    overlap: bool = False  # others read the prompt while it is computed
    priority: int = 0
    tenant: Tenant = NOBODY
    parts: tuple[ContentPart, ...] = ()
    prefix: PrefixHint | None = None  # from its Submit, for those who bring blocks from elsewhere
    grammar: Grammar | None = None  # built, if its sampling asks for one
    home: int | None = None  # number of the Home that it lives in, from its first admission on
    arrival: int = 0
    submitted_at: float = 0.0  # when its Submit came
    called_at: float = 0.0  # when its user's call reached the router
    latest_start: float = 0.0  # when its prompt must start to be in time; 0 without a pace
    due_at: float = 0.0  # when its first token is due; 0 without a pace
    num_expected: int = 0  # prompt tokens to compute, estimated on arrival; 0 without a pace
    is_late: bool = False  # its latest start passed before its first rows were planned
    prompt_reported: bool = False
    prefix_looked_up: bool = False
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    # prompt positions whose log-probability is known or in flight; the first has none
    num_scored: int = 1
    sequences: list["Sequence"] = field(default_factory=list)
    content: bytes | None = None  # see BlockHasher.content
    _prompt_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def lacks_grammar(self) -> bool:
        """True if a grammar is asked for and not built yet."""
        return self.grammar is None and "grammar" in (self.sampling.logit_rules or ())

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None and not self.prompt_reported

    def adopt(self, earlier: "Request") -> bool:
        """Take over the digests that an earlier Request computed for the same prompt and tenant;
        False if these differ."""
        mine = (self.prompt_token_ids, self.tenant, self.parts)
        theirs = (earlier.prompt_token_ids, earlier.tenant, earlier.parts)
        if mine != theirs:
            return False
        self.content = earlier.content
        self._prompt_hashes = earlier._prompt_hashes
        return True

    def content_digest(self, hasher: BlockHasher) -> bytes:
        """Digest of the prompt and its tenant, which a hand-off ticket carries. Computed once."""
        if self.content is None:
            self.content = hasher.content(self.prompt_token_ids, self.tenant, self.parts)
        return self.content

    def prompt_hashes(self, hasher: BlockHasher) -> list[bytes]:
        """Digests of the prompt's full blocks, computed once for all choices and all attempts to
        find blocks."""
        hasher.extend(self._prompt_hashes, self.prompt_token_ids, self.tenant, self.parts)
        return self._prompt_hashes


ComputeHere = Callable[[Request, tuple[Start, ...]], None]
"""Lets the engine compute a request's prompt here: at once, or after what the KV pool has of it."""


@dataclass(eq=False)
class Sequence:
    """The tokens of one choice and where their KV lies."""

    request: Request
    choice: int
    token_ids: list[int]  # prompt, forced and sampled tokens whose values are known
    num_pending: int = 0  # tokens that a step in flight samples; 0 or 1 when a step is planned
    # Leading tokens whose rows are in the KV cache, or will be when the steps in flight are done.
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)  # blocks in order of position
    # First blocks of the table that were given up, because no later row reads them (a window).
    num_dropped: int = 0
    num_committed: int = 0  # first blocks of the table that the prefix cache knows
    num_synced: int = 0  # first blocks of the table that the device knows
    slot: int = 0  # row of the device's tables while it runs, else 0
    last_plan: int = 0  # number of the last step that it was planned for
    status: Status = Status.WAITING
    pending_forks: tuple[int, ...] = ()  # choices that fork off when the prompt is computed
    # When its first token was accepted, in the engine's clock. None: it has none, or it is unknown.
    first_token_at: float | None = None
    promise: Promise | None = None  # None before it decodes
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def owned_blocks(self) -> list[int]:
        """Its blocks without those that were given up, which others may own by now."""
        return self.block_table[self.num_dropped :]

    @property
    def home(self) -> int:
        """Number of the Home whose blocks and slots it uses. AssertionError before it has one."""
        home = self.request.home
        assert home is not None, "a sequence that was never admitted has no home"
        return home

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including those in flight."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def num_generated(self) -> int:
        """Number of generated tokens whose values are known."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def next_position(self) -> int:
        """Index of the next token to sample, among the generated ones."""
        return len(self.token_ids) + self.num_pending - self.request.num_prompt_tokens

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to compute: every token that it may have is sampled or in flight.
        For a prompt to embed: every row is computed."""
        if self.request.kind == "embed":
            return self.num_uncomputed == 0
        return self.tokens_left <= 0

    @property
    def tokens_left(self) -> int:
        """Maximum number of tokens that it may still sample here."""
        limit = 1 if self.request.prefill_only else self.request.max_tokens
        return limit - self.next_position

    @property
    def is_stream(self) -> bool:
        """True if it has tokens after its prompt, which its user may already read."""
        return len(self.token_ids) + self.num_pending > self.request.num_prompt_tokens

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key of scheduling: priority, then the request's arrival, which keeps its choices
        together."""
        return self.request.priority, self.request.arrival, self.choice

    def hashes(self, hasher: BlockHasher) -> list[bytes]:
        """Digests of the full blocks of all tokens so far; only new full blocks are hashed."""
        if not self._hashes:
            self._hashes = list(self.request.prompt_hashes(hasher))
        hasher.extend(self._hashes, self.token_ids, self.request.tenant, self.request.parts)
        return self._hashes

    def finish_reason_after(self, token: int) -> FinishReason | None:
        """Why the choice ends with `token`, which was just appended; None if it continues."""
        if (
            token in self.request.stop_token_ids
            and self.num_generated > self.request.sampling.min_tokens
        ):
            return "stop"
        return "length" if self.num_generated >= self.request.max_tokens else None
