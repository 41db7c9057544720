"""`pdserve chat` as a person sees it: a process on a pseudo-terminal, and one with pipes."""

import asyncio
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "pdserve.cluster.cli", "chat"]
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
PATIENCE_S = 90.0  # on a machine that is busy
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def environment(**more: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return plain | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "LANG": "C.UTF-8"} | more


class Terminal:
    """A process whose terminal the test holds. raw: all that was written; `text` is that without
    colours."""

    def __init__(self, *arguments: str, **more: str) -> None:
        self.raw = ""
        self._seen = 0
        self._master, slave = pty.openpty()

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # a shell's jobs in the background, of which this test may be one, ignore it
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**more),
            preexec_fn=take_terminal,
        )
        os.close(slave)
        os.set_blocking(self._master, False)

    @property
    def text(self) -> str:
        return _CONTROL.sub("", self.raw)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    async def until(self, wanted: str) -> str:
        """Wait for a text behind what was waited for before. Returns what came up to its end."""
        limit = time.monotonic() + PATIENCE_S
        while (at := self.text.find(wanted, self._seen)) < 0:
            assert time.monotonic() < limit, (
                f"{wanted!r} does not come: {self.text[self._seen :]!r}"
            )
            self._read()
            await asyncio.sleep(0.01)
        found = self.text[self._seen : at + len(wanted)]
        self._seen = at + len(wanted)
        return found

    async def ask(self, line: str, wanted: str) -> str:
        """Type a line, and wait for a text behind its echo."""
        self.type(line + "\r")
        await self.until(line + "\n")
        return await self.until(wanted)

    async def left(self) -> int:
        """The exit status of a process that ends by itself."""
        limit = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < limit, f"it does not end: {self.text!r}"
            self._read()
            await asyncio.sleep(0.01)
        self._read()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self.raw += data.decode("utf-8", "replace")
        except OSError:  # nothing to read now, or the process has ended
            return


async def piped(text: str, *arguments: str, **more: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) with the text as stdin."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(**more),
    )
    out, errors = await asyncio.wait_for(process.communicate(text.encode()), PATIENCE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), errors.decode()
