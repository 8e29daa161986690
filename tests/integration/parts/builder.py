"""A builder of its own (driver ``remote``): the BuildKit inside of a Docker engine, reached by its own protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.parts import loops

_UPGRADE = b"POST /grpc HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"


@contextmanager
def running(engine: str, socket: Path) -> Iterator[str]:
    """Have BuildKit's own protocol at a socket; ``engine`` is a DOCKER_HOST, what it gives is for ``buildx create``."""
    tasks = set[object]()
    servers = list[asyncio.Server]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # the loop itself holds its tasks weakly
        up_reader, up_writer = await asyncio.open_unix_connection(engine.removeprefix("unix://"))
        up_writer.write(_UPGRADE)
        answer = await up_reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in answer.splitlines()[0], answer
        await asyncio.gather(_copy(reader, up_writer), _copy(up_reader, writer))

    async def start() -> None:
        servers.append(await asyncio.start_unix_server(serve, socket))

    with loops.serving(start):
        yield f"unix://{socket}"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()
