"""The Bazel cache of a user: bazel-remote in a container, with a password that only this user may read."""

from __future__ import annotations

import argparse
import base64
import contextlib
import fcntl
import hashlib
import importlib.util
import ipaddress
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tooling.core import errors, files, proc
from tooling.core.console import Subparsers, command
from tooling.image import digests

DEFAULT_HOST, DEFAULT_PORT, DEFAULT_GRPC_PORT, DEFAULT_SIZE = "127.0.0.1", 9090, 9092, "50G"
USER = "multimesh"
_STARTS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Settings:
    """The settings of a cache. ``container`` is the id of the one that serves it."""

    host: str
    port: int
    grpc_port: int
    max_gib: int
    container: str = ""

    @property
    def address(self) -> str:
        """Where clients on this machine reach it, e.g. ``127.0.0.1:9090``."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def check(self) -> None:
        """Raise ``UsageError`` for settings that cannot be served."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            said = f"--host '{self.host}': write an address of this machine, e.g. 127.0.0.1"
            raise errors.UsageError(said) from None
        for flag, port in (("--port", self.port), ("--grpc-port", self.grpc_port)):
            if not 1 <= port <= 65535:
                raise errors.UsageError(f"{flag} {port}: must be from 1 to 65535")


@dataclass(frozen=True)
class Place:
    """The folder of a cache; only its owner may enter it."""

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
    def reading(self) -> Path:
        """The same for who only reads, such as a devcontainer."""
        return self.root / "reading.bazelrc"

    def load(self) -> Settings | None:
        """Return the settings of the last cache here."""
        try:
            return Settings(**json.loads((self.root / "settings.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def password(self) -> str:
        """Return the password, which is made once."""
        file = self.root / "password"
        if not file.exists():
            files.write(file, secrets.token_urlsafe(24) + "\n", private=True)
        if file.stat().st_mode & 0o077:
            raise errors.UsageError(f"{file}: others may read this password; run `chmod 600 {file}`")
        if not re.fullmatch(r"[A-Za-z0-9._~-]{8,128}", password := file.read_text(encoding="utf-8").strip()):
            raise errors.UsageError(
                f"{file}: a password has 8 to 128 letters, digits, dots, dashes, underscores or tildes"
            )
        return password


@dataclass(frozen=True)
class Status:
    """A look at a cache: ``state`` is ``running``, ``not answering`` or ``stopped``."""

    state: str
    settings: Settings | None


@dataclass(frozen=True)
class Cache:
    """A cache server at ``HOST:PORT``; ``password`` is known of the one that ``start-cache.sh`` started here."""

    address: str
    password: str | None

    def write_rc(self, path: Path, *, write: bool) -> None:
        """Write Bazel's options for this cache to a file that only its owner may read."""
        files.write(path, remote_rc(self.address, self.password, write=write), private=True)


def default_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return the user's own cache: ``$XDG_CACHE_HOME/multimesh-jax/bazel``."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Place(Path(base) / "multimesh-jax" / "bazel")


def find(address: str | None = None, place: Place | None = None) -> Cache | None:
    """Return the server at ``address`` (``HOST:PORT``), or else the one of this user; None if that does not run.

    Only the container that ``start-cache.sh`` recorded gets its password: another server may listen on its port.
    """
    place = place or default_place()
    settings = place.load()
    if settings is not None and address in (None, settings.address):
        return Cache(settings.address, place.password()) if _state(settings) == "running" else None
    return None if address is None else Cache(address, None)


def start(place: Place, settings: Settings, pin: str | None) -> bool:
    """Start a cache, with the image ``pin`` of bazel-remote; return False if it runs already, as asked.

    ``CacheError``: it runs with other settings, or its container does not start or does not answer.
    """
    settings.check()
    if pin is None or not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", pin):
        raise errors.PinError(
            "bazel-remote: no digest of its image is locked; run `python -m tooling bump images` where its registry "
            "can be reached"
        )
    place.content.mkdir(parents=True, exist_ok=True)
    place.root.chmod(0o700)
    with _one_at_a_time(place):
        now = status(place)
        if now.state == "running" and now.settings and asdict(now.settings) | {"container": ""} == asdict(settings):
            return False
        if now.state != "stopped":
            raise errors.CacheError(
                f"{place.root}: its cache runs with other settings or does not answer; run `start-cache.sh stop` first"
            )
        password = place.password()
        container = _start_container(place, settings, password, pin)
        for path, write in ((place.bazelrc, True), (place.reading, False)):
            files.write(path, remote_rc(settings.address, password, write=write), private=True)
        files.write_json(place.root / "settings.json", asdict(settings) | {"container": container})
    return True


def stop(place: Place) -> bool:
    """Stop the cache of a folder; return False if none runs. Its entries and its password stay."""
    if place.load() is None:
        return False
    with _one_at_a_time(place):
        for path in (place.bazelrc, place.reading):
            path.unlink(missing_ok=True)
        return _remove(place)


def status(place: Place) -> Status:
    """Look at the cache of a folder."""
    settings = place.load()
    return Status(_state(settings) if settings else "stopped", settings)


def name(place: Place) -> str:
    """Return the container's name: one a folder."""
    return "multimesh-cache-" + hashlib.sha256(str(place.root.resolve()).encode()).hexdigest()[:12]


def parse_size(text: str) -> int:
    """Read ``50G`` or ``1T`` as GiB: bazel-remote counts in whole ones."""
    match = re.fullmatch(r"([1-9]\d{0,6})([GT])", text)
    if match is None:
        raise errors.UsageError(f"--max-size '{text}': write a whole number and G or T, e.g. {DEFAULT_SIZE}")
    return int(match[1]) * {"G": 1, "T": 1024}[match[2]]


def remote_rc(address: str, password: str | None, *, write: bool) -> str:
    """Return Bazel's options for a server; one that is silent costs a build ``--remote_timeout`` at most."""
    login = "" if password is None else f"{USER}:{password}@"
    lines = [f"build --remote_cache=http://{login}{address}", "build --remote_timeout=15"]
    return "\n".join([*lines, *([] if write else ["build --remote_upload_local_results=false"]), ""])


def _start_container(place: Place, settings: Settings, password: str, pin: str) -> str:
    """Start bazel-remote, wait until it answers, and return its id; it bounds its own size."""
    # The unsalted form is the only one that both this standard library can write and bazel-remote reads.
    digest = base64.b64encode(hashlib.sha1(password.encode(), usedforsecurity=False).digest()).decode()
    files.write(place.root / "htpasswd", f"{USER}:{{SHA}}{digest}\n", private=True)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    _remove(place)
    mine = f"--user={os.getuid()}:{os.getgid()}"
    confined = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", mine]
    ports = [f"--publish={host}:{settings.port}:8080", f"--publish={host}:{settings.grpc_port}:9092"]
    mounts = [f"--volume={place.content}:/data", f"--volume={place.root / 'htpasswd'}:/htpasswd:ro"]
    # The image's entry point names the addresses and the folder already.
    wanted = ["--max_size", str(settings.max_gib), "--htpasswd_file", "/htpasswd"]
    options = ["--detach", "--restart=unless-stopped", f"--name={name(place)}"]
    done = _docker("run", *options, *confined, *ports, *mounts, pin, *wanted)
    if done.returncode:
        _remove(place)
        raise errors.CacheError(f"bazel-remote: the container does not start ({done.complaint})")
    end = time.monotonic() + _STARTS_WITHIN_S
    container = done.text.splitlines()[-1]
    while (state := _state(found := Settings(**asdict(settings) | {"container": container}))) != "running":
        if time.monotonic() > end or state == "stopped":
            logs = _docker("logs", "--tail=3", container)
            said = (logs.stdout + logs.stderr).decode("utf-8", "replace").strip().replace("\n", " / ")
            _remove(place)  # the engine would start it again for ever, and nothing recorded it
            raise errors.CacheError(f"bazel-remote: does not answer on {found.address}; it said: {said}")
        time.sleep(0.1)
    return container


def _state(settings: Settings) -> str:
    """Say whether the recorded container runs, and whether it answers at its port."""
    if not settings.container:
        return "stopped"
    told = _docker("inspect", "--format", "{{.State.Running}}", settings.container)
    if told.returncode or told.text != "true":
        return "stopped"
    import requests

    try:
        with requests.Session() as session:
            session.trust_env = False  # the cache is near, and its requests are nobody's business
            session.get(f"http://{settings.address}/status", timeout=2)
        return "running"
    except requests.RequestException:
        return "not answering"


def _remove(place: Place) -> bool:
    """Remove the container of a folder, running or not; say whether there was one."""
    done = _docker("rm", "--force", name(place))
    return done.returncode == 0 and done.text != "" and "No such container" not in done.stderr.decode()


def _docker(*args: str) -> proc.Result:
    """Run docker; ``CacheError`` where no engine answers."""
    try:
        done = proc.run(["docker", *args], check=False)
    except errors.ToolError as error:
        raise errors.CacheError("bazel-remote: docker is not installed; install docker.io") from error
    if done.returncode and re.search("daemon running|connect to the docker", done.complaint, re.IGNORECASE):
        raise errors.CacheError(f"bazel-remote: no Docker engine answers ({done.complaint}); start one")
    return done


@contextlib.contextmanager
def _one_at_a_time(place: Place) -> Iterator[None]:
    with (place.root / "start.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    doors = [f"docker/start-cache.sh{options}" for options in ("", " status", " --max-size 100G")]
    text = "a Bazel cache that containers and checkouts of this machine share"
    add = command(subparsers, "cache", run, text, doors, prog="docker/start-cache.sh").add_argument
    text = "start: does nothing if it runs (default); stop: entries stay"
    add("action", nargs="?", default="start", choices=("start", "stop", "status"), help=text)
    add("--host", default=DEFAULT_HOST, help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="of HTTP (default: %(default)s)")
    add("--grpc-port", type=int, default=DEFAULT_GRPC_PORT, metavar="PORT", help="(default: %(default)s)")
    add("--max-size", default=DEFAULT_SIZE, metavar="SIZE", help="bound, e.g. 50G or 1T (default: %(default)s)")
    add("--folder", type=Path, help="where entries lie (default: ~/.cache/multimesh-jax/bazel)")


def run(args: argparse.Namespace) -> int:
    """Do one action; exit 1 where ``status`` finds no running server."""
    if importlib.util.find_spec("requests") is None:
        raise errors.CacheError("there is no .venv with the tools for a cache; run ./bootstrap.sh --group image")
    place = Place(Path(os.path.abspath(args.folder))) if args.folder else default_place()
    if args.action == "start":
        pin = digests.load(Path(__file__).resolve().parents[2]).images["bazel-remote"]
        asked = Settings(args.host, args.port, args.grpc_port, parse_size(args.max_size))
        started = start(place, asked, pin.exact if pin.digest else None)
        return _show(place, "started" if started else "runs already")
    if args.action == "stop":
        stopped = stop(place)
        return _show(place, "stopped" if stopped else "was not running", wanted="stopped")
    return _show(place, "")


def _show(place: Place, done: str, wanted: str = "running") -> int:
    found = status(place)
    had = found.settings
    address, bound = (had.address, f"{had.max_gib} GiB") if had else ("-", "-")
    print(f"{f'{done}; ' if done else ''}state {found.state}, address {address}, at most {bound} in {place.root}")
    if found.state == "running":
        print(f"use it: bazel --bazelrc={place.bazelrc} build ...")
    return 0 if found.state == wanted else 1
