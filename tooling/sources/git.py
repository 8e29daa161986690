"""Git as this package runs it: in a hardened environment, its complaints told apart."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors, proc

SCHEMES = ("https", "http", "ssh", "git", "file")
COMMIT = re.compile(r"[0-9a-f]{40}")
_SETTINGS = {
    "advice.detachedHead": "false",
    "checkout.workers": "0",
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.fsync": "none",  # a tree that a power cut spoils is fetched again; the verified hash tells
    "core.hooksPath": os.devnull,
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "core.quotePath": "false",
    "core.untrackedCache": "true",
    "diff.noprefix": "false",
    "diff.mnemonicPrefix": "false",
    "fastimport.unpackLimit": "1",
    "fetch.unpackLimit": "1",  # a pack appears whole or not at all, so a killed fetch leaves no half of a tree
    "gc.auto": "0",
    "http.followRedirects": "initial",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "init.defaultBranch": "patched",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    "transfer.fsckObjects": "true",
} | {f"protocol.{scheme}.allow": "always" for scheme in SCHEMES}
# Where a component's upstream bytes begin, and the branch with its patches applied.
BASE, BRANCH = "refs/multimesh/base", "refs/heads/patched"
# Commits that we make are the same on every machine and on every day.
IDENTITY = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "MultiMesh"), ("EMAIL", "patches@multimesh.invalid"), ("DATE", "@946684800 +0000"))
}
_MALFORMED = ("fsck error", "object corrupt", "index-pack failed", "invalid index-pack", "inflate", "bad object")
_MISSING = ("not our ref", "couldn't find remote ref", "unadvertised object", "no such remote ref")


def environment(directory: str) -> dict[str, str]:
    """Return the environment of a git process that works in ``directory``."""
    kept = ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_") or key in kept}
    # A clone that is mounted into a container belongs to another user there; this directory is one that we made.
    settings = [*_SETTINGS.items(), ("safe.directory", directory)]
    for number, (key, value) in enumerate(settings):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return env | {
        "GIT_CONFIG_COUNT": str(len(settings)),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "true",
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
        "GIT_CEILING_DIRECTORIES": os.path.dirname(directory),
        "GIT_NO_REPLACE_OBJECTS": "1",
        "LC_ALL": "C",
    }


class Repo(NamedTuple):
    """A repository with a work tree at ``root``."""

    root: Path

    def __call__(
        self,
        *args: str,
        stdin: bytes = b"",
        check: bool = True,
        env: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> proc.Result:
        """Run one git command here."""
        full = environment(str(self.root)) | dict(env or {})
        try:
            return proc.run(["git", *args], cwd=self.root, env=full, stdin=stdin, check=check, on_line=on_line)
        except errors.ToolError as error:
            said = str(error)
            if re.search(proc.DISK_FULL, said) or "unable to write" in said or "write error" in said:
                raise errors.DiskError(f"{self.root}: cannot be written; free some space and run again") from error
            if "Read-only file system" in said or "Permission denied" in said:
                raise errors.DiskError(f"{self.root}: cannot be written; make it writable and run again") from error
            raise

    def object(self, name: str) -> str | None:
        """Return the hash that a revision means, or None where this repository lacks it."""
        result = self("rev-parse", "--verify", "--quiet", "--end-of-options", name, check=False)
        return result.text if result.returncode == 0 else None


def init(root: Path) -> Repo:
    """Make an empty repository."""
    root.mkdir(parents=True)
    repo = Repo(root)
    repo("init", "--quiet", "--template=", "--object-format=sha1")
    (root / ".git" / "info").mkdir(exist_ok=True)
    return repo


def fetch(
    repo: Repo, url: str, revision: str, *, label: str, on_progress: Callable[[float, float | None], None]
) -> None:
    """Fetch one commit, without its history, from a url that ``url_fault`` let pass.

    Raises ``MissingCommitError`` where the server answers without it, ``NetworkError`` where there is no answer,
    ``IntegrityError`` where it sends malformed objects.
    """
    from git.util import CallableRemoteProgress, RemoteProgress

    def tell(code: int, done: str | float, total: str | float | None = None, message: str = "") -> None:
        if code & RemoteProgress.OP_MASK == RemoteProgress.RECEIVING:
            on_progress(float(done), float(total) if total else None)

    args = ("fetch", "--depth=1", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules", "--progress")
    on_line = CallableRemoteProgress(tell).new_message_handler()
    result = repo(*args, "--end-of-options", url, revision, check=False, on_line=on_line)
    if result.returncode:
        raise _failure(result, url, revision, label)


def ask(url: str, ref: str, *, label: str) -> dict[str, str]:
    """Return the hashes that a server has of a ref and of the peeled ref (``ref^{}``), if it has them."""
    nowhere = {"GIT_DIR": os.devnull}
    result = Repo(Path("/"))("ls-remote", "--end-of-options", url, ref, f"{ref}^{{}}", check=False, env=nowhere)
    if result.returncode:
        raise _failure(result, url, ref, label)
    pairs = (line.split("\t") for line in result.text.splitlines())
    return {name: commit for commit, name in pairs}


def url_fault(url: str) -> str | None:
    """Say why an address of the command line may not be fetched from, or return None."""
    if not re.match(rf"({'|'.join(SCHEMES)})://[^-]", url):
        return f"must begin with one of {', '.join(scheme + '://' for scheme in SCHEMES)}"
    if re.match(r"\w+://[^/@]*:[^/@]*@", url):
        return "contains a password; keep credentials out of command lines"
    return None


def hide_password(url: str) -> str:
    """Return a url as an error may show it, without any part that could be a password."""
    return re.sub(r"//[^/]*@", "//***@", url)


def _failure(result: proc.Result, url: str, revision: str, label: str) -> errors.ToolingError:
    """Return the error that a failed conversation with a server amounts to."""
    lines = result.stderr.decode("utf-8", "replace").splitlines()
    said = "\n".join(lines).lower()
    complaint = proc.shorten("; ".join(line.strip() for line in lines if "fatal:" in line or "error:" in line))
    if re.search(proc.DISK_FULL, said):
        return errors.DiskError(f"{label}: the disk is full; free some space and run the same command again")
    if any(phrase in said for phrase in _MISSING):
        return errors.MissingCommitError(
            f"{label}: {url} does not have {revision}; check the pin in sources.lock or take another --mirror"
        )
    broken = re.search(proc.NETWORK_FAILED, said)
    if not broken and any(phrase in said for phrase in _MALFORMED):
        return errors.IntegrityError(
            f"{label}: {url} sent objects that git refuses ({complaint}); take another --mirror"
        )
    remedy = "check the network or name a --mirror" if broken else "check the url or name a --mirror"
    return errors.NetworkError(f"{label}: cannot fetch {url} ({complaint}); {remedy}")
