"""A real registry on the loopback interface: Debian's docker-registry, filesystem storage."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from tests.integration.parts import packages, processes


@contextmanager
def running(folder: Path, *, login: tuple[str, str] | None = None, tls: bool = False) -> Iterator[str]:
    """Have a registry for a block, as ``127.0.0.1:PORT``.

    It may ask for a ``login`` of user and password, or have a certificate that no authority signed: ``folder/crt``.
    """
    port = processes.free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"version": 0.1, "log": {"level": "warn"}, "http": {"addr": f"127.0.0.1:{port}"}}
    config["storage"] = {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}}
    if login:
        htpasswd = [packages.need("htpasswd", "apache2-utils"), "-niB", login[0]]
        hashed = subprocess.run(htpasswd, input=login[1], capture_output=True, text=True, check=True).stdout
        (folder / "htpasswd").write_text(hashed)
        config["auth"] = {"htpasswd": {"realm": "here", "path": str(folder / "htpasswd")}}
    if tls:
        config["http"]["tls"] = {"certificate": str(folder / "crt"), "key": str(folder / "key")}
        ssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=r"]
        ssl += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key"), "-out", str(folder / "crt")]
        subprocess.run(ssl, check=True, capture_output=True)
    (folder / "registry.yml").write_text(json.dumps(config))
    argv = [packages.need("docker-registry", "docker-registry"), "serve", str(folder / "registry.yml")]
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
    kinds = ("docker.distribution.manifest.v2", "docker.distribution.manifest.list.v2", "oci.image.manifest.v1")
    accept = {"Accept": ", ".join(f"application/vnd.{kind}+json" for kind in (*kinds, "oci.image.index.v1"))}
    answer = requests.head(f"http://{host}/v2/{repository}/manifests/{tag}", headers=accept, auth=login, timeout=30)
    assert answer.ok, f"{name}: {answer.status_code}"
    return str(answer.headers["Docker-Content-Digest"])
