"""Writes answers of /v1/responses: one response object, or a stream of named events that ends with
it.

    created, in_progress --> for each item: added --deltas--> done --> completed | incomplete
                       '--------------- error ---------------> error, failed

Items are sections of the answer (`text.answers.sections`). An item is made once, for its own events
and for the object, so a stream ends with the same object as a whole answer. Events get their
numbers when nothing can fail any more. Knows no HTTP. Made by `router.http.responses.dialect`, one
per call.
"""

import secrets
import time
from collections.abc import Iterable, Sequence

import msgspec

from pdserve.background.pace import Pace
from pdserve.protocol.events import TokenLogprob
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.router.errors import ApiError
from pdserve.router.http.json_pieces import Json, JsonPieces, json_array, json_bytes
from pdserve.router.http.openai.logprobs import position_json
from pdserve.router.http.responses.content_tokens import ContentTokens
from pdserve.router.http.responses.envelope import Envelope, failure
from pdserve.router.http.responses.output_items import EVENT_NAMES, OutputItem, Status
from pdserve.router.http.responses.requests import ResponsesRequest
from pdserve.router.request.chunks import OutputChunk
from pdserve.router.request.generation import ChoiceResult, Generation
from pdserve.text.answers.pieces import Piece, Reasoning, content_pieces
from pdserve.text.answers.sections import Closed, Grown, Opened, SectionEvent, Sections
from pdserve.text.tokenizer import Tokenizer

# an event without its number: (its name; its members as JSON, without type and sequence_number)
Event = tuple[str, bytes]

# an event of more text of a message: the event's number, the item's place, the text
_TEXT = (
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    b'"sequence_number":%d,%s,"delta":%s,"logprobs":[]}\n\n'
)
PACED_TOKENS = 64  # tokens whose log-probabilities are encoded between two looks at the clock


