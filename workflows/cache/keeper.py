"""The process behind an nginx cache: holds its lock, runs nginx, and keeps the entries within their bound."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from workflows.cache import nginx, usage
from workflows.cache.settings import Place, Settings, read_password

ROUND_S = 2.0
_STARTS_WITHIN_S = 10.0
_MAX_LOG_BYTES = 64 << 20
_WAKE = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}


def keep(place: Place, settings: Settings) -> int:
    """Serve until told to stop; prints ``ready`` once clients are answered.

    All that is on its way is dropped on the way out; all that has arrived stays.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(place.lock.open("a+"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _fail("another server uses this folder")
        _write_pid(lock)
        instance = os.urandom(8).hex()
        password = read_password(settings.password_file) if settings.password_file else None
        for folder in (place.content, place.scratch):
            folder.mkdir(exist_ok=True)
        _drop_unfinished(place)
        place.log.write_bytes(b"")
        configuration = nginx.prepare(place, settings, password, instance)
        server = subprocess.Popen(nginx.argv(place, configuration), stdin=subprocess.DEVNULL)
        try:
            if not _answers(settings.address, instance, server):
                return _fail("nginx does not answer")
            print("ready", flush=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _rounds(place, settings, server)
        finally:
            # All of this session: workers of an nginx that was killed go on, with the port. (Blocked here, above.)
            os.killpg(0, signal.SIGTERM)
            server.wait()
            _drop_unfinished(place)


def _rounds(place: Place, settings: Settings, server: subprocess.Popen[bytes]) -> int:
    """Take note of what is used, and prune when more has come than fits, until a signal or nginx ends it."""
    reader = usage.LogReader(place.requests, from_now=True)
    held = usage.prune(place.content, settings.max_bytes)
    while True:
        woken = signal.sigtimedwait(_WAKE, ROUND_S)
        if woken is not None and woken.si_signo != signal.SIGCHLD:
            return 0
        if server.poll() is not None:
            return _fail("nginx ended")
        for request in reader.new():
            if request.found:
                usage.touch(place.content, request)
            elif request.method == "PUT":
                with contextlib.suppress(FileNotFoundError):
                    held += (place.content / request.kind / request.key).stat().st_blocks * 512
        if held > settings.max_bytes:
            held = usage.prune(place.content, settings.max_bytes)
        if place.requests.stat().st_size > _MAX_LOG_BYTES:
            os.truncate(place.requests, 0)  # nginx appends; readers begin again at the start


def _write_pid(lock: IO[str]) -> None:
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _drop_unfinished(place: Place) -> None:
    """Remove uploads that a server which is gone did not finish."""
    shutil.rmtree(place.scratch, ignore_errors=True)
    place.scratch.mkdir(exist_ok=True)


def _answers(address: str, instance: str, server: subprocess.Popen[bytes]) -> bool:
    """Wait until this very server answers, not another that has the port."""
    end = time.monotonic() + _STARTS_WITHIN_S
    while server.poll() is None and time.monotonic() < end:
        if greeting(address) == f"{nginx.GREETING} {instance}":
            return True
        signal.sigtimedwait(_WAKE, 0.02)
    return False


def greeting(address: str) -> str | None:
    """Return what a server says on ``/status``, or None if nothing there answers."""
    # Not through a proxy: the cache is near, and what builds ask for is nobody's business.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/status", timeout=2) as answer:
            return str(answer.read(4096).decode("utf-8", "replace").strip())
    except (OSError, ValueError, urllib.error.URLError):
        return None


def _fail(reason: str) -> int:
    print(reason, flush=True)
    return 1


if __name__ == "__main__":
    here = Place(Path(sys.argv[1]))
    wanted = here.load()
    sys.exit(_fail("no settings") if wanted is None else keep(here, wanted))
