"""The commands that a router, or the replica's shell, sends to a worker."""

from typing import Literal

import msgspec

from pdserve.protocol.block_digests import ContentPart
from pdserve.protocol.handoff import KVCacheMeta, Source, Ticket
from pdserve.protocol.request_key import Phase, RequestKey, RequestKind
from pdserve.protocol.sampling_params import SamplingParams


class Start(msgspec.Struct, frozen=True, array_like=True):
    """One choice to generate; generation goes on after the `forced` tokens that the router has
    accepted.

    `first_ms_ago` is the time in ms since this choice's first token was accepted, by the router's
    clock at sending; 0 if it has none yet. It tells a worker how much of the choice's promised time
    is used up. It is ignored in a Prepare.
    """

    choice: int
    forced: tuple[int, ...] = ()
    first_ms_ago: float = 0.0


class PrefixHint(msgspec.Struct, frozen=True, array_like=True):
    """A worker that a router believes to hold the first num_tokens of a prompt in its prefix
    cache."""

    engine_id: str
    incarnation: int
    num_tokens: int


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Asks a worker to run a request, or a phase of it.

    - phase "prefill": compute the prompt, sample one token of each start (no forced ones) and
      publish the blocks.
    - phase "decode": pull the ticket's blocks, or recompute, and generate.
    - phase "full": do everything here.

    A Submit whose session is not open is dropped without an answer. `sampling.seed` is set, and
    `sampling.stop` is empty, because routers look for stop strings themselves. When a router has
    the PromptScored.logprobs that `sampling.prompt_logprobs` asks for, it clears that field.

    All limits (max_tokens, min_tokens) and positions count forced tokens: the next draw has
    position len(forced). Forced tokens enter the penalties of their own choice. A start that forced
    tokens already finish is invalid.
    """

    key: RequestKey
    phase: Phase
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    starts: tuple[Start, ...]  # At least one, with distinct choices below n.
    ticket: Ticket | None = None
    priority: int = 0  # Lower runs first.
    cache_salt: str = ""  # Only equal salts share prefix-cache blocks.
    # D pulls while P computes. The prompt's last chunk is short, so that little is left to move.
    overlap: bool = False
    kind: RequestKind = "generate"  # An "embed" has one start and phase "full"; see Embedded.
    adapter: str = ""  # See Tenant.
    parts: tuple[ContentPart, ...] = ()  # What stands in place of tokens.
    # Time between the call's arrival at the router and this command, by the router's clock. It is
    # used up of the time that the user was promised.
    waited_ms: float = 0.0
    # From whom to fetch the beginning of the prompt before it is computed. Never in phase "decode".
    prefix: PrefixHint | None = None

    def aged(self, seconds: float) -> "Submit":
        """Returns the Submit with its times increased by the seconds that it was on its way."""
        ms = seconds * 1e3
        if ms <= 0:
            return self
        starts = tuple(
            msgspec.structs.replace(start, first_ms_ago=start.first_ms_ago + ms)
            if start.first_ms_ago
            else start
            for start in self.starts
        )
        return msgspec.structs.replace(self, waited_ms=self.waited_ms + ms, starts=starts)


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """Announces a Submit of phase "decode" with the same key, prompt and salt.

    The Submit will follow when `source` has computed the prompt. Meanwhile the worker may reserve
    blocks and pull what is ready. This is only a hint: it is never answered, and everything works
    without it. It ends with that Submit, a Cancel of the key, or the router's loss.
    """

    submit: Submit
    source: Source


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Stops what the Submit of exactly this key started, drops its ticket and frees its blocks.

    It is idempotent. It may come before that Submit, which is then dropped. With `choices`, only
    these are stopped; None means all, and so does naming all that are left.
    """

    key: RequestKey
    choices: tuple[int, ...] | None = None


class ConnectPeer(msgspec.Struct, frozen=True, kw_only=True, tag="connect"):
    """Prepares to pull from this KV cache; answered by a PeerStatus. Idempotent.

    `for_prefixes` means only to fetch prefixes. The worker may close such a link when it is idle
    and there are many.
    """

    meta: KVCacheMeta
    for_prefixes: bool = False


class DisconnectPeer(msgspec.Struct, frozen=True, kw_only=True, tag="disconnect"):
    engine_id: str
    incarnation: int


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """A router opened its event stream; answered by a Hello to it.

    The replica shell sends it, not the router. The router sends nothing to the worker before that
    Hello.
    """

    router_id: str
    session: int


class Resync(msgspec.Struct, frozen=True, kw_only=True, tag="resync"):
    """Asks for a new CacheState, because this stream missed a CacheChange or a part of a
    CacheState."""

    router_id: str
    session: int


class RouterLost(msgspec.Struct, frozen=True, kw_only=True, tag="router_lost"):
    """The event stream (router_id, session) ended: its requests are aborted, its later Submits
    dropped."""

    router_id: str
    session: int


class SetRole(msgspec.Struct, frozen=True, kw_only=True, tag="set_role"):
    """Sets what the worker is for from now on; answered by a Snapshot to every router.

    Running requests go on, and every phase is still served. A worker without a connector accepts
    only "both", and ignores any other role. `by` says who chose the role; only operators change a
    role that an operator chose.
    """

    role: Literal["prefill", "decode", "both"]
    by: Literal["operator", "balance", "guard"] = "operator"


class AskExpertLoad(msgspec.Struct, frozen=True, kw_only=True, tag="ask_expert_load"):
    """Asks for the load of the worker's experts; answered by one ExpertCounts to this session."""

    router_id: str
    session: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Makes the engine process leave its loop and release its resources."""


Command = (
    Submit
    | Prepare
    | Cancel
    | ConnectPeer
    | DisconnectPeer
    | Subscribe
    | Resync
    | RouterLost
    | SetRole
    | AskExpertLoad
    | Stop
)
