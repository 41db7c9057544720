"""A worker's shell without Ray: several routers, in processes of their own, reach one engine host
over a unix socket.

`run_shell` runs in a thread of the host's process and passes bytes between routers and the engine,
as cluster.deployments.worker_replica does. `ShellLink` is router.fleet.link.WorkerLink over it,
`watch` keeps a fleet equal to the sockets of a folder. A connection opens with its purpose,
`commands` or `events router_id session`; frames are length-prefixed.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator
from pathlib import Path

from pdserve.protocol.codec import encode
from pdserve.protocol.commands import Command
from pdserve.router.fleet.fleet import Fleet
from pdserve.router.fleet.link import WorkerLost
from pdserve.worker.engine_client import EngineClient, EngineGone

SEND_DEADLINE_S = 10.0
LOOK_S = 0.2
_LENGTH = struct.Struct("!I")


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame; None at the end, also in the middle of one."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def _write(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(_LENGTH.pack(len(frame)) + frame)
    await writer.drain()


# The worker's end.


def run_shell(engine_address: str, path: Path) -> None:
    """Until the engine goes. The socket appears when the shell takes connections."""
    asyncio.run(_serve(engine_address, path))


async def _serve(engine_address: str, path: Path) -> None:
    client = EngineClient(engine_address)
    await client.connected.wait()
    server = await asyncio.start_unix_server(
        lambda reader, writer: _connected(client, reader, writer), path
    )
    async with server:
        await client.closed.wait()


async def _connected(
    client: EngineClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.suppress(EngineGone, ConnectionError):
        match (await _read(reader) or b"").split():
            case [b"commands"]:
                while (frame := await _read(reader)) is not None:
                    client.send_encoded(frame)
            case [b"events", router_id, session]:
                await _stream(client, router_id.decode(), int(session), reader, writer)
    writer.close()


async def _stream(
    client: EngineClient,
    router_id: str,
    session: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    """Until the engine or the router goes; the router's end is noticed while it is frozen, too."""
    batches = client.subscribe(router_id, session)

    async def pump() -> None:
        async for batch in batches:
            await _write(writer, batch)

    pumping = asyncio.ensure_future(pump())
    gone = asyncio.ensure_future(_read(reader))
    await asyncio.wait({pumping, gone}, return_when=asyncio.FIRST_COMPLETED)
    for task in (pumping, gone):
        task.cancel()
    await asyncio.gather(pumping, gone, return_exceptions=True)
    await batches.aclose()


# The router's end.


class ShellLink:
    """One worker, seen from one router process. path: of the shell's socket."""

    def __init__(self, worker_id: str, path: Path) -> None:
        self.worker_id = worker_id
        self._path = path
        self._commands: asyncio.StreamWriter | None = None
        self._lock = asyncio.Lock()

    async def _open(self, purpose: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self._path)
        await _write(writer, purpose.encode())
        return reader, writer

    async def send(self, command: Command) -> None:
        try:
            async with asyncio.timeout(SEND_DEADLINE_S), self._lock:
                if self._commands is None:
                    _, self._commands = await self._open("commands")
                await _write(self._commands, encode(command))
        except (OSError, TimeoutError) as error:
            self.close()
            raise WorkerLost(repr(error)) from error

    async def events(self, router_id: str, session: int) -> AsyncGenerator[bytes, None]:
        try:
            reader, writer = await self._open(f"events {router_id} {session}")
        except OSError as error:
            raise WorkerLost(repr(error)) from error
        try:
            while (batch := await _read(reader)) is not None:
                yield batch
        finally:
            writer.close()

    def close(self) -> None:
        if self._commands is not None:
            self._commands.close()
            self._commands = None


async def watch(fleet: Fleet, folder: Path) -> None:
    """Keep the fleet equal to the shells in a folder: `worker_id.sock` each."""
    links: dict[str, ShellLink] = {}
    while True:
        present = {path.stem: path for path in folder.glob("*.sock")}
        for worker_id, path in present.items():
            if worker_id not in links:
                links[worker_id] = ShellLink(worker_id, path)
            fleet.join(links[worker_id])
        for worker_id in links.keys() - present.keys():
            links.pop(worker_id).close()
            fleet.leave(worker_id)
        await asyncio.sleep(LOOK_S)
