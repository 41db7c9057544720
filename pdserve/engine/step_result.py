"""Results of a completed step: events, and prompts and rows whose blocks others may read now.

Plain data. Made by `stepping.collector`; read by the worker loop and the phases.
"""

from dataclasses import dataclass, field

from pdserve.protocol.block_digests import Tenant
from pdserve.protocol.events import Event
from pdserve.protocol.request_key import RequestKey


@dataclass(frozen=True)
class HeldPrompt:
    """The blocks of a finished prefill-only request, in the home `home`. They stay owned until
    `Engine.release_held(key)`."""

    key: RequestKey
    block_ids: tuple[int, ...]
    num_tokens: int
    content: bytes
    home: int = 0


@dataclass(frozen=True)
class WrittenPrompt:
    """The part of a prompt to be handed over that is written on the device: all rows of these
    blocks, from the first block on. content, home: see HeldPrompt.
    """

    key: RequestKey
    block_ids: tuple[int, ...]
    content: bytes
    home: int = 0


@dataclass(frozen=True)
class FinishedRows:
    """The full blocks of a sequence that has ended, with their tokens and digests, in the home
    `home`. The caller of `Engine.keep_finished_rows` must release the blocks.
    """

    token_ids: tuple[int, ...]
    tenant: Tenant
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    home: int = 0


@dataclass(frozen=True)
class HomeSize:
    """The size of a step's part in one home."""

    num_rows: int
    num_sequences: int

    @property
    def is_decode(self) -> bool:
        """True if every sequence computes one row."""
        return self.num_rows == self.num_sequences

    @property
    def num_more(self) -> int:
        """Number of rows beyond one for each sequence."""
        return self.num_rows - self.num_sequences


@dataclass
class StepResult:
    """The outcome of a completed step. The held prompts may be published at once, and so may the
    blocks of prompts that are written in part.
    """

    events: list[tuple[RequestKey, Event]] = field(default_factory=list)
    held: list[HeldPrompt] = field(default_factory=list)
    written: list[WrittenPrompt] = field(default_factory=list)
    finished: list[FinishedRows] = field(default_factory=list)
    num_rows: int = 0
    num_sequences: int = 0  # sequences with rows in the step
    # size of the home that computed the most prompt tokens
    busiest: HomeSize = field(default_factory=lambda: HomeSize(0, 0))
    device_seconds: float = 0.0  # time on the device; 0 on CPU, where all time is the host's
    host_seconds: float = 0.0  # time that the engine's thread worked for it
    ended_at: float = 0.0  # when its end was noticed, in seconds since the epoch
    # of an empty result: for so long a step in flight surely goes on, and another could be queued
    spare_s: float = 0.0


@dataclass
class EngineStats:
    """Running totals since start."""

    num_steps: int = 0
    num_late_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def clear(self) -> None:
        self.num_steps = self.num_late_steps = self.prompt_tokens = self.generation_tokens = 0
