"""Starts, finds and stops a cache: bazel-remote in a container, or a folder that Bazel itself keeps in bounds."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from workflows import errors, files
from workflows.cache.settings import USER, Place, Settings, default_place, disk_rc, read_password, remote_rc

if TYPE_CHECKING:
    from docker.models.containers import Container

    import docker

_STARTS_WITHIN_S = 30.0
_METRIC = re.compile(r"^bazel_remote_incoming_requests_total\{([^}]*)\}\s+([0-9.e+]+)$", re.MULTILINE)
_PINNED = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")
_EMPTY = hashlib.sha256(b"").hexdigest()  # an entry that no cache minds being asked for


@dataclass(frozen=True)
class Hits:
    """Lookups of actions, each of which either was there or had to be run."""

    hits: int
    misses: int

    def __sub__(self, before: Hits) -> Hits:
        return Hits(self.hits - before.hits, self.misses - before.misses)

    def __str__(self) -> str:
        total = self.hits + self.misses
        return f"{self.hits} of {total} actions found ({self.hits / total:.0%})" if total else "not asked for anything"


@dataclass(frozen=True)
class Status:
    """What is known of a cache: ``state`` is ``running``, ``not answering`` or ``stopped``."""

    state: str
    settings: Settings | None
    used_bytes: int
    hits: Hits | None


@dataclass(frozen=True)
class Cache:
    """A cache server that answers at ``HOST:PORT``; ``place`` is its folder if ``start-cache.sh`` started it here."""

    address: str
    place: Place | None

    def hits(self) -> Hits | None:
        """Return its lookups until now, if it says; the difference of two is what a build got."""
        settings = self.place.load() if self.place else None
        return hits(settings) if settings else None

    def write_rc(self, path: Path, *, write: bool) -> None:
        """Write Bazel's options for this cache to a file that only its owner may read."""
        settings = self.place.load() if self.place else None
        password = read_password(settings.password_file) if settings and settings.password_file else None
        files.write(path, remote_rc(self.address, password, write=write), private=True)


def find(address: str | None = None, place: Place | None = None) -> Cache | None:
    """Return the server at ``address`` (``HOST:PORT``), or else the one of this user; None if it does not answer."""
    place = place or default_place()
    settings = place.load()
    if settings is not None and address in (None, settings.address):
        answers = settings.backend != "disk" and _get(settings, "status") is not None
        return Cache(settings.address, place) if answers else None
    if address is None:
        return None
    try:
        told = _session().get(f"http://{address}/cas/{_EMPTY}", timeout=2).status_code
    except requests.exceptions.InvalidURL as error:
        raise errors.UsageError(f"--cache-addr '{address}': write HOST:PORT") from error
    except requests.RequestException:
        return None
    return Cache(address, None) if told in (200, 404) else None


def start(place: Place, settings: Settings, pin: str | None) -> bool:
    """Start a cache; return False if it runs already, as asked.

    Parameters
    ----------
    pin
        The image of bazel-remote, by digest; None if no digest of it is known.

    Raises
    ------
    CacheError
        This one runs with other settings, or its container does not start or does not answer.
    PinError
        No digest of the image is known.
    """
    settings.check()
    password = read_password(settings.password_file) if settings.password_file else None
    place.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _one_at_a_time(place):
        now = status(place)
        if now.state == "running" and now.settings == settings:
            return False
        if now.state != "stopped":
            raise errors.CacheError(
                f"{place.root}: its cache runs with other settings or does not answer; run `start-cache.sh stop` first"
            )
        place.content.mkdir(exist_ok=True)
        if settings.backend == "disk":
            rc = disk_rc(place.content, settings.max_bytes)
        else:
            _start_container(place, settings, password, pin)
            rc = remote_rc(settings.address, password, write=True)
        files.write(place.bazelrc, rc, private=True)
        place.save(settings)
    return True


def stop(place: Place) -> bool:
    """Stop the cache of a folder; return False if none runs. Its entries stay."""
    if (settings := place.load()) is None:
        return False
    with _one_at_a_time(place):
        if settings.backend == "disk":
            place.bazelrc.unlink(missing_ok=True)
            place.settings.unlink(missing_ok=True)
            return True
        with _engine() as engine:
            if (found := _container(engine, place)) is None:
                return False
            found.remove(force=True)
            return True


def status(place: Place) -> Status:
    """Look at the cache of a folder."""
    settings, used = place.load(), _size(place.content)
    if settings is None:
        return Status("stopped", None, used, None)
    if settings.backend == "disk":
        return Status("running", settings, used, None)
    with _engine() as engine:
        found = _container(engine, place)
    if found is None or found.status != "running":
        return Status("stopped", settings, used, None)
    state = "not answering" if _get(settings, "status") is None else "running"
    return Status(state, settings, used, hits(settings))


