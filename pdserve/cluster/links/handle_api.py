"""The messages between the Python client and a router's handle methods, as msgspec types.

Each prompt is one call: a `GenerateCall` goes in and a stream of answers comes out. Each `Order` of
an operator is one call, answered by one `Outcome`. Bytes go over the wire, so both ends need to
agree only on these types. Used by `cluster.client` and `cluster.deployments.router_replica`. Knows
no torch and no Ray.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.admin import ClusterReport, WorkerReport
from pdserve.router.expert_load import ExpertLoadReport
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
    """Asks for the answer to one prompt or one conversation, or for one embedding.

    - `prompt`: a text or token ids; empty if there is a `turn`.
    - `sampling`: how tokens are drawn; None means by the model's defaults.
    - `stream`: True asks for OutputChunks as they come, False for one Whole.
    - `priority`, `cache_salt`, `session_id`: as in `router.request.service.Service.admit`.
    - `timeline`: True if the Whole must show where time and bytes went.
    - `structured_outputs`: see `text.grammars.structured.structured_outputs`; None allows any text.
    - `turn`: a conversation in place of the prompt; its answer has pieces.
    - `traceparent`: the caller's W3C trace context; empty if it has none.
    - `sampling_fields`: fields of SamplingParams that override the defaults; only without
      `sampling`.
    - `embed`: asks for one EmbeddedWhole; None asks for generated tokens.
    """

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
        """Returns the sampling parameters, and whether the answer may end where the worker has no
        more room.

        `defaults` are the model's. The parameters are None if only the defaults count. Raises a
        ValueError that names the field.
        """
        given = self.sampling_fields
        if not given:
            return self.sampling, self.sampling is None
        own: dict[str, Any] = {} if self.turn is None else {"max_tokens": None}
        return SamplingParams(**{**own, **defaults, **given}), "max_tokens" not in given


class OutputChunks(msgspec.Struct, frozen=True, tag="chunks"):
    chunks: list[OutputChunk]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One whole choice; it has the fields of `router.request.generation.ChoiceResult`.

    In the answer to a conversation, `text` is its content.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stop_reason: int | str | None
    pieces: list[Piece] = []

    @property
    def reasoning(self) -> str:
        """The reasoning before the content; "" if there is none."""
        return reasoning_of(self.pieces)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls, in order."""
        return calls_of(self.pieces)


class Whole(msgspec.Struct, frozen=True, kw_only=True, tag="whole"):
    request_id: str
    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None
    num_cached_tokens: int
    timeline: PromptTimeline | None = None


class EmbeddedWhole(msgspec.Struct, frozen=True, kw_only=True, tag="embedded"):
    """An embedding. `values` holds it as little-endian float32."""

    request_id: str
    prompt_token_ids: list[int]
    values: bytes
    num_cached_tokens: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Ends the stream. `status` is the HTTP status that says the same."""

    status: int
    message: str


Answer = OutputChunks | Whole | EmbeddedWhole | Refused


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Asks which workers there are."""


class ChangeRole(msgspec.Struct, frozen=True, kw_only=True, tag="role"):
    worker: str
    role: str
    force: bool = False


class Scale(msgspec.Struct, frozen=True, kw_only=True, tag="scale"):
    """Sets the number of workers by deployment key; a deployment that is not named keeps its
    number."""

    targets: dict[str, int]
    force: bool = False


class LookAtExperts(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Asks for the load of the experts of the workers that have this role; "": of all workers."""

    role: str = ""


Order = Look | ChangeRole | Scale | LookAtExperts


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """Answers an Order: a ChangeRole with `worker`, a LookAtExperts with `experts`, any other with
    `cluster`."""

    worker: WorkerReport | None = None
    cluster: ClusterReport | None = None
    experts: ExpertLoadReport | None = None


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
