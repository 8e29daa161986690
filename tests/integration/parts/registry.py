"""A real registry on the loopback interface: Debian's docker-registry, filesystem storage."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from tests.integration.parts import packages, processes

_CONFIG = """\
version: 0.1
log: {{level: warn}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
{auth}http: {{addr: "127.0.0.1:{port}"}}
"""
_AUTH = "auth: {{htpasswd: {{realm: here, path: {}}}}}\n"


@contextmanager
def running(folder: Path, *, login: tuple[str, str] | None = None) -> Iterator[str]:
    """Have a registry for a block, as ``127.0.0.1:PORT``; it asks for a ``login`` of user and password, if any."""
    program = packages.need("docker-registry", "docker-registry")
    port = processes.free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "registry.yml"
    auth = ""
    if login:
        htpasswd = [packages.need("htpasswd", "apache2-utils"), "-niB", login[0]]
        hashed = subprocess.run(htpasswd, input=login[1], capture_output=True, text=True, check=True).stdout
        (folder / "htpasswd").write_text(hashed)
        auth = _AUTH.format(folder / "htpasswd")
    config.write_text(_CONFIG.format(root=folder / "data", port=port, auth=auth))
    argv = [program, "serve", str(config)]
    with processes.server(argv, folder / "registry.log", healthy=lambda: processes.listens(port)):
        yield f"127.0.0.1:{port}"


def push(image: str, name: str) -> str:
    """Push an image of the engine as ``127.0.0.1:PORT/PATH:TAG``, and return its digest."""
    subprocess.run(["docker", "tag", image, name], check=True)
    subprocess.run(["docker", "push", "-q", name], check=True, capture_output=True)
    return digest(name)


def digest(name: str, login: tuple[str, str] | None = None) -> str:
    """Ask the registry itself for the digest of ``127.0.0.1:PORT/PATH:TAG``."""
    path, _, tag = name.rpartition(":")
    host, _, repository = path.partition("/")
    kinds = [f"application/vnd.docker.distribution.manifest.{kind}+json" for kind in ("v2", "list.v2")]
    kinds += [f"application/vnd.oci.image.{kind}.v1+json" for kind in ("manifest", "index")]
    accept = {"Accept": ", ".join(kinds)}
    answer = requests.head(f"http://{host}/v2/{repository}/manifests/{tag}", headers=accept, auth=login, timeout=30)
    assert answer.ok, f"{name}: {answer.status_code}"
    return str(answer.headers["Docker-Content-Digest"])
