"""A page that looks at others in Chromium, without a screen and without talking to anyone, and says what it found."""

from __future__ import annotations

import http.server
import json
import queue
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.integration.parts import packages

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DARK = "--blink-settings=preferredColorScheme=0"
TIMEOUT_S = 300


def report(folder: Path, page: str, profile: Path, *flags: str, **documents: str) -> Any:
    """Serve a folder, open a page there, and return the JSON that it posts; ``documents`` are beside it, as JSON."""
    reports: queue.Queue[Any] = queue.Queue()
    answers = {"/look.html": ("text/html", page)}
    answers |= {f"/{name}.json": ("application/json", text) for name, text in documents.items()}

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any):
            super().__init__(*args, directory=str(folder))

        def do_GET(self) -> None:
            if self.path in answers:
                self._answer(*answers[self.path])
            else:
                super().do_GET()

        def do_POST(self) -> None:
            reports.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer("text/plain", "")

        def _answer(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Stay quiet."""

    # GitHub's machines have Chrome; Ubuntu's package of Chromium is a snap.
    browser = shutil.which("google-chrome") or packages.need("chromium", "chromium", "fonts-dejavu-core")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}/look.html"
        argv = [browser, *FLAGS, *flags, f"--user-data-dir={profile}", address]
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                answer = reports.get(timeout=TIMEOUT_S)
            finally:
                process.terminate()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not (isinstance(answer, dict) and "error" in answer), answer["error"]
    return answer


def luminance(colour: str) -> float:
    """Return WCAG's relative luminance of a colour as CSS writes it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
