"""A real Bazel, and a server that keeps what it PUTs."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.integration.parts import packages

TIMEOUT_S = 120
ACTIONS = 6


class Keeper(BaseHTTPRequestHandler):
    """Keeps what is PUT, as bazel-remote does."""

    protocol_version = "HTTP/1.1"
    entries: dict[str, bytes]

    def do_GET(self) -> None:
        found = self.entries.get(self.path)
        self._answer(404 if found is None else 200, found or b"")

    def do_PUT(self) -> None:
        self.entries[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@dataclass
class Remote:
    """Where it listens, and what it keeps."""

    server: ThreadingHTTPServer
    entries: dict[str, bytes] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def remote() -> Iterator[Remote]:
    """A cache server in this process, in place of bazel-remote."""
    entries: dict[str, bytes] = {}
    made = Remote(ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Keeper,), {"entries": entries})), entries)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield made
    made.stop()


@dataclass(frozen=True)
class Build:
    """What a run of Bazel did."""

    code: int
    said: str
    ran: int
    found: int


@dataclass
class Bazel:
    """A real Bazel and a workspace whose actions need nothing from outside."""

    workspace: Path
    state: Path

    def __call__(self, *args: str, rc: Path | None = None) -> subprocess.CompletedProcess[str]:
        startup = [f"--output_user_root={self.state}", "--nohome_rc", "--host_jvm_args=-Xmx512m"]
        startup += [f"--bazelrc={rc}"] if rc else []
        return subprocess.run(
            ["bazel", *startup, *args], cwd=self.workspace, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    def build(self, rc: Path) -> Build:
        """Build everything, from nothing but the cache."""
        self("clean", rc=rc)
        done = self("build", "//...", "--nosandbox_debug", "--noshow_progress", rc=rc)
        words = next((line for line in done.stderr.splitlines() if " processes:" in line), "").rstrip(".").split(", ")
        counts = {word.split(" ", 1)[1]: int(word.split(" ", 1)[0]) for word in words if word[:1].isdigit()}
        head = words[0].rpartition(": ")[2].split(" ", 1)
        if len(head) == 2:
            counts[head[1]] = int(head[0])
        found = counts.pop("remote cache hit", 0) + counts.pop("disk cache hit", 0)
        ran = sum(count for kind, count in counts.items() if "sandbox" in kind or "local" in kind)
        return Build(done.returncode, done.stderr, ran, found)


@pytest.fixture(scope="module")
def bazel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bazel]:
    """A workspace of six actions; the last needs the others. Each output is 200 kB or more."""
    packages.need("bazel", "bazel-bootstrap")
    folder = tmp_path_factory.mktemp("bazel")
    workspace = folder / "workspace"
    workspace.mkdir()
    (workspace / "WORKSPACE").touch()
    (workspace / "BUILD").write_text(
        '[genrule(name = "p%d" % n, outs = ["p%d.txt" % n], cmd = "seq %d 40000 > $@" % n)'
        f" for n in range({ACTIONS - 1})]\n"
        f'genrule(name = "all", srcs = [":p%d" % n for n in range({ACTIONS - 1})], outs = ["all.txt"],'
        ' cmd = "cat $(SRCS) > $@")\n'
    )
    made = Bazel(workspace, folder / "state")
    yield made
    made("shutdown")
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)
