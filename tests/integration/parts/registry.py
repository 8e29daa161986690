"""A real registry on the loopback interface: Debian's docker-registry, filesystem storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.parts import packages, processes

_CONFIG = """\
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Have a registry for the length of a block; gives ``127.0.0.1:PORT``, which engines speak plain HTTP with."""
    program = packages.need("docker-registry", "docker-registry")
    port = processes.free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "registry.yml"
    config.write_text(_CONFIG.format(root=folder / "data", port=port))
    argv = [program, "serve", str(config)]
    with processes.server(argv, folder / "registry.log", healthy=lambda: processes.listens(port)):
        yield f"127.0.0.1:{port}"
