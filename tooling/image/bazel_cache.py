"""The Bazel cache of a user: bazel-remote in a container, with a password that only this user may read."""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import ipaddress
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tooling.core import console, errors, files, proc
from tooling.core.console import Subparsers, command
from tooling.image import digests
from tooling.image.digests import ImagePin

USER = "multimesh"
_STARTS_WITHIN_S = 30.0
_LABEL = "io.github.multimesh-jax.cache"


class Server(NamedTuple):
    """A cache server at ``HOST:PORT``; its password is known where ``start-cache.sh`` started it here."""

    address: str
    password: str | None

    def write_rc(self, path: Path, *, write: bool) -> None:
        """Write Bazel's options to a file that only its owner may read: the password is in no command line.

        A server that is silent costs a build ``--remote_timeout`` at most.
        """
        login = "" if self.password is None else f"{USER}:{self.password}@"
        lines = [f"build --remote_cache=http://{login}{self.address}", "build --remote_timeout=15"]
        lines += [] if write else ["build --remote_upload_local_results=false"]
        files.write(path, "\n".join([*lines, ""]), private=True)


class Settings(NamedTuple):
    """The settings of a cache, which its container has as a label."""

    host: str
    port: int
    max_gib: int

    @property
    def address(self) -> str:
        """Where clients on this machine reach it, e.g. ``127.0.0.1:9090``."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class Cache(NamedTuple):
    """The cache of a folder that only its owner may enter.

    ``content`` has its entries, ``bazelrc`` Bazel's options for it, and ``reading.bazelrc`` those for who only reads,
    such as a devcontainer.
    """

    folder: Path

    @property
    def name(self) -> str:
        """The container's name: one a folder."""
        return "multimesh-cache-" + hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]

    def look(self) -> tuple[Settings | None, str]:
        """Return the settings of our container, if there is one, and ``running``, ``not answering`` or ``stopped``."""
        if not (self.folder / "bazelrc").exists():  # no engine is asked about what was not started
            return None, "stopped"
        asked = f'{{{{.State.Running}}}} {{{{index .Config.Labels "{_LABEL}"}}}}'
        running, _, label = _docker("inspect", "--format", asked, self.name).text.partition(" ")
        try:
            settings = Settings(*json.loads(label))
        except (ValueError, TypeError):  # no container, or one of somebody else
            return None, "stopped"
        if running != "true":
            return settings, "stopped"
        connection = http.client.HTTPConnection(settings.address, timeout=2)
        try:
            connection.request("GET", "/status")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return settings, "not answering"
        finally:
            connection.close()
        return settings, "running"

    def password(self) -> str:
        """Return the password, which is made once."""
        file = self.folder / "password"
        if not file.exists():
            files.write(file, secrets.token_urlsafe(24) + "\n", private=True)
        if file.stat().st_mode & 0o077:
            raise errors.UsageError(f"{file}: others may read this password; run `chmod 600 {file}`")
        return file.read_text(encoding="utf-8").strip()

    def start(self, wanted: Settings, pin: ImagePin) -> bool:
        """Start bazel-remote; return False if it runs already, as asked.

        ``CacheError``: it runs with other settings, or its container does not start or does not answer.
        """
        if pin.digest is None:
            raise errors.PinError(
                "bazel-remote: no digest of its image is locked; run `python -m tooling bump images` where its "
                "registry can be reached"
            )
        (self.folder / "content").mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with files.lock(self.folder / "start.lock"):
            had, state = self.look()
            if (had, state) == (wanted, "running"):
                return False
            if state != "stopped":
                raise errors.CacheError(
                    f"{self.folder}: its cache runs with other settings or does not answer; run `start-cache.sh stop` "
                    "first"
                )
            self._remove()
            password = self.password()
            # The unsalted form is the only one that both this standard library can write and bazel-remote reads.
            digest = base64.b64encode(hashlib.sha1(password.encode(), usedforsecurity=False).digest()).decode()
            files.write(self.folder / "htpasswd", f"{USER}:{{SHA}}{digest}\n", private=True)
            for file, write in (("bazelrc", True), ("reading.bazelrc", False)):
                Server(wanted.address, password).write_rc(self.folder / file, write=write)
            try:
                self._start_container(wanted, pin.exact)
            except BaseException:
                self._remove()  # the engine would start it again for ever
                raise
        return True

    def stop(self) -> bool:
        """Stop it; return False if none runs. Its entries and its password stay."""
        if not self.folder.exists():
            return False
        with files.lock(self.folder / "start.lock"):
            return self._remove()

    def _start_container(self, wanted: Settings, image: str) -> None:
        """Start bazel-remote, which bounds its own size, and wait until it answers."""
        host = f"[{wanted.host}]" if ":" in wanted.host else wanted.host
        mine = f"--user={os.getuid()}:{os.getgid()}"
        confined = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", mine]
        ports = [f"--publish={host}:{wanted.port}:8080"]
        mounts = [f"--volume={self.folder / 'content'}:/data", f"--volume={self.folder / 'htpasswd'}:/htpasswd:ro"]
        # The image's entry point names the addresses and the folder already.
        own = ["--max_size", str(wanted.max_gib), "--htpasswd_file", "/htpasswd"]
        label = f"--label={_LABEL}={json.dumps(wanted)}"
        options = ["--detach", "--restart=unless-stopped", f"--name={self.name}", label]
        done = _docker("run", *options, *confined, *ports, *mounts, image, *own)
        if done.returncode:
            raise errors.CacheError(f"bazel-remote: the container does not start ({done.complaint})")
        end = time.monotonic() + _STARTS_WITHIN_S
        while (state := self.look()[1]) != "running":
            if time.monotonic() > end or state == "stopped":
                logs = _docker("logs", "--tail=3", self.name)
                said = (logs.stdout + logs.stderr).decode("utf-8", "replace").strip().replace("\n", " / ")
                raise errors.CacheError(f"bazel-remote: does not answer on {wanted.address}; it said: {said}")
            time.sleep(0.1)

    def _remove(self) -> bool:
        """Remove the container, running or not, and Bazel's options for it; say whether there was one."""
        for file in ("bazelrc", "reading.bazelrc"):
            (self.folder / file).unlink(missing_ok=True)
        done = _docker("rm", "--force", self.name)
        return done.returncode == 0 and done.text != "" and "No such container" not in done.stderr.decode()


