"""Git as a user would run it, but away from this machine's configuration, and always at the same time."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ALONE = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull} | {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in (("NAME", "Upstream"), ("EMAIL", "upstream@example.org"), ("DATE", "@1700000000 +0100"))
}


def git(cwd: Path, *args: str, stdin: bytes | None = None) -> str:
    """Run git in a folder; return what it prints."""
    command = ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *args]
    process = subprocess.run(command, cwd=cwd, input=stdin, capture_output=True, env=os.environ | ALONE)
    assert process.returncode == 0, f"{command}: {process.stderr.decode()}"
    return process.stdout.decode().rstrip("\n")


def commit(place: Path, files: dict[str, str | None], message: str = "change") -> str:
    """Write files (delete those that are None) and commit them, in a new repository where there is none."""
    for name, text in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if text is None else path.write_text(text)
    if not (place / ".git").exists():
        git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "commit", "-q", "--allow-empty", "-m", message)
    return git(place, "rev-parse", "HEAD")
