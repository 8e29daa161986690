"""A proxy in front of a registry that answers some requests with errors and cuts others in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.integration.parts import loops

_CHUNK = 65536


@dataclass
class Fault:
    """What happens to the next ``times`` requests that match.

    Attributes
    ----------
    request
        A pattern of method, path and the client's name, e.g. ``PUT .*/manifests/`` or ``GET .*python-requests``.
    status, headers
        Answer this in place of the registry.
    cut_after
        Or pass this many bytes of the request's body on, then reset the connection; 0: reset it at once. Of no request
        that says its body is no longer.
    hold
        Or set ``reached`` and wait for ``released``, then go on as if nothing had been.
    """

    request: str
    times: int = 1
    status: int | None = None
    headers: tuple[str, ...] = ()
    cut_after: int | None = None
    hold: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class FaultyProxy:
    """Where it listens, what it does wrong, and what was asked of it."""

    upstream: int
    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _running: set[object] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def count(self, pattern: str) -> int:
        """Return how many requests matched a pattern, failed ones too."""
        return sum(re.match(pattern, line) is not None for line in self.requests)

    def _fault(self, line: str, length: float) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.match(fault.request, line) and length > (fault.cut_after or -1):
                fault.times -= 1
                return fault
        return None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection: one request."""
        self._running.add(asyncio.current_task())  # the loop itself holds its tasks weakly
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            first = await reader.readexactly(1)
            if first == b"\x16":  # engines try TLS first; this is how a server without it answers
                writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
            else:
                await self._answer(first + await reader.readuntil(b"\r\n\r\n"), reader, writer)
        writer.close()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        agent = re.search(rb"\r\n(?i:user-agent): ([^\r]*)", head)
        line = b" ".join((head.split(b"\r\n", 1)[0], agent[1] if agent else b"")).decode()
        self.requests.append(line)
        length = re.search(rb"\r\n(?i:content-length): (\d+)", head)
        fault = self._fault(line, float(length[1]) if length else math.inf) or Fault(line)
        if fault.hold:
            fault.reached.set()
            await asyncio.to_thread(fault.released.wait, 60)
        if fault.status is not None:
            lines = (f"HTTP/1.1 {fault.status} Fault", "Connection: close", "Content-Length: 0", *fault.headers, "", "")
            writer.write("\r\n".join(lines).encode())
            await writer.drain()
        elif fault.cut_after == 0:
            writer.transport.abort()
        else:
            await self._pass_on(head, reader, writer, fault.cut_after)

    async def _pass_on(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut_after: int | None
    ) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        up_writer.write(re.sub(rb"\r\n(?i:connection): [^\r]*", b"", head[:-4]) + b"\r\nConnection: close\r\n\r\n")
        sending = asyncio.ensure_future(self._copy(reader, up_writer, cut_after))
        receiving = asyncio.ensure_future(self._copy(up_reader, writer, None))
        done, _ = await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
        if sending in done and sending.result() == "cut":
            writer.transport.abort()
        else:
            await receiving
        sending.cancel()
        receiving.cancel()
        up_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room: int | None) -> str:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK):
                if room is not None:
                    room -= len(chunk)
                    if room <= 0:
                        return "cut"
                writer.write(chunk)
                await writer.drain()
        return "end"


@contextmanager
def running(upstream: str) -> Iterator[FaultyProxy]:
    """Have a proxy in front of ``127.0.0.1:PORT`` for the length of a block."""
    proxy = FaultyProxy(int(upstream.rpartition(":")[2]))

    async def start() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
        proxy.port = server.sockets[0].getsockname()[1]

    with loops.serving(start):
        yield proxy
