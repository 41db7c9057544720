"""What the Python client and a router's handle methods say to each other, as msgspec types.

One call a prompt: a `GenerateCall` goes in, a stream of answers comes out; one call an operator's
`Order`, with one `Outcome`. Bytes on the wire, so that both ends need only agree on these types.
Used by `cluster.client` and `cluster.deployments.router_replica`. Torch-free, knows no Ray.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admin import ClusterReport, WorkerReport
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.timeline import PromptTimeline
from pdserve.text.answers.pieces import Piece, ToolCall, calls_of, reasoning_of
from pdserve.turns.turn import Turn


class EmbedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the embedding of a prompt; see `engine.llm.LLM.embed`."""

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None


class GenerateCall(msgspec.Struct, frozen=True, kw_only=True):
    """prompt: a text or token ids. sampling: None for the model's defaults, and sampling_fields:
    what is said beside these, of SamplingParams' names; only without sampling. stream: False asks
    for one Whole, True for OutputChunks as they come. timeline: the Whole is to say where time and
    bytes went. priority, cache_salt, session_id: as of `router.request.service.Service.admit`.
    structured_outputs: see `text.grammars.structured.structured_outputs`; None: any text.
    turn: a conversation in place of the prompt, which is empty then; its answer has pieces.
    traceparent: the caller's W3C trace context; empty: it has none. embed: the prompt is to be
    embedded, which one EmbeddedWhole answers; None: it is to be gone on with."""

    prompt: str | list[int]
    sampling: SamplingParams | None
    stream: bool
    priority: int = 0
    cache_salt: str = ""
    timeline: bool = False
    session_id: str = ""
    structured_outputs: dict[str, Any] | None = None
    turn: Turn | None = None
    traceparent: str = ""
    sampling_fields: dict[str, Any] = {}
    embed: EmbedFields | None = None

    def resolved(self, defaults: Mapping[str, Any]) -> tuple[SamplingParams | None, bool]:
        """How tokens are drawn, None: by the model's defaults alone; and whether the answer may end
        where the worker has no more room. defaults: the model's. ValueError names the field."""
        given = self.sampling_fields
        if not given:
            return self.sampling, self.sampling is None
        own: dict[str, Any] = {} if self.turn is None else {"max_tokens": None}
        return SamplingParams(**{**own, **defaults, **given}), "max_tokens" not in given


class OutputChunks(msgspec.Struct, frozen=True, tag="chunks"):
    chunks: list[OutputChunk]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole choice; the fields of `router.request.generation.ChoiceResult`. Of the answer to a
    conversation, text is its content."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stop_reason: int | str | None
    pieces: list[Piece] = []

    @property
    def reasoning(self) -> str:
        """The reasoning before the content; "" when there is none."""
        return reasoning_of(self.pieces)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls of tools, in order."""
        return calls_of(self.pieces)


class Whole(msgspec.Struct, frozen=True, kw_only=True, tag="whole"):
    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_cached_tokens: int
    timeline: PromptTimeline | None = None


class EmbeddedWhole(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """values: the embedding as little-endian float32."""

    request_id: str
    prompt_token_ids: list[int]
    values: bytes
    num_cached_tokens: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Ends the stream. status: as HTTP would say it."""

    status: int
    message: str


Answer = OutputChunks | Whole | EmbeddedWhole | Refused


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Which workers are there."""


class ChangeRole(msgspec.Struct, frozen=True, kw_only=True, tag="role"):
    worker: str
    role: str
    force: bool = False


class Scale(msgspec.Struct, frozen=True, kw_only=True, tag="scale"):
    """targets: workers by deployment key; what is not named stays."""

    targets: dict[str, int]
    force: bool = False


Order = Look | ChangeRole | Scale


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """worker: answers a ChangeRole; cluster: the others."""

    worker: WorkerReport | None = None
    cluster: ClusterReport | None = None


Outcome = Done | Refused

_call_decoder = msgspec.msgpack.Decoder(GenerateCall)
_answer_decoder = msgspec.msgpack.Decoder(Answer)
_order_decoder = msgspec.msgpack.Decoder(Order)
_outcome_decoder = msgspec.msgpack.Decoder(Outcome)
_encoder = msgspec.msgpack.Encoder()


def encode(message: GenerateCall | Answer | Order | Outcome) -> bytes:
    return _encoder.encode(message)


def decode_call(data: bytes) -> GenerateCall:
    """Raises msgspec.ValidationError."""
    return _call_decoder.decode(data)


def decode_answer(data: bytes) -> Answer:
    """Raises msgspec.ValidationError."""
    return _answer_decoder.decode(data)


def decode_order(data: bytes) -> Order:
    """Raises msgspec.ValidationError."""
    return _order_decoder.decode(data)


def decode_outcome(data: bytes) -> Outcome:
    """Raises msgspec.ValidationError."""
    return _outcome_decoder.decode(data)