def hits(settings: Settings) -> Hits | None:
    """Return how many actions were found since the server started, if it says."""
    text = _get(settings, "metrics")
    return None if text is None else parse_metrics(text)


def parse_metrics(text: str) -> Hits:
    """Read the lookups of actions out of Prometheus text."""
    counts = {"hit": 0, "miss": 0}
    for labels, value in _METRIC.findall(text):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if pairs.get("kind") == "ac" and pairs.get("method") == "get" and pairs.get("status") in counts:
            counts[pairs["status"]] += int(float(value))
    return Hits(counts["hit"], counts["miss"])


def name(place: Place) -> str:
    """Return the container's name: one a folder."""
    return "multimesh-cache-" + hashlib.sha256(str(place.root.resolve()).encode()).hexdigest()[:12]


def _start_container(place: Place, settings: Settings, password: str | None, pin: str | None) -> None:
    """Start bazel-remote and wait until it answers; it bounds its own size."""
    if pin is None or not _PINNED.fullmatch(pin):
        raise errors.PinError(
            "bazel-remote: no digest of its image is locked; run `python -m workflows bump images` where its registry "
            "can be reached, or use --backend disk"
        )
    volumes = {str(place.content): {"bind": "/data", "mode": "rw"}}
    # The image's entry point names the address and the folder already.
    command = ["--max_size", str(settings.max_bytes >> 30), "--enable_endpoint_metrics"]
    if password is not None:
        # The unsalted form is the only one that both this standard library can write and bazel-remote reads.
        digest = base64.b64encode(hashlib.sha1(password.encode(), usedforsecurity=False).digest()).decode()
        files.write(place.root / "htpasswd", f"{USER}:{{SHA}}{digest}\n", private=True)
        volumes[str(place.root / "htpasswd")] = {"bind": "/htpasswd", "mode": "ro"}
        command += ["--htpasswd_file", "/htpasswd"]
    with _engine() as engine:
        if (before := _container(engine, place)) is not None:
            before.remove(force=True)
        container = engine.containers.run(  # type: ignore[call-overload]  # its types lack unless-stopped
            pin,
            command,
            name=name(place),
            detach=True,
            restart_policy={"Name": "unless-stopped"},
            user=f"{os.getuid()}:{os.getgid()}",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            ports={"8080/tcp": (settings.host, settings.port)},
            volumes=volumes,
        )
        end = time.monotonic() + _STARTS_WITHIN_S
        while _get(settings, "status") is None:
            container.reload()
            if time.monotonic() > end or container.status != "running":
                said = container.logs(tail=3).decode("utf-8", "replace").strip().replace("\n", " / ")
                raise errors.CacheError(f"bazel-remote: does not answer on {settings.address}; it said: {said}")
            time.sleep(0.1)


@contextlib.contextmanager
def _engine() -> Iterator[docker.DockerClient]:
    """Talk to the Docker engine; what it refuses is one line."""
    import docker  # takes longer than all else here
    from docker.context import ContextAPI

    host = os.environ.get("DOCKER_HOST") or ContextAPI.get_current_context().Host
    try:
        with contextlib.closing(docker.DockerClient(base_url=host)) as engine:
            yield engine
    except docker.errors.APIError as error:
        raise errors.CacheError(
            f"bazel-remote: the container does not start ({error.explanation or error}); or use --backend disk"
        ) from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise errors.CacheError(
            f"bazel-remote: no Docker engine answers ({error}); start one, or use --backend disk"
        ) from error


def _container(engine: docker.DockerClient, place: Place) -> Container | None:
    import docker

    try:
        return engine.containers.get(name(place))
    except docker.errors.NotFound:
        return None


def _get(settings: Settings, path: str) -> str | None:
    login = (USER, read_password(settings.password_file)) if settings.password_file else None
    try:
        answer = _session().get(f"http://{settings.address}/{path}", auth=login, timeout=2)
        answer.raise_for_status()
        return answer.text
    except requests.RequestException:
        return None


def _session() -> requests.Session:
    """Return a session that goes through no proxy: the cache is near, and what builds ask for is nobody's business."""
    session = requests.Session()
    session.trust_env = False
    return session


def _size(folder: Path) -> int:
    """Return the bytes that the files below a folder take on disk."""
    found = 0
    for place, _, names in os.walk(folder):
        for each in names:
            with contextlib.suppress(FileNotFoundError):
                found += Path(place, each).lstat().st_blocks * 512
    return found


@contextlib.contextmanager
def _one_at_a_time(place: Place) -> Iterator[None]:
    with (place.root / "start.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
