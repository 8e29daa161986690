"""Git by GitPython, in a hardened environment, its complaints told apart."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tooling.core import console, errors, proc

if TYPE_CHECKING:
    from git import GitCommandError, Repo

SCHEMES = ("https", "http", "ssh", "git", "file")
MIRROR = "MULTIMESH_MIRROR"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Where a component's upstream bytes begin, and the branch with its patches applied.
BASE, BRANCH = "refs/multimesh/base", "patched"
_ATTEMPTS = 3
_SETTINGS = {
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.fsync": "none",  # a tree that a power cut spoils is fetched again; the verified hash tells
    "core.hooksPath": os.devnull,
    "core.protectHFS": "true",
    "core.protectNTFS": "true",
    "fetch.unpackLimit": "1",  # a pack appears whole or not at all, so a killed fetch leaves no half of a tree
    "gc.auto": "0",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "transfer.fsckObjects": "true",
}
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
    "GIT_TEMPLATE_DIR": "",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",  # to look at a tree writes nothing
} | {
    # Commits that we make are the same on every machine and on every day.
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "MultiMesh"), ("EMAIL", "patches@multimesh.invalid"), ("DATE", "@946684800 +0000"))
}
_BROKEN = r"(?i)early eof|unexpected disconnect|rpc failed|reset by peer|hung up|curl \d+"  # so git calls its pack, too
Fault = tuple[str, type[errors.ToolingError], str]
_CANNOT = "{label}: cannot fetch {url} ({said}); check the network and the url, or set MULTIMESH_MIRROR"
_DISK_FULL = (proc.DISK_FULL + "|unable to write|write error", errors.ToolingError,
              "{label}: cannot be written; free some space and run again")  # fmt: skip
_FAULTS = (
    _DISK_FULL,
    ("Read-only file system|Permission denied", errors.ToolingError,
     "{label}: cannot be written; make it writable and run again"),
    ("", errors.SourceError, "{said}"),
)  # fmt: skip
_FAULTS_OF_SERVERS = (
    (r"(?i)not our ref|couldn't find remote ref|unadvertised object|no such remote ref", errors.NotThereError,
     "{label}: {url} does not have {commit}; check the pin in sources.lock or another MULTIMESH_MIRROR"),
    _DISK_FULL,
    (_BROKEN, errors.NotThereError, _CANNOT),
    (r"(?i)fsck error|object corrupt|index-pack failed|invalid index-pack|inflate|bad object", errors.SourceError,
     "{label}: {url} sent objects that git refuses ({said}); do not use it"),
    ("", errors.NotThereError, _CANNOT),
)  # fmt: skip
"""What git's complaints mean, by the first pattern that fits."""
# GitPython adds to the environment and takes nothing away: GIT_DIR of a user's hook would lead it elsewhere.
for _name in [name for name in os.environ if name.startswith("GIT_") and not name.startswith("GIT_SSL_")]:
    del os.environ[_name]


@contextlib.contextmanager
def open_repo(root: Path, *, new: bool = False) -> Iterator[Repo]:
    """Yield the repository whose work tree is at ``root``, an empty one if it is ``new``."""
    if shutil.which("git") is None:
        raise errors.ToolingError("git: not found; install it and run the same command again")
    from git import GitCommandError, Repo
    from git.exc import GitError, ODBError

    # A clone that is mounted into a container belongs to another user there; this directory is one that we made.
    settings = [*_SETTINGS.items(), ("safe.directory", str(root))]
    env = {"GIT_CONFIG_COUNT": str(len(settings)), "GIT_CEILING_DIRECTORIES": str(root.parent)} | _ENVIRONMENT
    for number, (key, value) in enumerate(settings):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    try:
        with Repo.init(root, env=env, object_format="sha1") if new else Repo(root) as repo:
            repo.git.update_environment(**env)
            yield repo
    except GitCommandError as error:
        raise _explain(error, _FAULTS, label=root) from error
    except (GitError, ODBError) as error:
        raise errors.SourceError(f"{root}: git cannot read it ({error}); move it away and run again") from error


def run(repo: Repo, command: str, *args: str, **options: Any) -> str:
    """Run one git command; return its output. ``SourceError``: it complains; ``ToolingError``: it cannot write."""
    from git import GitCommandError

    try:
        return str(getattr(repo.git, command)(*args, **options))
    except GitCommandError as error:
        raise _explain(error, _FAULTS, label=repo.working_dir) from error


def find_object(repo: Repo, name: str) -> str | None:
    """Return the hash that a revision means, or None where this repository lacks it."""
    try:
        return run(repo, "rev_parse", "--verify", "--quiet", "--end-of-options", name)
    except errors.SourceError:
        return None


def fetch(repo: Repo, url: str, commit: str, label: str) -> None:
    """Fetch one commit, without its history, from an upstream or its mirror.

    ``NotThereError``: the server answers without it, or does not answer; ``SourceError``: its objects are malformed.
    """
    from git import GitCommandError, Remote, RemoteProgress
    from git.util import CallableRemoteProgress

    origin = Remote.add(repo, "origin", url := find_address(url))
    for attempt in range(1, _ATTEMPTS + 1):
        text = f"{label}: fetching {commit[:12]}" + (f", attempt {attempt}" if attempt > 1 else "")
        with console.work(text) as advance:

            def report(code: int, count: Any, total: Any, message: str) -> None:
                if code & RemoteProgress.OP_MASK == RemoteProgress.RECEIVING:
                    advance(float(count), float(total) if total else None)

            try:
                origin.fetch(commit, CallableRemoteProgress(report), depth=1, no_tags=True, no_recurse_submodules=True)
                return
            except GitCommandError as error:
                if attempt == _ATTEMPTS or not re.search(_BROKEN, error.stderr):
                    raise _explain(error, _FAULTS_OF_SERVERS, label=label, url=url, commit=commit) from error


def write_tree(repo: Repo, folder: Path) -> str:
    """Write the files of a folder into a repository; return the hash of their tree."""
    index = folder.with_suffix(".index")
    env = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(folder), "GIT_DIR": str(repo.git_dir)}
    run(repo, "add", "--all", "--force", str(folder), env=env)
    return run(repo, "write_tree", env=env)


def find_address(url: str) -> str:
    """Return where an upstream is fetched from: itself, or a mirror that keeps it under its last name."""
    mirror = os.environ.get(MIRROR)
    return f"{check_address(mirror, MIRROR).rstrip('/')}/{url.rstrip('/').rpartition('/')[2]}" if mirror else url


def check_address(url: str, label: str) -> str:
    """Return an address of a user's, or refuse it without showing it: it may hold a password."""
    if re.match(r"https?://[^/]*@|\w+://[^/@]*:[^/@]*@", url) or not re.match(rf"({'|'.join(SCHEMES)})://[^-]", url):
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise errors.OptionError(f"{label}: its address must begin with one of {schemes} and hold no password")
    return url


def _explain(error: GitCommandError, faults: Sequence[Fault], **names: object) -> errors.ToolingError:
    """Return what a complaint means, with the lines of git's output that say what is wrong."""
    lines = [line.strip().removeprefix("stderr: ").strip("' ") for line in error.stderr.splitlines()]
    telling = "; ".join(line for line in lines if "fatal:" in line or "error:" in line)
    said = proc.shorten(telling or " ".join(lines)) or f"git ended with {error.status}"
    kind, text = next((kind, text) for pattern, kind, text in faults if re.search(pattern, error.stderr))
    return kind(text.format(said=said, **names))
