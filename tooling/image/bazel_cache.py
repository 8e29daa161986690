"""The Bazel cache of a user: bazel-remote in a container, with a password that only this user may read.

Each start makes another one, and writes it to the files that Bazel reads its options from.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import os
import secrets
import time
from pathlib import Path

import requests
from docker.errors import APIError, ImageNotFound
from docker.models.containers import Container

from docker import DockerClient
from tooling.core import errors, files
from tooling.core.files import ROOT
from tooling.image import engine, reference
from tooling.image.reference import ImagePin

USER, STARTS_WITHIN_S = "multimesh", 30.0
_LABEL = "io.github.multimesh-jax.cache"  # its value: the address for clients, and the bound in GiB
_RC = ("bazelrc", "reading.bazelrc")  # Bazel's options, and those for who only reads, such as a devcontainer


def default() -> Path:
    """Return the folder of this user's cache: ``$XDG_CACHE_HOME/multimesh-jax/bazel``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multimesh-jax" / "bazel"


def look(folder: Path) -> str:
    """Return the address and the bound of the cache that runs here and answers, or nothing."""
    if not (folder / "bazelrc").exists():
        return ""
    with engine.connect() as client:
        containers = client.containers.list(filters={"name": f"^{name_container(folder)}$"})
    settings = containers[0].labels.get(_LABEL, "") if containers else ""
    if settings:  # else one that was not started, has ended, or is of somebody else
        with contextlib.suppress(requests.RequestException):
            requests.get(f"http://{settings.split()[0]}/status", timeout=2, proxies={"http": ""})
            return settings
    return ""


def name_container(folder: Path) -> str:
    """Return the name of the container whose entries lie in a folder."""
    return "multimesh-cache-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]


def write_rc(path: Path, address: str, *, write: bool) -> None:
    """Write Bazel's options to a file that only its owner may read: the password is in no command line."""
    # A server that is silent costs a build so many seconds at most.
    text = f"build --remote_cache=http://{address}\nbuild --remote_timeout=15\n"
    files.write(path, text + ("" if write else "build --remote_upload_local_results=false\n"), private=True)


def start(folder: Path, port: int, max_gib: int, pin: ImagePin) -> bool:
    """Start bazel-remote, in place of one with other settings; return False if it runs already with these."""
    if pin.digest is None:
        raise errors.SourceError(f"bazel-remote: no digest of its image is locked; {pin.remedy}")
    address = f"127.0.0.1:{port}"  # HTTP without TLS: other machines would send the password in clear
    (folder / "content").mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with engine.connect() as client, files.lock(folder / "start.lock"), contextlib.ExitStack() as undo:
        if look(folder) == f"{address} {max_gib}":
            return False
        _remove(client, folder)
        undo.callback(_remove, client, folder)  # the engine would start one that fails again for ever
        password = secrets.token_urlsafe(24)
        # The unsalted form is the only one that both this standard library can write and bazel-remote reads.
        digest = base64.b64encode(hashlib.sha1(password.encode(), usedforsecurity=False).digest()).decode()
        files.write(folder / "htpasswd", f"{USER}:{{SHA}}{digest}\n", private=True)
        for name in _RC:
            write_rc(folder / name, f"{USER}:{password}@{address}", write=name == "bazelrc")
        try:  # the image's entry point names the addresses and the folder already
            container: Container = client.containers.run(  # type: ignore[call-overload]
                pin.exact, ["--max_size", str(max_gib), "--htpasswd_file", "/htpasswd"], name=name_container(folder),
                labels={_LABEL: f"{address} {max_gib}"}, ports={"8080/tcp": ("127.0.0.1", port)},
                volumes=[f"{folder / 'content'}:/data", f"{folder / 'htpasswd'}:/htpasswd:ro"], detach=True,
                restart_policy={"Name": "unless-stopped", "MaximumRetryCount": 0}, read_only=True, cap_drop=["ALL"],
                security_opt=["no-new-privileges"], user=f"{os.getuid()}:{os.getgid()}",
            )  # fmt: skip
        except (APIError, ImageNotFound) as error:
            raise errors.EngineError(f"bazel-remote: the container does not start ({error.explanation})") from error
        end = time.monotonic() + STARTS_WITHIN_S
        while not look(folder):
            container.reload()
            if time.monotonic() > end or container.status != "running":
                lines = container.logs(tail=3).decode("utf-8", "replace").strip().replace("\n", " / ")
                raise errors.EngineError(f"bazel-remote: does not answer on {address}; it said: {lines}")
            time.sleep(0.1)
        undo.pop_all()
    return True


def stop(folder: Path) -> bool:
    """Stop it; return False if none runs. Its entries stay."""
    if not folder.exists():
        return False
    with engine.connect() as client, files.lock(folder / "start.lock"):
        return _remove(client, folder)


def _remove(client: DockerClient, folder: Path) -> bool:
    """Remove the container, running or not, and then Bazel's options for it; return whether there was one."""
    containers = client.containers.list(all=True, filters={"name": f"^{name_container(folder)}$"})
    for container in containers:
        container.remove(force=True)
    for name in _RC:
        (folder / name).unlink(missing_ok=True)
    return bool(containers)


def run(args: argparse.Namespace) -> int:
    """Do one action, and show the cache; exit 1 where it is not as the action wants it."""
    folder, done = (args.folder or default()).absolute(), ""
    if args.action == "start":
        fresh = start(folder, args.port, args.max_size, reference.load_lock(ROOT).images["bazel-remote"])
        done = "started; " if fresh else "runs already; "
    elif args.action == "stop":
        done = "stopped; " if stop(folder) else "was not running; "
    address, _, bound = look(folder).partition(" ")
    print(f"{done}state {f'running, address {address}, at most {bound} GiB in {folder}' if address else 'stopped'}")
    if address:
        print(f"use it: bazel --bazelrc={folder / 'bazelrc'} build ...")
    return int(bool(address) == (args.action == "stop"))
