"""The file of a sweep: JSON lines, added as windows end, and read again to resume or to be shown.

A window has a line of kind "begun" when it starts. When it has ended, there is a line of kind
"request" for each of its requests, then one of kind "window" with its figures. A window without
that last line was cut off, and is replayed again. Called by sweep.py and commands.py.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pdserve.bench.record import check_writable
from pdserve.bench.replay.figures import RequestRecord, Run, Settings, WindowResult


class Begun(msgspec.Struct, frozen=True, tag="begun", tag_field="kind"):
    """A window of these settings has started."""

    settings: Settings


START = b'{"kind":"begun"'  # of every file
_line = msgspec.json.Decoder(Begun | RequestRecord | WindowResult).decode


class Store:
    """The finished windows, and how often each was begun. If path is None, they are kept only in
    memory. A file that is read only is never changed.

    Raises a ValueError that names the line of a file of another kind, which stays as it is, and
    OSError if the file cannot be written.
    """

    def __init__(self, path: Path | None, is_read_only: bool = False) -> None:
        self._path = path
        self.runs: list[Run] = []
        self._begun: list[Settings] = []
        if path is None:
            return
        content = b""
        if path.is_file():
            content = path.read_bytes()
        elif path.exists():
            raise ValueError(f"{path} is not a file: name another one for --out")
        whole = content.rfind(b"\n") + 1
        self._read(path, content[:whole])
        if not whole and not (START.startswith(content) or content.startswith(START)):
            raise _of_another_kind(path, 1, "it is no JSON line of ours")
        if is_read_only:
            return
        check_writable(path)  # before anything is sent
        if whole < len(content):
            os.truncate(path, whole)  # the last line was not written to its end

    def find(self, settings: Settings) -> Run | None:
        """Returns the newest finished window of these settings, or None."""
        matching = (run for run in reversed(self.runs) if run.result.settings == settings)
        return next(matching, None)

    def begin(self, settings: Settings) -> int:
        """Notes that a window starts. Returns how often it was begun, including this time.

        Each time has its own tokens, because a server may have cached those of a window that was
        cut off.
        """
        self._begun.append(settings)
        self._write([Begun(settings)])
        return self._begun.count(settings)

    def add(self, run: Run) -> None:
        """Keeps a window that has ended."""
        self.runs.append(run)
        self._write([*run.records, run.result])

    def _write(self, lines: Sequence[Begun | RequestRecord | WindowResult]) -> None:
        if self._path is not None:
            with self._path.open("ab") as out:
                out.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
                out.flush()
                os.fsync(out.fileno())

    def _read(self, path: Path, content: bytes) -> None:
        records: list[RequestRecord] = []
        for number, text in enumerate(content.splitlines(), 1):
            try:
                line = _line(text)
            except msgspec.MsgspecError as error:
                raise _of_another_kind(path, number, str(error)) from error
            if isinstance(line, RequestRecord):
                records.append(line)
            elif isinstance(line, Begun):
                self._begun.append(line.settings)
                records = []
            else:
                self.runs.append(Run(line, records))
                records = []


def _of_another_kind(path: Path, number: int, why: str) -> ValueError:
    return ValueError(
        f"{path}, line {number} was not written by `pdserve bench replay` ({why}): name a file "
        "that was, or one that does not exist yet for --out"
    )
