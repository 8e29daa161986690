"""A server that answers the calls of GitHub's REST interface that we make, and keeps what it was told."""

from __future__ import annotations

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-token-that-must-not-be-seen"


class Api:
    """Issues, pull requests, comments and releases in memory; anything without the token is refused."""

    def __init__(self) -> None:
        self.issues: list[dict[str, Any]] = []
        self.pulls: list[dict[str, Any]] = []
        self.comments: list[str] = []
        self.releases: list[dict[str, Any]] = []
        self.assets: dict[str, bytes] = {}
        self.faults: list[int] = []  # statuses that the next calls are answered with
        self._numbers = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        parts = path.strip("/").split("/")[3:]  # after repos/owner/name
        if parts[:1] == ["assets"]:
            self.assets[query["name"][0]] = body
            return 201, {}
        told = json.loads(body) if body else {}
        kept = {"issues": self.issues, "pulls": self.pulls, "releases": self.releases}[parts[0]]
        if parts[2:] == ["comments"]:
            self.comments.append(told["body"])
            return 201, {}
        if method == "GET":
            return 200, [each for each in kept if matches(each, query)]
        if method == "POST":
            number = next(self._numbers)
            made = told | {
                "number": number,
                "id": number,
                "state": "open",
                "html_url": f"{self.url}/{parts[0]}/{number}",
            }
            made["upload_url"] = f"{self.url}/repos/o/r/assets{{?name,label}}"
            kept.append(made)
            return 201, made
        found = next(each for each in kept if each["number"] == int(parts[1]))
        found.update(told)
        return 200, found

    def _handler(api) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def handle_one(self) -> None:
                parts = urlsplit(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    status, said = 401, {"message": "Bad credentials"}
                elif api.faults:
                    status, said = api.faults.pop(0), {"message": "try later"}
                else:
                    status, said = api.answer(self.command, parts.path, parse_qs(parts.query), body)
                content = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PATCH = handle_one

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def matches(entry: dict[str, Any], query: dict[str, list[str]]) -> bool:
    """Say whether GitHub would list an entry for this query."""
    head = query.get("head", [""])[0].rpartition(":")[2]
    labels = query.get("labels", [])
    return (
        entry["state"] in query.get("state", ["open"])
        and (not head or entry.get("head") == head)
        and all(label in entry.get("labels", []) for label in labels)
    )
