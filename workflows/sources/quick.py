"""The fast answer to "is there anything to do?": no YAML, no network, one ``git status`` a component, all at once.

The last full sync left a note: the size and times of every file that decides what ``third_party/`` should hold, and
what it put there. The last bootstrap left another about ``.venv``. This module imports next to nothing, because
Python's own start is most of what it takes.
"""

from __future__ import annotations

import os
import sys

from workflows.sources.hardened import environment

GROUPS = ("run", "source", "dev")
CUDA = ("cuda12", "cuda13")  # only where asked for: packages of 5 GB, for GPUs
ALL_GROUPS = (*GROUPS, *CUDA, "data")  # data, too, is 2 GB, only where asked for
STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal")
# A note, and the files and folders that it depends on; they may be missing.
Note = tuple[str, tuple[str, ...], str]
SOURCES: Note = ("third_party/.synced", ("sources.yaml", "sources.lock"), "patches")
PACKAGES: Note = (
    ".venv/.multimesh-ready",
    ("pyproject.toml", "multimesh/pyproject.toml", "maxtext/pyproject.toml",
     ".venv/bin/python", ".venv/.multimesh-workflows.json"),
    "requirements",
)  # fmt: skip
_FORMAT = "2"


def signature(root: str, note: Note) -> str:
    """Return the sizes, times and identities of the files that a note depends on."""
    lines, files, folders = [_FORMAT], [os.path.join(root, name) for name in note[1]], [os.path.join(root, note[2])]
    while folders:
        try:
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        files += [entry.path for entry in entries if not entry.is_dir(follow_symlinks=False)]
    for path in files:
        look = os.stat(path)
        lines.append(f"{path} {look.st_size} {look.st_mtime_ns} {look.st_ctime_ns} {look.st_ino}")
    return "\n".join(lines)


def remember(root: str, note: Note, inputs: str, lines: list[str]) -> None:
    """Write a note, with the signature of the files that it depends on.

    A line of ``SOURCES`` has name, groups and commit (or ``->`` and a link's target, or nothing) of a component; one of
    ``PACKAGES`` is a group whose packages are installed.
    """
    path = os.path.join(root, note[0])
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, "", inputs]))
    os.replace(f"{path}.{os.getpid()}", path)


def recall(root: str, note: Note) -> list[str] | None:
    """Return the lines of a note if all that it depends on is as it was, else None."""
    try:
        with open(os.path.join(root, note[0]), encoding="utf-8") as file:
            lines, _, inputs = file.read().partition("\n\n")
        return lines.splitlines() if inputs == signature(root, note) else None
    except (OSError, UnicodeError):
        return None


def forget(root: str) -> None:
    """Make the next sync look at everything."""
    if os.path.exists(path := os.path.join(root, SOURCES[0])):
        os.unlink(path)


def in_place(root: str, groups: list[str]) -> dict[str, str] | None:
    """Return the state of each component of these groups (none: of all) if all are as noted and clean, else None."""
    lines = recall(root, SOURCES)
    if lines is None:
        return None
    found, commits = {}, {}
    for name, of, holds in (line.split("\t") for line in lines):
        if groups and not set(groups) & set(of.split(",")):
            continue
        place, found[name] = os.path.join(root, "third_party", name), holds
        if not holds.startswith("->"):
            commits[place] = holds
        elif not os.path.islink(place) or os.readlink(place) != holds[2:]:
            return None
    return found if all(found.values()) and _all_clean(commits) else None


def _all_clean(commits: dict[str, str]) -> bool:
    """Run all ``git status`` at once; a clean tree's says its commit, its branch and nothing else."""
    running = []
    for place, commit in commits.items():
        if os.path.islink(place) or not os.path.isdir(os.path.join(place, ".git")):
            continue
        reading, writing = os.pipe()
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        quiet = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        actions = [nothing, (os.POSIX_SPAWN_DUP2, writing, 1), quiet]
        try:
            pid = os.posix_spawnp("git", ["git", "-C", place, *STATUS], environment(place), file_actions=actions)
        except OSError:
            os.close(reading)
            break
        finally:
            os.close(writing)
        running.append((pid, reading, f"# branch.oid {commit}\0# branch.head patched\0".encode()))
    clean = len(running) == len(commits)
    for pid, reading, expected in running:
        with open(reading, "rb") as pipe:
            said = pipe.read()
        clean &= os.waitpid(pid, 0)[1] == 0 and said == expected
    return clean


def _python(root: str) -> str:
    """Return which Python and which jax the environment of this process has, as the first line of the answer."""
    version = sys.version_info[:3]
    library = os.path.join(root, ".venv", "lib", f"python{version[0]}.{version[1]}", "site-packages")
    found = [name for name in os.listdir(library) if name.startswith("jax-") and name.endswith(".dist-info")]
    jax = "".join(f", jax {name[len('jax-') : -len('.dist-info')]}" for name in found)
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return f"Python {'.'.join(map(str, version))} (of .venv: {base}){jax}\n"


def answer(argv: list[str]) -> None:
    """End the process with the answer to ``sync`` or ``bootstrap``, if there is nothing to do; else return.

    Only the option ``--group`` is understood; any other, and a group that does not exist, is for the full command.
    """
    command, groups = argv[:1], argv[2::2]
    if command not in (["sync"], ["bootstrap"]) or argv[1::2] != ["--group"] * len(groups):
        return
    if not set(groups) <= set(ALL_GROUPS) or sys.stdout is None:
        return
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    first = ""
    if command == ["bootstrap"]:
        if os.environ.get("PYTHON") or not set(groups or GROUPS) <= set(recall(root, PACKAGES) or ()):
            return
        first = _python(root)
    found = in_place(root, groups)
    if not found:
        return
    width = max(map(len, found))
    shown = {name: f"link to {holds[2:]}" if holds.startswith("->") else holds[:12] for name, holds in found.items()}
    try:
        sys.stdout.write(first + "".join(f"{name:{width}}  kept  {holds}\n" for name, holds in shown.items()))
        sys.stdout.flush()
    except OSError:
        return  # the full command meets the same error and explains it
    os._exit(0)  # nothing is open; taking Python down in order would cost as much as the answer did
