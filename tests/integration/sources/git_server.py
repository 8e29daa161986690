"""A smart-HTTP git server on this machine that counts what it sends, and can be told to fail as real ones do."""

from __future__ import annotations

import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK = 1 << 16


class GitServer:
    """Serves the bare repositories of one folder at ``url``.

    Attributes
    ----------
    sent, requests
        Bytes of response bodies, and paths asked for, so far.
    cut_after
        Break the connection once a pack response has this many bytes; None for never. ``cuts`` of them are made.
    stall_after
        Stop sending (but keep the connection) once a pack response has this many bytes; ``stalled`` is set then.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent, self.requests = folder, 0, list[str]()
        self.cut_after: int | None = None
        self.stall_after: int | None = None
        self.cuts, self.stalled, self.released = 0, threading.Event(), threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"git": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> GitServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    git: GitServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.answer(body)

    def answer(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        self.git.requests.append(path)
        env = {
            "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(self.git.folder), "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*", "PATH_INFO": path, "QUERY_STRING": query,
            "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers.get("Content-Type") or "",
            "CONTENT_LENGTH": str(len(body)), "REMOTE_ADDR": "127.0.0.1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol") or "",
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding") or "",
        }  # fmt: skip
        done = subprocess.run(["git", "http-backend"], env=env, input=body, capture_output=True)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(headers.pop("Status", "200 OK").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        limit = min((n for n in (self.git.cut_after, self.git.stall_after) if n is not None), default=len(content))
        if self.command == "POST" and path.endswith("/git-upload-pack") and limit < len(content):
            self.wfile.write(content[:limit])
            self.wfile.flush()
            self.fail()
        else:
            self.wfile.write(content)
        self.git.sent += len(content)

    def fail(self) -> None:
        if self.git.stall_after is not None:
            self.git.stalled.set()
            self.git.released.wait()
        else:
            self.git.cuts -= 1
            self.git.cut_after = self.git.cut_after if self.git.cuts > 0 else None
        self.connection.close()