class ResponsesResponder:
    """Writes the answer of one call; implements `answers.Responder`.

    `defaults` are the model's sampling parameters.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        generation: Generation,
        tokenizer: Tokenizer,
        defaults: SamplingParams,
        shows_timeline: bool = False,
    ) -> None:
        generation.forget_prompts()
        self._generation = generation
        self._tokenizer = tokenizer
        self._shows_timeline = shows_timeline
        self._shows_reasoning = request.include_reasoning is not False
        self._shows_stop = bool(request.include_stop_str_in_output)
        self._num_top = request.top_logprobs or 0
        self._envelope = Envelope(request, generation.request_id, int(time.time()), defaults)
        generation.hold(self._envelope.num_bytes)
        self._tokens: ContentTokens | None = None
        if request.wants_logprobs:
            skips = request.skip_special_tokens is not False
            self._tokens = ContentTokens(tokenizer, generation.reading, skips)
        self._scores: dict[int, list[bytes]] = {}  # by number of a run of content without an item
        self._name = secrets.token_hex(12)
        self._sections = Sections()
        self._items: list[OutputItem] = []
        self._growing: OutputItem | None = None  # a message whose text may go the short way
        self._reason: str | None = None
        self._has_begun = False
        self._num_events = 0

    @property
    def prepares(self) -> bool:
        return False

    async def prepare(self, chunk: OutputChunk) -> None:
        return None

    def stream(self, chunk: OutputChunk) -> bytes:
        """Makes the events of a chunk; see `answers.Responder`."""
        growing = self._growing
        if growing is not None and not chunk.pieces and chunk.finish_reason is None:
            return self._more_text(growing, chunk.text)
        self._generation.hold(sum(len(getattr(p, "text", "")) for p in chunk.all_pieces()))
        self._reason = chunk.finish_reason
        self._score(chunk.logprobs, chunk.finish_reason, chunk.stop_reason)
        events = self._begin()
        for change in self._sections.push(self._shown(chunk.all_pieces())):
            events += self._events(change)
        last = self._items[-1] if self._items else None
        is_plain = last is not None and last.section.kind == "content" and not last.json
        self._growing = last if is_plain and self._tokens is None else None
        return self._written(events)

    def _more_text(self, item: OutputItem, text: str) -> bytes:
        """Makes the event of a chunk that only adds text to the open message.

        Nearly all chunks go this short way. The bytes are the same as without it.
        """
        if not text:
            return b""
        self._generation.hold(len(text))
        item.section.grow(text)
        number = self._num_events
        self._num_events += 1
        return _TEXT % (number, item.place, json_bytes(text))

    async def ending(self) -> bytes:
        events = self._begin()
        for change in self._sections.finish():
            events += self._events(change, is_last=True)
        with self._generation.pacer.pace() as pace:
            response = b"".join(await self._response(pace))
        kind = "response.incomplete" if self._reason == "length" else "response.completed"
        return self._written([*events, (kind, b'"response":' + response)])

    def failed(self, error: ApiError) -> bytes:
        """Makes the error's own event, and the response with what exists of it."""
        shown = {"code": error.reason, "message": error.message, "param": error.param}
        items = [item.json or item.whole("incomplete") for item in self._items]
        response = self._envelope.pieces("failed", items, error=failure(error))
        events = self._begin()
        events.append(("error", json_bytes(shown)[1:-1]))
        events.append(("response.failed", b'"response":' + b"".join(response)))
        return self._written(events)

    async def whole(self, results: Sequence[ChoiceResult]) -> JsonPieces:
        [result] = results
        self._reason = result.finish_reason
        pieces = result.pieces
        if self._generation.reading is None:
            pieces = list(content_pieces(result.text))
        answer = JsonPieces()
        with self._generation.pacer.pace() as pace:
            await self._score_paced(result, pace)
            for change in self._sections.push(self._shown(pieces)):
                self._apply(change)
            for change in self._sections.finish():
                self._apply(change, is_last=True)
            self._generation.hold(answer.add(await self._response(pace)))
        return answer

    def _shown(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        if self._shows_reasoning:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Reasoning)]

    async def _response(self, pace: Pace) -> list[bytes]:
        """Makes the object of an answer that has ended, in pieces of JSON."""
        is_cut = self._reason == "length"
        extra: Json = {}
        if self._shows_timeline:
            timelines = await json_array(self._generation.timelines(), pace)
            extra = {"timeline": msgspec.Raw(timelines)}
        return self._envelope.pieces(
            "incomplete" if is_cut else "completed",
            [item.json for item in self._items],
            usage=self._usage(),
            incomplete="max_output_tokens" if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            extra=extra,
        )

    def _usage(self) -> Json:
        prompt = self._generation.num_prompt_tokens
        generated = self._generation.num_generated_tokens
        cached = self._generation.num_cached_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self._generation.num_reasoning_tokens},
            "total_tokens": prompt + generated,
        }

    # --- items ---

    def _apply(self, change: SectionEvent, is_last: bool = False) -> OutputItem:
        """Updates the items. `is_last` is True if the answer's end closes the section."""
        section = change.section
        if isinstance(change, Opened):
            run = sum(item.section.kind == "content" for item in self._items)
            item = OutputItem(section, self._name, run)
            self._items.append(item)
        item = self._items[section.index]
        if section.kind == "content":
            for entry in self._scores.pop(item.run, ()):
                item.add_scores(entry)
        if isinstance(change, Closed):
            is_cut = (is_last and self._reason == "length") or not section.is_complete
            status: Status = "incomplete" if is_cut else "completed"
            item.close(status)
            self._generation.hold(len(item.json))
        return item

    # --- log-probabilities ---

    def _score(
        self,
        tokens: Sequence[TokenLogprob],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> None:
        """Keeps the log-probabilities of content until its item shows them."""
        if self._tokens is None:
            return
        is_stop_string = isinstance(stop_reason, str)
        if finish_reason in ("stop", "tool_calls") and not is_stop_string and not self._shows_stop:
            tokens = tokens[:-1]  # the token that ended the answer is no text
        for run, token in self._tokens.push(tokens):
            self._keep(run, token)
        if finish_reason is not None and not is_stop_string:
            for run, token in self._tokens.finish():
                self._keep(run, token)

    async def _score_paced(self, result: ChoiceResult, pace: Pace) -> None:
        for start in range(0, len(result.logprobs), PACED_TOKENS):
            if pace.is_due:
                await pace.rest()
            end = start + PACED_TOKENS
            is_last = end >= len(result.logprobs)
            reason = result.finish_reason if is_last else None
            self._score(result.logprobs[start:end], reason, result.stop_reason)

    def _keep(self, run: int, token: TokenLogprob) -> None:
        entry = json_bytes(position_json(self._tokenizer, token, self._num_top))
        self._generation.hold(len(entry))
        self._scores.setdefault(run, []).append(entry)

    # --- events ---

    def _begin(self) -> list[Event]:
        """Makes the events before the first item; none if they were made already."""
        if self._has_begun:
            return []
        self._has_begun = True
        response = b'"response":' + b"".join(self._envelope.pieces("in_progress"))
        return [("response.created", response), ("response.in_progress", response)]

    def _events(self, change: SectionEvent, is_last: bool = False) -> list[Event]:
        item = self._apply(change, is_last)
        kind = change.section.kind
        name = f"response.{EVENT_NAMES[kind]}"
        index = b'"output_index":%d,"item":' % change.section.index
        if isinstance(change, Opened):
            added = ("response.output_item.added", index + item.opened())
            if kind == "call":
                return [added]
            part = item.place + b',"part":' + item.part(is_closed=False)
            return [added, ("response.content_part.added", part)]
        if isinstance(change, Grown):
            return [(f"{name}.delta", self._delta(item, change.text))]
        events: list[Event] = []
        if item.has_new_scores:
            events.append((f"{name}.delta", self._delta(item, "")))
        events.append((f"{name}.done", item.place + b"," + item.done_members()))
        if kind != "call":
            part = item.place + b',"part":' + item.part(is_closed=True)
            events.append(("response.content_part.done", part))
        return [*events, ("response.output_item.done", index + item.json)]

    def _delta(self, item: OutputItem, text: str) -> bytes:
        members = item.place + b',"delta":' + json_bytes(text)
        if item.section.kind != "content":
            return members
        return members + b',"logprobs":[' + item.new_scores() + b"]"

    def _written(self, events: Iterable[Event]) -> bytes:
        """Returns the events as they are sent, with their numbers."""
        data = bytearray()
        for name, members in events:
            kind = name.encode()
            data += b'event: %s\ndata: {"type":"%s","sequence_number":%d,%s}\n\n' % (
                kind,
                kind,
                self._num_events,
                members,
            )
            self._num_events += 1
        return bytes(data)
