"""A Bazel cache: bazel-remote in a container, or a folder that Bazel itself keeps in bounds."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import requests

from workflows import errors, files

if TYPE_CHECKING:
    from docker.models.containers import Container

    import docker

BACKENDS = ("bazel-remote", "disk")
DEFAULT_HOST, DEFAULT_PORT, DEFAULT_SIZE = "127.0.0.1", 9090, "50G"
USER = "multimesh"
_UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_STARTS_WITHIN_S = 30.0
_METRIC = re.compile(r"^bazel_remote_incoming_requests_total\{([^}]*)\}\s+([0-9.e+]+)$", re.MULTILINE)
_EMPTY = hashlib.sha256(b"").hexdigest()  # an entry that no cache minds being asked for


@dataclass(frozen=True)
class Settings:
    """The settings of a cache. Without a password file, everybody who reaches the port may read and write."""

    backend: str
    host: str
    port: int
    max_bytes: int
    password_file: str | None = None

    @property
    def address(self) -> str:
        """Where clients on this machine reach it, e.g. ``127.0.0.1:9090``; for ``disk`` they need no address."""
        if self.backend == "disk":
            return "-"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def check(self) -> None:
        """Raise ``UsageError`` for settings that cannot be served, or should not."""
        try:
            host = ipaddress.ip_address(self.host)
        except ValueError:
            said = f"--host '{self.host}': write an address of this machine, e.g. 127.0.0.1"
            raise errors.UsageError(said) from None
        if self.backend == "disk":
            if (self.host, self.port, self.password_file) != (DEFAULT_HOST, DEFAULT_PORT, None):
                raise errors.UsageError(
                    "--backend disk is a folder without a server; leave out --host, --port, --password-file"
                )
        elif not 1 <= self.port <= 65535:
            raise errors.UsageError(f"--port {self.port}: must be from 1 to 65535")
        elif not host.is_loopback and self.password_file is None:
            raise errors.UsageError(
                f"--host {self.host}: whoever reaches it could change what you build; add --password-file FILE"
            )
        elif self.max_bytes % _UNITS["G"]:
            raise errors.UsageError("--max-size: bazel-remote counts in whole GiB; write e.g. 50G")


@dataclass(frozen=True)
class Place:
    """The folder of a cache."""

    root: Path

    @property
    def content(self) -> Path:
        """The entries."""
        return self.root / "content"

    @property
    def bazelrc(self) -> Path:
        """Bazel's options for this cache; the password is in it, so that it is in no command line."""
        return self.root / "bazelrc"

    @property
    def settings(self) -> Path:
        """The file with the settings that the cache was started with."""
        return self.root / "settings.json"

    def load(self) -> Settings | None:
        """Return the settings of the last cache here."""
        try:
            return Settings(**json.loads(self.settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Hits:
    """Lookups of actions: those that were there, and those that had to be run."""

    hits: int
    misses: int

    def __sub__(self, before: Hits) -> Hits:
        return Hits(self.hits - before.hits, self.misses - before.misses)

    def __str__(self) -> str:
        total = self.hits + self.misses
        return f"{self.hits} of {total} actions found ({self.hits / total:.0%})" if total else "not asked for anything"


@dataclass(frozen=True)
class Status:
    """A look at a cache: ``state`` is ``running``, ``not answering`` or ``stopped``."""

    state: str
    settings: Settings | None
    used_bytes: int
    hits: Hits | None = None


@dataclass(frozen=True)
class Cache:
    """A cache server that answers at ``HOST:PORT``; ``settings`` are known if ``start-cache.sh`` started it here."""

    address: str
    settings: Settings | None

    def hits(self) -> Hits | None:
        """Return its lookups until now, if it tells. The difference of two is that of the build between them."""
        return _hits(self.settings) if self.settings else None

    def write_rc(self, path: Path, *, write: bool) -> None:
        """Write Bazel's options for this cache to a file that only its owner may read."""
        password = _password(self.settings) if self.settings else None
        files.write(path, remote_rc(self.address, password, write=write), private=True)


def default_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return the user's own cache: ``$XDG_CACHE_HOME/multimesh-jax/bazel``."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Place(Path(base) / "multimesh-jax" / "bazel")


def find(address: str | None = None, place: Place | None = None) -> Cache | None:
    """Return the server at ``address`` (``HOST:PORT``), or else the one of this user; None if it does not answer."""
    settings = (place or default_place()).load()
    if settings is not None and address in (None, settings.address):
        answers = settings.backend != "disk" and _get(settings, "status") is not None
        return Cache(settings.address, settings) if answers else None
    if address is None:
        return None
    try:
        told = _session().get(f"http://{address}/cas/{_EMPTY}", timeout=2).status_code
    except requests.RequestException:
        return None
    return Cache(address, None) if told in (200, 404) else None


def start(place: Place, settings: Settings, pin: str | None) -> bool:
    """Start a cache, with the image ``pin`` of bazel-remote; return False if it runs already, as asked.

    ``CacheError``: it runs with other settings, or its container does not start or does not answer.
    """
    settings.check()
    password = _password(settings)
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
        files.write_json(place.settings, asdict(settings))
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
            if found := _container(engine, place):
                found.remove(force=True)
            return found is not None


def status(place: Place) -> Status:
    """Look at the cache of a folder."""
    settings, used = place.load(), _size(place.content)
    if settings is None or settings.backend == "disk":
        return Status("running" if settings else "stopped", settings, used)
    with _engine() as engine:
        found = _container(engine, place)
    if found is None or found.status != "running":
        return Status("stopped", settings, used)
    state = "not answering" if _get(settings, "status") is None else "running"
    return Status(state, settings, used, _hits(settings))


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


def parse_size(text: str) -> int:
    """Read ``500M``, ``50G`` or ``1T`` as bytes."""
    match = re.fullmatch(r"([1-9]\d{0,6})([MGT])", text)
    if match is None:
        raise errors.UsageError(f"--max-size '{text}': write a whole number and M, G or T, e.g. {DEFAULT_SIZE}")
    return int(match[1]) * _UNITS[match[2]]


def shown_size(size: float) -> str:
    """Return bytes as a person reads them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def read_password(file: str) -> str:
    """Return the password in a file. It goes no further than to the server's and Bazel's own files."""
    path = Path(file)
    try:
        if path.stat().st_mode & 0o077:
            raise errors.UsageError(f"{path}: others may read this password; run `chmod 600 {path}`")
        password = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError as error:
        raise errors.UsageError(f"{path}: does not exist; write the password into it, with mode 600") from error
    if not re.fullmatch(r"[A-Za-z0-9._~-]{8,128}", password):
        raise errors.UsageError(f"{path}: a password has 8 to 128 letters, digits, dots, dashes, underscores or tildes")
    return password


def remote_rc(address: str, password: str | None, *, write: bool) -> str:
    """Return Bazel's options for a server; one that is silent costs a build ``--remote_timeout`` at most."""
    login = "" if password is None else f"{USER}:{password}@"
    lines = [f"build --remote_cache=http://{login}{address}", "build --remote_timeout=15"]
    return "\n".join([*lines, *([] if write else ["build --remote_upload_local_results=false"]), ""])


def disk_rc(folder: Path, max_bytes: int) -> str:
    """Return Bazel's options for a cache in a folder. Bazel (7.4 or later) itself keeps it within its bound."""
    return f"build --disk_cache={folder}\nbuild --experimental_disk_cache_gc_max_size={max_bytes >> 20}M\n"


def _password(settings: Settings) -> str | None:
    return read_password(settings.password_file) if settings.password_file else None


def _start_container(place: Place, settings: Settings, password: str | None, pin: str | None) -> None:
    """Start bazel-remote and wait until it answers; it bounds its own size."""
    if pin is None or not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", pin):
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
        if before := _container(engine, place):
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
    """Talk to the Docker engine; its refusal becomes one line."""
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
    return next(iter(engine.containers.list(all=True, filters={"name": f"^/{name(place)}$"})), None)


def _hits(settings: Settings) -> Hits | None:
    text = _get(settings, "metrics")
    return None if text is None else parse_metrics(text)


def _get(settings: Settings, path: str) -> str | None:
    password = _password(settings)
    try:
        login = (USER, password) if password else None
        answer = _session().get(f"http://{settings.address}/{path}", auth=login, timeout=2)
        answer.raise_for_status()
        return answer.text
    except requests.RequestException:
        return None


def _session() -> requests.Session:
    """Return a session that goes through no proxy: the cache is near, and its requests are nobody's business."""
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
