"""A page that looks at others in Chromium, without a screen and without talking to anyone, and says what it found."""

from __future__ import annotations

import http.server
import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.integration.parts import packages

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DARK = "--blink-settings=preferredColorScheme=0"
TIMEOUT_S = 120


def report(folder: Path, own: Mapping[str, tuple[str, bytes]], page: str, profile: Path, *flags: str) -> Any:
    """Serve a folder, and by path ``own`` files of a type, open ``page``, and return the JSON that it posts."""
    reports: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any):
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            if self.path in own:
                self._answer(*own[self.path])
            else:
                super().do_GET()

        def do_POST(self) -> None:
            reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer("text/plain", b"")

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Stay quiet."""

    # GitHub's machines have Chrome; Ubuntu's package of Chromium is a snap.
    browser = shutil.which("google-chrome") or packages.need("chromium", "chromium", "fonts-dejavu-core")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}{page}"
        argv = [browser, *FLAGS, *flags, f"--user-data-dir={profile}", address]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                found = reports.get(timeout=TIMEOUT_S)
            finally:
                process.terminate()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not (isinstance(found, dict) and "error" in found), found["error"]
    return found
