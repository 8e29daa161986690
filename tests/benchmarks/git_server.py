"""A smart-HTTP git server on this machine that counts what it sends, and can be told to fail as real ones do."""

from __future__ import annotations

import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

CHUNK = 1 << 16


class GitServer:
    """Serves the bare repositories, and the plain files, of one folder at ``url``.

    Attributes
    ----------
    sent
        Bytes of response bodies so far.
    requests
        Paths asked for so far.
    cut_after
        Break the connection once a pack response has this many bytes; None for never. ``cuts`` of them are made.
    stall_after
        Stop sending (but keep the connection) once a pack response has this many bytes; ``stalled`` is set then.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent = 0
        self.requests: list[str] = []
        self.cut_after: int | None = None
        self.cuts = 0
        self.stall_after: int | None = None
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.guard = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """Where the folder is served."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> GitServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def log_message(self, format: str, *args: object) -> None:
                pass

            def answer(self) -> None:
                path, _, query = self.path.partition("?")
                with server.guard:
                    server.requests.append(path)
                file = server.folder / path.lstrip("/")
                if ".git/" not in path:
                    self.send_file(file)
                    return
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = self.read_chunks()
                self.run_backend(path, query, body)

            def send_file(self, file: Path) -> None:
                if not file.is_file():
                    self.send_error(404)
                    return
                content = file.read_bytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                with server.guard:
                    server.sent += len(content)

            def read_chunks(self) -> bytes:
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def run_backend(self, path: str, query: str, body: bytes) -> None:
                env = {
                    "PATH": os.environ["PATH"],
                    "GIT_PROJECT_ROOT": str(server.folder),
                    "GIT_HTTP_EXPORT_ALL": "1",
                    "GIT_CONFIG_NOSYSTEM": "1",
                    "GIT_CONFIG_GLOBAL": os.devnull,
                    "GIT_CONFIG_COUNT": "1",
                    "GIT_CONFIG_KEY_0": "safe.directory",
                    "GIT_CONFIG_VALUE_0": "*",
                    "PATH_INFO": path,
                    "QUERY_STRING": query,
                    "REQUEST_METHOD": self.command,
                    "CONTENT_TYPE": self.headers.get("Content-Type") or "",
                    "CONTENT_LENGTH": str(len(body)),
                    "REMOTE_ADDR": "127.0.0.1",
                }
                for name, variable in (("Git-Protocol", "GIT_PROTOCOL"), ("Content-Encoding", "HTTP_CONTENT_ENCODING")):
                    if self.headers.get(name):
                        env[variable] = str(self.headers[name])
                process = subprocess.Popen(
                    ["git", "http-backend"],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                feeder = threading.Thread(target=self.feed, args=(process, body), daemon=True)
                feeder.start()
                try:
                    self.relay(process, pack=self.command == "POST" and path.endswith("/git-upload-pack"))
                finally:
                    process.stdout.close()
                    process.wait()
                    feeder.join()

            @staticmethod
            def feed(process: subprocess.Popen[bytes], body: bytes) -> None:
                try:
                    process.stdin.write(body)
                    process.stdin.close()
                except BrokenPipeError:
                    pass

            def relay(self, process: subprocess.Popen[bytes], *, pack: bool) -> None:
                status, headers = "200 OK", []
                while line := process.stdout.readline().strip():
                    name, _, value = line.decode().partition(": ")
                    if name == "Status":
                        status = value
                    else:
                        headers.append((name, value))
                self.send_response(int(status.split()[0]))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                done = 0
                while chunk := process.stdout.read1(CHUNK):
                    room = self.room(done, pack)
                    if room is not None and len(chunk) >= room:
                        self.wfile.write(chunk[:room])
                        self.wfile.flush()
                        self.fail()
                        return
                    self.wfile.write(chunk)
                    done += len(chunk)
                    with server.guard:
                        server.sent += len(chunk)

            def room(self, done: int, pack: bool) -> int | None:
                limits = [limit for limit in (server.cut_after, server.stall_after) if limit is not None]
                return max(0, min(limits) - done) if pack and limits else None

            def fail(self) -> None:
                if server.stall_after is not None:
                    server.stalled.set()
                    server.released.wait()
                else:
                    server.cuts -= 1
                    if server.cuts <= 0:
                        server.cut_after = None
                self.connection.close()

        return Handler
