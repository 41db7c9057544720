"""What a completed step hands out: events, and prompts and rows whose blocks are ready for others.

Plain data. Made by `engine.collect`; the worker loop and the phases read it.
"""

from dataclasses import dataclass, field

from pdserve.protocol.block_digests import Tenant
from pdserve.protocol.events import Event
from pdserve.protocol.request_key import RequestKey


@dataclass(frozen=True)
class HeldPrompt:
    """The blocks of a finished prefill-only request; they stay owned until
    `Engine.release_held(key)`. home: the one whose blocks they are."""

    key: RequestKey
    block_ids: tuple[int, ...]
    num_tokens: int
    content: bytes
    home: int = 0


@dataclass(frozen=True)
class WrittenPrompt:
    """How far a prompt that will be handed over is written on the device: all rows of these blocks,
    from its first on. content, home: see HeldPrompt.
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    content: bytes
    home: int = 0


@dataclass(frozen=True)
class FinishedRows:
    """The full blocks of a sequence that has ended, with the tokens that they hold rows of and
    their digests; whoever asked for them (`Engine.keep_finished_rows`) releases the blocks. home:
    the one whose blocks they are.
    """

    token_ids: tuple[int, ...]
    tenant: Tenant
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    home: int = 0


@dataclass(frozen=True)
class HomeSize:
    """How much a step computes in one home."""

    num_rows: int
    num_sequences: int

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one row."""
        return self.num_rows == self.num_sequences

    @property
    def num_more(self) -> int:
        """Number of rows beside one for each sequence."""
        return self.num_rows - self.num_sequences


@dataclass
class StepResult:
    """What a step did that is now complete. The held prompts may be published at once, and the
    blocks of those written in part.

    num_sequences: it computed rows of. busiest: rows and sequences of the home that computed the
    most prompt tokens. device_seconds: it took the device (0 on CPU, where all time
    is the host's). host_seconds: this thread worked for it. ended_at: seconds since the epoch when
    its end was known.
    """

    events: list[tuple[RequestKey, Event]] = field(default_factory=list)
    held: list[HeldPrompt] = field(default_factory=list)
    written: list[WrittenPrompt] = field(default_factory=list)
    finished: list[FinishedRows] = field(default_factory=list)
    num_rows: int = 0
    num_sequences: int = 0
    busiest: HomeSize = field(default_factory=lambda: HomeSize(0, 0))
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    ended_at: float = 0.0


@dataclass
class EngineStats:
    """Running totals since start."""

    num_steps: int = 0
    num_late_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def clear(self) -> None:
        self.num_steps = self.num_late_steps = self.prompt_tokens = self.generation_tokens = 0
