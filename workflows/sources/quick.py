"""The fast answer to "is there anything to do?": no YAML, no network, one ``git status`` a component, all at once.

The last full sync left a note: the size and times of every file that decides what ``third_party/`` should hold, and
what it put there. This module imports next to nothing, because Python's own start is most of what it takes.
"""

from __future__ import annotations

import os
import sys

from workflows.sources.hardened import environment

STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal")
_NOTE = ".synced"
_FORMAT = "1"


def signature(root: str) -> str:
    """Return the sizes, times and identities of the manifest, the lock and every file under ``patches/``."""
    lines = [_FORMAT]
    folders = [os.path.join(root, "patches")]
    files = [os.path.join(root, "sources.yaml"), os.path.join(root, "sources.lock")]
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
    path = os.path.join(root, "third_party", _NOTE)
    with open(f"{path}.{os.getpid()}", "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, "", inputs]))
    os.replace(f"{path}.{os.getpid()}", path)


def forget(root: str) -> None:
    """Make the next sync look at everything."""
    if os.path.exists(os.path.join(root, "third_party", _NOTE)):
        os.unlink(os.path.join(root, "third_party", _NOTE))


def in_place(root: str, groups: list[str]) -> dict[str, str] | None:
    """Return what each component of these groups (none: of all) holds if all are as noted and clean, else None."""
    try:
        with open(os.path.join(root, "third_party", _NOTE), encoding="utf-8") as file:
            note, _, inputs = file.read().partition("\n\n")
        if inputs != signature(root):
            return None
    except (OSError, UnicodeError):
        return None
    found = {}
    for name, of, holds in (line.split("\t") for line in note.splitlines()):
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


def answer(argv: list[str]) -> bool:
    """Answer a ``sync`` without options but ``--group`` if there is nothing to do; else return False."""
    if argv[:1] != ["sync"] or len(argv) % 2 == 0 or any(word != "--group" for word in argv[1::2]):
        return False
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    found = in_place(root, argv[2::2])
    if not found:
        return False
    width = max(map(len, found))
    sys.stdout.write("".join(f"{name:{width}}  kept  {_short(holds)}\n" for name, holds in found.items()))
    return True


def _short(holds: str) -> str:
    return f"link to {holds[2:]}" if holds.startswith("->") else holds[:12]
