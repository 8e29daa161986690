"""What a cache is asked to be, and where its files lie."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from workflows import errors, files

BACKENDS = ("bazel-remote", "disk")
DEFAULT_HOST, DEFAULT_PORT, DEFAULT_SIZE = "127.0.0.1", 9090, "50G"
USER = "multimesh"
_UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Settings:
    """One cache.

    Attributes
    ----------
    max_bytes
        What its entries may take on disk.
    password_file
        A file with the password of user ``multimesh``; without one, whoever reaches the port may read and write.
    """

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
        """Raise ``UsageError`` for what cannot be served, or should not."""
        try:
            host = ipaddress.ip_address(self.host)
        except ValueError as error:
            raise errors.UsageError(
                f"--host '{self.host}': write an address of this machine, e.g. 127.0.0.1"
            ) from error
        if self.backend == "disk":
            if (self.host, self.port, self.password_file) != (DEFAULT_HOST, DEFAULT_PORT, None):
                raise errors.UsageError(
                    "--backend disk is a folder without a server; leave out --host, --port, --password-file"
                )
            return
        if not 1 <= self.port <= 65535:
            raise errors.UsageError(f"--port {self.port}: must be from 1 to 65535")
        if not host.is_loopback and self.password_file is None:
            raise errors.UsageError(
                f"--host {self.host}: whoever reaches it could change what you build; add --password-file FILE"
            )
        if self.max_bytes % _UNITS["G"]:
            raise errors.UsageError("--max-size: bazel-remote counts in whole GiB; write e.g. 50G")


@dataclass(frozen=True)
class Place:
    """The folder of a cache: its settings and, in ``content``, the entries."""

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
        """What the cache was started with."""
        return self.root / "settings.json"

    def load(self) -> Settings | None:
        """Return what the last cache here was started with."""
        try:
            return Settings(**json.loads(self.settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def save(self, settings: Settings) -> None:
        """Remember what a cache is started with."""
        files.write_json(self.settings, asdict(settings))


def default_place(environment: Mapping[str, str] = os.environ) -> Place:
    """Return the user's own cache: ``$XDG_CACHE_HOME/multimesh-jax/bazel``."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Place(Path(base) / "multimesh-jax" / "bazel")


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
    """Return the password in a file; what is in it never goes further than to the server's and Bazel's own files."""
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
    """Return Bazel's options for a cache server.

    A cache that does not answer costs Bazel ``--remote_timeout`` at most, then it builds what it needs.
    """
    login = "" if password is None else f"{USER}:{password}@"
    lines = [f"build --remote_cache=http://{login}{address}", "build --remote_timeout=15"]
    if not write:
        lines.append("build --remote_upload_local_results=false")
    return "\n".join(lines) + "\n"


def disk_rc(folder: Path, max_bytes: int) -> str:
    """Return Bazel's options for a cache in a folder, which Bazel (7.4 or later) keeps within its bound by itself."""
    return f"build --disk_cache={folder}\nbuild --experimental_disk_cache_gc_max_size={max_bytes >> 20}M\n"