def default(environment: Mapping[str, str] = os.environ) -> Cache:
    """Return the user's own cache: ``$XDG_CACHE_HOME/multimesh-jax/bazel``."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Cache(Path(base) / "multimesh-jax" / "bazel")


def find_server(address: str | None = None, cache: Cache | None = None) -> Server | None:
    """Return the server at ``address`` (``HOST:PORT``), or else the one of this user; None if that does not run.

    Only the container that ``start-cache.sh`` started gets its password: another server may listen on its port.
    """
    own = cache or default()
    settings, state = own.look()
    if settings and address in (None, settings.address):
        return Server(settings.address, own.password()) if state == "running" else None
    return None if address is None else Server(address, None)


def _docker(*args: str) -> proc.Result:
    """Run docker; ``CacheError`` where no engine answers."""
    done = proc.run(["docker", *args], check=False)
    if done.returncode and re.search("daemon running|connect to the docker", done.complaint, re.IGNORECASE):
        raise errors.CacheError(f"bazel-remote: no Docker engine answers ({done.complaint}); start one")
    return done


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    doors = [f"docker/start-cache.sh{options}" for options in ("", " status", " --max-size 100G")]
    text = "a Bazel cache that containers and checkouts of this machine share"
    add = command(subparsers, "cache", run, text, doors, prog="docker/start-cache.sh").add_argument
    text = "start: does nothing if it runs (default); stop: entries stay"
    add("action", nargs="?", default="start", choices=("start", "stop", "status"), help=text)
    add("--host", type=ipaddress.ip_address, default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=9090, help="default: %(default)s")
    add("--max-size", type=gib, default="50G", metavar="SIZE", help="bound, e.g. 50G or 1T (default: %(default)s)")
    add("--folder", type=Path, help="where entries lie (default: ~/.cache/multimesh-jax/bazel)")


def port(text: str) -> int:
    """Read the number of a port."""
    if not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text}: must be from 1 to 65535")
    return int(text)


def gib(text: str) -> int:
    """Read ``50G`` or ``1T`` as GiB: bazel-remote counts in whole ones."""
    if (match := re.fullmatch(r"([1-9]\d{0,6})([GT])", text)) is None:
        raise argparse.ArgumentTypeError(f"'{text}': write a whole number and G or T, e.g. 50G")
    return int(match[1]) * {"G": 1, "T": 1024}[match[2]]


def run(args: argparse.Namespace) -> int:
    """Do one action, and show the cache; exit 1 where it is not as the action wants it."""
    cache, done = Cache(args.folder.absolute()) if args.folder else default(), ""
    if args.action == "start":
        pin = digests.load(Path(__file__).resolve().parents[2]).images["bazel-remote"]
        wanted = Settings(str(args.host), args.port, args.max_size)
        if not ipaddress.ip_address(wanted.host).is_loopback:
            console.note(f"--host {wanted.host}: HTTP without TLS, so other machines send the password in clear")
        done = "started; " if cache.start(wanted, pin) else "runs already; "
    elif args.action == "stop":
        done = "stopped; " if cache.stop() else "was not running; "
    had, state = cache.look()
    where, bound = (had.address, f"{had.max_gib} GiB") if had else ("-", "-")
    print(f"{done}state {state}, address {where}, at most {bound} in {cache.folder}")
    if state == "running":
        print(f"use it: bazel --bazelrc={cache.folder / 'bazelrc'} build ...")
    return 0 if state == ("stopped" if args.action == "stop" else "running") else 1
