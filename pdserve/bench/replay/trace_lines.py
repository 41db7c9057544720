"""Parses lines of the three formats of traces into requests: Mooncake's JSON lines, Azure's CSV of
LLM inference, and plain JSON lines.

Knows neither files nor windows. Each parser raises a ValueError with what is wrong and the cure;
its caller adds the file and the line. Called by trace.py.
"""

import csv
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

BLOCK_TOKENS = 512  # tokens per hash id of Mooncake
AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]

Format = Literal["mooncake", "azure", "plain"]
MOST_TOKENS = 10_000_000  # of a prompt or an answer, more than any model takes
Length = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float  # Its arrival in seconds, from any origin.
    input_length: int  # Tokens of the prompt, at least 1; 0 if the prompt is text.
    output_length: int  # Tokens of the answer, at least 1.
    # One id for each 512 tokens of the prompt; the last block may be shorter. Equal ids mean equal
    # tokens.
    hash_ids: tuple[int, ...] | None = None
    prompt: str | tuple[int, ...] | None = None  # The prompt itself, if the trace has it.


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: Length
    output_length: Length
    hash_ids: list[int]


class _PlainLine(msgspec.Struct):
    output_length: Length
    at_s: float | None = None
    timestamp: float | None = None
    prompt: str | list[TokenId] | None = None
    input_length: Length | None = None


_mooncake_line = msgspec.json.Decoder(_MooncakeLine).decode
_plain_line = msgspec.json.Decoder(_PlainLine).decode


def mooncake_request(line: bytes) -> TraceRequest:
    """Parses one of Mooncake's lines: timestamp (ms), input_length, output_length, hash_ids.

    Raises a ValueError that names the wrong field.
    """
    fields = _mooncake_line(line)
    num_blocks = -(-fields.input_length // BLOCK_TOKENS)
    if len(fields.hash_ids) != num_blocks:
        raise ValueError(
            f"hash_ids has {len(fields.hash_ids)} ids, but an input_length of "
            f"{fields.input_length} needs {num_blocks}, one for each {BLOCK_TOKENS} tokens: "
            "correct the line, or replay without shared prefixes by --format plain"
        )
    return TraceRequest(
        fields.timestamp / 1e3,
        fields.input_length,
        fields.output_length,
        hash_ids=tuple(fields.hash_ids),
    )


def azure_request(line: bytes) -> TraceRequest:
    """Parses one line of Azure's CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens.

    Raises a ValueError that names the wrong column.
    """
    cells = next(csv.reader([line.decode()]))
    if len(cells) != len(AZURE_HEADER):
        raise ValueError(
            f"the line has {len(cells)} columns instead of {len(AZURE_HEADER)} "
            f"({','.join(AZURE_HEADER)}): correct it, or name another --format"
        )
    try:
        at = datetime.datetime.fromisoformat(cells[0].strip())
    except ValueError:
        raise ValueError(
            f"TIMESTAMP must look like 2023-11-16 18:15:46.6805900, not {cells[0]!r}: correct it"
        ) from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=datetime.UTC)
    return TraceRequest(
        at.timestamp(), _cell(AZURE_HEADER[1], cells[1]), _cell(AZURE_HEADER[2], cells[2])
    )


def _cell(column: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(
            f"{column} must be a number of tokens, at least 1, not {text!r}: correct the line, or "
            "remove it"
        )
    return int(text)


def plain_request(line: bytes) -> TraceRequest:
    """Parses one plain line.

    It has at_s (seconds) or timestamp (ms), prompt (text or token ids) or input_length, and
    output_length. Other fields are not read. Raises a ValueError that names the wrong field.
    """
    fields = _plain_line(line)
    if (fields.at_s is None) == (fields.timestamp is None):
        raise ValueError("give either at_s (seconds) or timestamp (ms)")
    at_s = fields.at_s if fields.timestamp is None else fields.timestamp / 1e3
    assert at_s is not None
    prompt = fields.prompt
    if prompt is None:
        if fields.input_length is None:
            raise ValueError("give prompt (text or a list of token ids) or input_length (tokens)")
        return TraceRequest(at_s, fields.input_length, fields.output_length)
    if not prompt:
        raise ValueError("prompt is empty: a prompt needs at least one token")
    if isinstance(prompt, str):
        return TraceRequest(at_s, 0, fields.output_length, prompt=prompt)
    if fields.input_length not in (None, len(prompt)):
        raise ValueError(
            f"input_length is {fields.input_length}, but prompt has {len(prompt)} token ids: leave "
            "input_length out"
        )
    return TraceRequest(at_s, len(prompt), fields.output_length, prompt=tuple(prompt))


PARSERS: dict[Format, Callable[[bytes], TraceRequest]] = {
    "mooncake": mooncake_request,
    "azure": azure_request,
    "plain": plain_request,
}
