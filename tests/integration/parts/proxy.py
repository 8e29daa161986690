"""A proxy in front of a real server that answers some requests with errors and cuts others in the middle."""

from __future__ import annotations

import contextlib
import math
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Fault:
    """What happens to the next ``times`` requests that match.

    Attributes
    ----------
    request
        A pattern of method and path, e.g. ``PUT .*/manifests/``.
    status
        Answer this in place of the server.
    cut_after
        Or pass this many bytes of the request's body on, then cut the connection; 0: cut it at once. Of no request
        that says its body is no longer.
    cut_answer
        Or pass this many bytes of the answer on, then cut the connection. Of no shorter answer.
    hold
        Or set ``reached`` and wait for ``released``, then go on as if nothing had been; of an answer before it is cut.
    """

    request: str
    times: int = 1
    status: int | None = None
    cut_after: int | None = None
    cut_answer: int | None = None
    hold: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Stop here, if that is the fault."""
        if self.hold:
            self.reached.set()
            self.released.wait(60)


class FaultyProxy(socketserver.ThreadingTCPServer):
    """Where it listens, what it does wrong, and what was asked of it."""

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.upstream, self.address = int(upstream.rpartition(":")[2]), f"127.0.0.1:{self.server_address[1]}"
        self.faults: list[Fault] = []
        self.requests: list[str] = []

    def count(self, pattern: str) -> int:
        """Return how many requests matched a pattern, failed ones too."""
        return sum(re.match(pattern, line) is not None for line in self.requests)

    def find_fault(self, line: str, length: float) -> Fault:
        """Return what is to happen to a request."""
        for fault in self.faults:
            if fault.times > 0 and re.match(fault.request, line) and length > (fault.cut_after or -1):
                fault.times -= fault.cut_answer is None
                return fault
        return Fault(line)


class _Request(socketserver.StreamRequestHandler):
    """One connection, of one request."""

    server: FaultyProxy

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            if self.rfile.peek(1)[:1] == b"\x16":  # engines try TLS first; this is how a server without it answers
                self._answer(400)
                return
            lines: list[bytes] = []
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                lines.append(line)
            self._decide(b"".join(lines))

    def _answer(self, status: int) -> None:
        self.wfile.write(b"HTTP/1.1 %d Fault\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % status)

    def _decide(self, head: bytes) -> None:
        line, length = head.split(b"\r\n", 1)[0].decode(), re.search(rb"(?im)^content-length: ([^\r]*)", head)
        self.server.requests.append(line)
        fault = self.server.find_fault(line, float(length[1]) if length else math.inf)
        if fault.cut_answer is None:
            fault.wait()
        if fault.status is not None:
            self._answer(fault.status)
        elif fault.cut_after != 0:
            with socket.create_connection(("127.0.0.1", self.server.upstream)) as up:
                up.sendall(re.sub(rb"(?im)^connection: .*\n", b"", head) + b"Connection: close\r\n\r\n")
                sender = threading.Thread(target=self._send, args=(up, fault.cut_after))
                sender.start()
                with contextlib.suppress(OSError):
                    self._receive(up, fault)
                    self.connection.shutdown(socket.SHUT_RDWR)
                sender.join()

    def _send(self, up: socket.socket, room: int | None) -> None:
        with contextlib.suppress(OSError):
            while chunk := self.rfile.read1(65536):
                room = None if room is None else room - len(chunk)
                if room is not None and room <= 0:
                    up.shutdown(socket.SHUT_RDWR)
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                up.sendall(chunk)

    def _receive(self, up: socket.socket, fault: Fault) -> None:
        room = math.inf if fault.cut_answer is None else fault.cut_answer
        while chunk := up.recv(65536):
            room -= len(chunk)
            if room < 0:
                self.wfile.write(chunk[: int(room)])
                fault.times -= 1
                fault.wait()
                return
            self.wfile.write(chunk)


@contextmanager
def running(upstream: str) -> Iterator[FaultyProxy]:
    """Have a proxy in front of ``127.0.0.1:PORT`` for the length of a block."""
    with FaultyProxy(upstream) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        yield proxy
        proxy.shutdown()
