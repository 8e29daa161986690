"""Starts, finds and stops a cache server; each can be done again without harm."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workflows import errors
from workflows.cache import bazel_remote, keeper, nginx, usage
from workflows.cache.settings import Place, Settings, bazelrc, read_password, write_private

_STOPS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Status:
    """What is known of a cache server.

    Attributes
    ----------
    state
        ``running``; ``not answering``: it is there but does not serve; ``stopped``.
    used_bytes
        What its entries take on disk.
    """

    state: str
    settings: Settings | None
    used_bytes: int
    hits: usage.Hits | None


def start(place: Place, settings: Settings, pin: str | None) -> bool:
    """Start a server; return False if it runs already, as asked.

    Parameters
    ----------
    pin
        The image of bazel-remote, by digest; None if no digest of it was ever read from a registry.

    Raises
    ------
    CacheError
        Another server has the port, this one runs with other settings, or it does not come up.
    """
    settings.check()
    password = read_password(settings.password_file) if settings.password_file else None
    make_folder(place)
    with _one_at_a_time(place):
        now = status(place)
        if now.state == "running" and now.settings == settings:
            return False
        if now.state != "stopped":
            raise errors.CacheError(
                f"{place.root}: its cache runs with other settings or does not answer; run `start-cache.sh stop` first"
            )
        _check_port(settings)
        write_private(place.bazelrc, bazelrc(settings.address, password, write=True))
        if settings.backend == "nginx":
            place.save(settings)  # for the keeper to read
            _start_nginx(place)
        else:
            bazel_remote.start(place, settings, password, pin)
            place.save(settings)
    return True


def stop(place: Place) -> bool:
    """Stop the server of a folder; return False if none runs. Its entries stay."""
    if not place.root.is_dir():
        return False
    with _one_at_a_time(place):
        settings = place.load()
        if settings is not None and settings.backend == "bazel-remote":
            return bazel_remote.stop(place)
        return _stop_keeper(place)


def status(place: Place) -> Status:
    """Look at the server of a folder."""
    settings = place.load()
    used = usage.size(place.content)
    if settings is None:
        return Status("stopped", None, used, None)
    if settings.backend == "bazel-remote":
        return Status(bazel_remote.state(place, settings), settings, used, bazel_remote.hits(place, settings))
    if not _held(place):
        return Status("stopped", settings, used, None)
    said = keeper.greeting(settings.address)
    state = "running" if said is not None and said.startswith(nginx.GREETING) else "not answering"
    return Status(state, settings, used, usage.count(usage.LogReader(place.requests).new()))


def make_folder(place: Place) -> None:
    """Make the folder of a cache, for its owner only."""
    nginx.check_place(place)
    place.root.mkdir(parents=True, exist_ok=True, mode=0o700)


def _start_nginx(place: Place) -> None:
    """Start the keeper, which outlives this process, and wait until it says that it serves."""
    here = Path(__file__).resolve().parent.parent.parent
    process = subprocess.Popen(
        [sys.executable, "-m", "workflows.cache.keeper", str(place.root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=place.log.open("wb"),
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(here)},
        start_new_session=True,
    )
    assert process.stdout is not None  # noqa: S101  (for the type checker)
    said = process.stdout.readline().decode().strip()
    if said == "ready":
        process.returncode = 0  # it goes on without us: nothing to wait for, nothing to warn of
        return
    process.wait()
    raise errors.CacheError(f"{place.root}: {said or 'the server ended'}; {_complaint(place)}")


def _complaint(place: Place) -> str:
    """Return the last line of the server's log, as part of an error."""
    with contextlib.suppress(OSError):
        lines = place.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if lines:
            last = lines[-1]
            if "failed to execute nginx" in last:
                return "nginx is not installed (Debian: nginx-light)"
            return f"it said: {last[-300:]}"
    return "it said nothing"


def _stop_keeper(place: Place) -> bool:
    """Tell the keeper to end, and see that it did; a process id counts only while the lock is held."""
    if not _held(place):
        return False
    pid = int(place.lock.read_text(encoding="utf-8") or 0)
    if pid <= 1:
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            # The handle is of a process that lives while the lock is still held: of the keeper, not of a stranger.
            if not _held(place):
                return True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signum)
            if select.select([handle], [], [], _STOPS_WITHIN_S)[0]:
                return True
    finally:
        os.close(handle)
    raise errors.CacheError(f"{place.root}: process {pid} does not end; look what holds it up")


def _held(place: Place) -> bool:
    """Say whether a keeper runs for this folder."""
    try:
        with place.lock.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _check_port(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise errors.CacheError(
                f"{settings.host}:{settings.port}: {error.strerror}; take another --port, or stop what has it"
            ) from error


@contextlib.contextmanager
def _one_at_a_time(place: Place) -> Iterator[None]:
    with (place.root / "start.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
