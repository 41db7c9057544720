"""Reads a file of recorded requests, in any of three formats, plain or compressed (.xz, .gz).

Knows no rates and no prompts. Called by commands.py.
"""

import gzip
import hashlib
import lzma
import zlib
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.replay.trace_lines import AZURE_HEADER, PARSERS, Format, TraceRequest

XZ, GZIP = b"\xfd7zXZ\x00", b"\x1f\x8b"  # first bytes of such files
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which some programs write before the text of a CSV file


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival; the first arrives at 0 s.

    `name` is the file's name, and `digest` identifies its contents.
    """

    name: str
    digest: str
    requests: list[TraceRequest]

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].at_s


def read_trace(path: Path, format: Format | None = None) -> Trace:
    """Reads a whole trace. If `format` is None, its first line tells it.

    Raises OSError if the file cannot be read. Raises a ValueError that names the file, the line,
    what is wrong there and the cure.
    """
    raw = path.read_bytes()
    lines = _unpacked(path, raw).removeprefix(BYTE_ORDER_MARK).splitlines()
    first = next((line.strip() for line in lines if line.strip()), None)
    if first is None:
        raise ValueError(f"TRACE {path}: the file holds no requests: name another file")
    if format is None:
        format = _recognised(path, first)
    start = 0
    if format == "azure":
        if first.decode(errors="replace").split(",") != AZURE_HEADER:
            raise ValueError(
                f"TRACE {path}, line 1: the header of Azure's format is "
                f"{','.join(AZURE_HEADER)}, not {_short(first)}: correct it, or name another "
                "--format"
            )
        start = lines.index(next(line for line in lines if line.strip())) + 1
    requests = []
    for number, line in enumerate(lines[start:], start + 1):
        if line.strip():
            try:
                requests.append(PARSERS[format](line))
            except ValueError as error:  # msgspec's and Unicode's errors are ValueErrors
                raise ValueError(
                    f"TRACE {path}, line {number} (format {format}): {error}; the line is "
                    f"{_short(line)}"
                ) from error
    if not requests:
        raise ValueError(f"TRACE {path}: no request follows the header: name another file")
    origin = min(request.at_s for request in requests)
    moved = [_moved(request, origin) for request in requests]
    moved.sort(key=lambda request: request.at_s)
    return Trace(path.name, hashlib.sha256(raw).hexdigest()[:16], moved)


def _unpacked(path: Path, raw: bytes) -> bytes:
    try:
        if raw.startswith(XZ):
            return lzma.decompress(raw)
        if raw.startswith(GZIP):
            return gzip.decompress(raw)
    except (lzma.LZMAError, OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"TRACE {path} is compressed but damaged ({error}): copy the file again"
        ) from error
    return raw


def _recognised(path: Path, first: bytes) -> Format:
    if first.startswith(b"{"):
        return "mooncake" if b'"hash_ids"' in first else "plain"
    if first.startswith(b"TIMESTAMP"):
        return "azure"
    raise ValueError(
        f"TRACE {path}, line 1: {_short(first)} begins no known format. Mooncake's and plain files "
        f"hold a JSON object in each line, Azure's begin with {','.join(AZURE_HEADER)}: name the "
        "format by --format, or convert the file"
    )


def _moved(request: TraceRequest, origin: float) -> TraceRequest:
    return TraceRequest(
        request.at_s - origin,
        request.input_length,
        request.output_length,
        request.hash_ids,
        request.prompt,
    )


def _short(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 80 else text[:80] + "…")
