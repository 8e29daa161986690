"""Git by GitPython, with the settings of ``gitconfig`` alone, and its complaints told apart."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from git import GitCommandError, Remote, RemoteProgress, Repo
from git.exc import GitError, ODBError
from git.util import CallableRemoteProgress

from tooling.core import console, errors, proc

SCHEMES = ("https", "http", "ssh", "git", "file")
MIRROR = "MULTIMESH_MIRROR"
COMMIT = re.compile(r"[0-9a-f]{40}")
# Where a component's upstream bytes begin, and the branch with its patches applied.
BASE, BRANCH = "refs/multimesh/base", "patched"
_ATTEMPTS = 3
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("gitconfig")),
    "GIT_TEMPLATE_DIR": str(Path(__file__).with_name("template")),
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": ":".join(SCHEMES),
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",  # to look at a tree writes nothing
    "GIT_AUTHOR_DATE": "@946684800 +0000",
    "GIT_COMMITTER_DATE": "@946684800 +0000",
}
# GitPython adds to the environment and takes nothing away: GIT_DIR of a user's hook would lead it elsewhere.
for _name in [name for name in os.environ if name.startswith("GIT_") and not name.startswith("GIT_SSL_")]:
    del os.environ[_name]


@contextlib.contextmanager
def open_repo(root: Path, *, new: bool = False) -> Iterator[Repo]:
    """Yield the repository whose work tree is at ``root``, an empty one if it is ``new``.

    ``SourceError``: git complains; ``ToolingError``: it cannot write.
    """
    env = _ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    try:
        with Repo.init(root, env=env, object_format="sha1") if new else Repo(root) as repo:
            repo.git.update_environment(**env)
            yield repo
    except GitCommandError as error:
        raise explain("git", error, label=root) from error
    except (GitError, ODBError) as error:
        raise errors.SourceError(f"{root}: git cannot read it ({error}); move it away and run again") from error


def find_object(repo: Repo, name: str) -> str | None:
    """Return the hash that a revision means, or None where this repository lacks it."""
    return repo.git.rev_parse("--verify", "--quiet", "--end-of-options", name, with_exceptions=False) or None


def fetch(repo: Repo, url: str, commit: str, label: str) -> None:
    """Fetch one commit, without its history, from an upstream or its mirror; again where the server is not there.

    ``NotThereError``: it never is; ``SourceError``: it does not have the commit, or its objects are malformed.
    """
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
                fault = explain("fetch", error, label=label, url=url, commit=commit)
                if attempt == _ATTEMPTS or not isinstance(fault, errors.NotThereError):
                    raise fault from error


def write_tree(repo: Repo, folder: Path) -> str:
    """Write the files of a folder into a repository; return the hash of their tree."""
    index = folder.with_suffix(".index")
    env = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(folder), "GIT_DIR": str(repo.git_dir)}
    repo.git.add("--all", "--force", str(folder), env=env)
    return str(repo.git.write_tree(env=env))


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


def explain(kind: str, error: GitCommandError, **names: object) -> errors.ToolingError:
    """Return what a complaint means, with the lines of git's output that say what is wrong."""
    lines = [line.strip().removeprefix("stderr: ").strip("' ") for line in error.stderr.splitlines()]
    telling = "; ".join(line for line in lines if "fatal:" in line or "error:" in line)
    said = proc.shorten(telling or " ".join(lines)) or f"git ended with {error.status}"
    return errors.explain(kind, error.stderr, said=said, **names)
