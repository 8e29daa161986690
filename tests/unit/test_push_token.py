"""The login with a token, against a server of this test that keeps what it was sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tooling.core import errors
from tooling.image import reference
from tooling.image.registry import Registry


class Server(ThreadingHTTPServer):
    """A registry with a token service. ``realm`` is where it sends clients to for a token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, str | None, dict[str, list[str]]]] = []
        self.realm = f"http://127.0.0.1:{self.server_port}/token"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if self.command == "POST" and path == "/token":
            query = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        authorization = self.headers.get("Authorization")
        self.server.seen.append((self.command, path, authorization, query))
        if path == "/token":
            self.answer(200, json.dumps({"token": query["scope"][0].rpartition(":")[2]}).encode())
        elif authorization is None:
            challenge = f'Bearer realm="{self.server.realm}",service="registry.example",scope="ignored"'
            self.answer(401, b"{}", ("WWW-Authenticate", challenge))
        elif self.command != "GET" and authorization != "Bearer pull,push":
            self.answer(403, b"{}")
        elif path.endswith("tags/list"):
            self.answer(200, b'{"tags": ["v1"]}')
        else:
            self.answer(202, b"", ("Location", f"/v2{path.removeprefix('/v2')}1?_state=x"))

    do_POST = do_DELETE = do_GET

    def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[Server]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # nothing of this machine's goes through a proxy
    running = Server()
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


def client(server: Server, tmp_path, **entry: str) -> Registry:
    (tmp_path / "config.json").write_text(json.dumps({"auths": {server.address: entry} if entry else {}}))
    return Registry(reference.make(f"{server.address}/team", "image", "v1"))


BASIC = "Basic " + base64.b64encode(b"me:my-password").decode()


def test_password_goes_to_the_token_service_only(server: Server, tmp_path) -> None:
    registry = client(server, tmp_path, auth=BASIC.removeprefix("Basic "))
    assert registry.tags() == ["v1"]
    registry.check_push()
    carried = {(path.split("/")[1], authorization) for _, path, authorization, _ in server.seen}
    assert carried == {("v2", None), ("token", BASIC), ("v2", "Bearer pull"), ("v2", "Bearer pull,push")}
    tokens = [query for _, path, _, query in server.seen if path == "/token"]
    assert tokens == [
        {"service": ["registry.example"], "scope": [f"repository:team/image:{scope}"]}
        for scope in ("pull", "pull,push", "pull,push")
    ]
    assert [method for method, path, *_ in server.seen if "/uploads/" in path] == ["POST", "POST", "DELETE", "DELETE"]


def test_identity_token_is_exchanged(server: Server, tmp_path) -> None:
    client(server, tmp_path, identitytoken="an-identity").tags()
    method, _, authorization, form = next(each for each in server.seen if each[1] == "/token")
    assert (method, authorization) == ("POST", None)
    assert form["refresh_token"] == ["an-identity"]
    assert form["grant_type"] == ["refresh_token"]


def test_nobody_gets_a_token_without_a_password(server: Server, tmp_path) -> None:
    client(server, tmp_path).tags()
    assert [authorization for _, path, authorization, _ in server.seen if path == "/token"] == [None]


def test_login_is_not_sent_in_the_open(server: Server, tmp_path) -> None:
    server.realm = "http://token.example/token"
    with pytest.raises(errors.RegistryError, match="in the open; it was not sent"):
        client(server, tmp_path, auth=BASIC.removeprefix("Basic ")).tags()
