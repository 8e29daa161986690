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
ALL_GROUPS = (*GROUPS, *CUDA)
STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal")
# What decides the content of third_party/ and of .venv; the last of a pair are folders, which may be missing.
SOURCES = (("sources.yaml", "sources.lock"), ("patches",))
PACKAGES = (
    (
        "pyproject.toml",
        "multimesh/pyproject.toml",
        "maxtext/pyproject.toml",
        ".venv/bin/python",
        ".venv/.multimesh-workflows.json",
        ".venv/.multimesh-packages.json",
    ),
    ("requirements",),
)
_SOURCES_NOTE, _PACKAGES_NOTE = "third_party/.synced", ".venv/.multimesh-ready"
_FORMAT = "1"


def signature(root: str, what: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    """Return the sizes, times and identities of the files of ``SOURCES`` or ``PACKAGES``."""
    lines = [_FORMAT]
    files, folders = ([os.path.join(root, name) for name in names] for names in what)
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


def remember(root: str, inputs: str, components: list[tuple[str, tuple[str, ...], str]]) -> None:
    """Note what a finished sync left: name, groups and commit (or ``->`` and a link's target, or nothing) of each."""
    lines = [f"{name}\t{','.join(groups)}\t{holds}" for name, groups, holds in components]
    _write(os.path.join(root, _SOURCES_NOTE), lines, inputs)


def remember_packages(root: str, inputs: str, groups: list[str]) -> None:
    """Note which groups' packages are installed."""
    _write(os.path.join(root, _PACKAGES_NOTE), groups, inputs)


def _write(path: str, lines: list[str], inputs: str) -> None:
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, "", inputs]))
    os.replace(f"{path}.{os.getpid()}", path)


def _read(path: str, root: str, what: tuple[tuple[str, ...], tuple[str, ...]]) -> list[str] | None:
    """Return the lines of a note if all that it depends on is as it was, else None."""
    try:
        with open(path, encoding="utf-8") as file:
            note, _, inputs = file.read().partition("\n\n")
        return note.splitlines() if inputs == signature(root, what) else None
    except (OSError, UnicodeError):
        return None


def forget(root: str) -> None:
    """Make the next sync look at everything."""
    if os.path.exists(os.path.join(root, _SOURCES_NOTE)):
        os.unlink(os.path.join(root, _SOURCES_NOTE))


def in_place(root: str, groups: list[str]) -> dict[str, str] | None:
    """Return what each component of these groups (none: of all) holds if all are as noted and clean, else None."""
    note = _read(os.path.join(root, _SOURCES_NOTE), root, SOURCES)
    if note is None:
        return None
    found = {}
    for name, of, holds in (line.split("\t") for line in note):
        if not groups or any(group in of.split(",") for group in groups):
            found[name] = holds
    links = {name: holds for name, holds in found.items() if holds.startswith("->")}
    if not all(found.values()) or not all(_links_to(root, name, holds[2:]) for name, holds in links.items()):
        return None
    return found if _all_clean(root, {name: holds for name, holds in found.items() if name not in links}) else None


def _links_to(root: str, name: str, target: str) -> bool:
    place = os.path.join(root, "third_party", name)
    return os.path.islink(place) and os.readlink(place) == target


def _all_clean(root: str, commits: dict[str, str]) -> bool:
    """Run all ``git status`` at once; a clean tree's says its commit, its branch and nothing else."""
    running = []
    for name, commit in commits.items():
        place = os.path.join(root, "third_party", name)
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
    if command == ["bootstrap"]:
        ready = _read(os.path.join(root, _PACKAGES_NOTE), root, PACKAGES)
        if ready is None or not set(groups or GROUPS) <= set(ready):
            return
    found = in_place(root, groups)
    if not found:
        return
    width = max(map(len, found))
    try:
        sys.stdout.write("".join(f"{name:{width}}  kept  {_short(holds)}\n" for name, holds in found.items()))
        sys.stdout.flush()
    except OSError:
        return  # the full command meets the same and knows what to say
    os._exit(0)  # nothing is open; taking Python down in order would cost as much as the answer did


def _short(holds: str) -> str:
    return f"link to {holds[2:]}" if holds.startswith("->") else holds[:12]
