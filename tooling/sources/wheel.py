"""A component's wheel, by name, version and hash: read into git objects, never unpacked."""

from __future__ import annotations

import os
import re
import stat
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tooling.core import errors, proc
from tooling.sources import git
from tooling.sources.manifest import Component, Wheel

# Names that some file system reads as `.git`: other case, NTFS short names, trailing dots or blanks, HFS+ ignorables.
_GIT_ALIAS = re.compile(r"(\.git|git~\d+)[ .]*(:.*)?", re.IGNORECASE)
_IGNORABLE = re.compile("[\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufeff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def download(component: Component, wheel: Wheel, sha256: str | None, folder: Path) -> Path:
    """Bring a wheel into ``folder``, held by pip against its hash; None for one that is yet to be pinned."""
    folder.mkdir(parents=True, exist_ok=True)
    path, label, wanted = folder / wheel.file, component.name, f"{wheel.package}=={component.version}"
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{wanted} --hash=sha256:{sha256}\n" if sha256 else f"{wanted}\n", encoding="utf-8")
    # The package may ask for a newer Python than ours. With its patches it runs here.
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--no-input", "--progress-bar=off", "-q",
               "--disable-pip-version-check", *(["--require-hashes"] if sha256 else [])]  # fmt: skip
    pip = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(requirement)]
    result = proc.run(pip, check=False, env=os.environ | {"PYTHONSAFEPATH": "1"})
    if result.returncode == 0 and path.is_file():
        return path
    said = (result.stderr + result.stdout).decode("utf-8", "replace")
    if re.search(proc.OTHER_FILES, said):
        raise errors.IntegrityError(
            f"{label}: the index offers another {path.name} than sources.lock pins ({sha256}); do not use it"
        )
    if (known := proc.of_pip(said, label)) is not None:
        raise known
    if result.returncode == 0 or "No matching distribution" in said:
        raise errors.MissingCommitError(
            f"{label}: the package index has no {path.name}; check its version or pip's index settings"
        )
    raise errors.ToolError(f"{label}: pip download failed ({result.complaint})")


def import_tree(repo: git.Repo, path: Path, root: str, *, label: str) -> str:
    """Write the folder ``root`` of a wheel into a repository and return the hash of its tree."""
    try:
        entries = sorted(_entries(path, root, label))
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise errors.IntegrityError(f"{label}: {path.name} cannot be read as a wheel ({error})") from error
    if not entries:
        raise errors.IntegrityError(f"{label}: {path.name} has no folder {root}; correct 'root' in sources.yaml")
    head = b"commit refs/multimesh/import\ncommitter MultiMesh <patches@multimesh.invalid> 0 +0000\ndata 0\n"
    body = b"".join(
        b"M %s inline %s\ndata %d\n%s\n" % (mode.encode(), name.encode(), len(data), data)
        for name, mode, data in entries
    )
    repo("fast-import", "--quiet", "--done", stdin=head + body + b"done\n")
    tree = repo.object("refs/multimesh/import^{tree}")
    repo("update-ref", "-d", "refs/multimesh/import")
    return tree or ""


def _entries(path: Path, root: str, label: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield path, relative to ``root``, git's mode and content of the files and links under it."""
    prefix = root.rstrip("/") + "/"
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            # Python cuts ``filename`` at a NUL byte.
            raw, mode, data = info.orig_filename, info.external_attr >> 16, archive.read(info)
            name = raw.removeprefix("./")
            if fault := path_fault(name):
                raise errors.IntegrityError(
                    f"{label}: {path.name} holds a file '{raw}' whose path {fault}; do not use it"
                )
            if not name.startswith(prefix):
                continue
            name, is_link = name.removeprefix(prefix), stat.S_ISLNK(mode)
            if is_link and (fault := link_fault(name, data.decode("utf-8", "replace"))):
                raise errors.IntegrityError(f"{label}: {path.name} holds a link '{raw}' that {fault}; do not use it")
            yield name, "120000" if is_link else "100755" if mode & 0o100 else "100644", data


def path_fault(path: str) -> str | None:
    """Say why a path may not be used inside a component's tree, or return None."""
    if _CONTROL.search(path):
        return "contains control characters"
    if path.startswith(("/", "~")) or re.match(r"[A-Za-z]:", path):
        return "is absolute"
    if "\\" in path:
        return "contains a backslash"
    for part in path.split("/"):
        if part == "..":
            return "leaves its tree by '..'"
        if part in ("", "."):
            return "has an empty or '.' part"
        if _GIT_ALIAS.fullmatch(_IGNORABLE.sub("", part)):
            return "goes into .git"
    return None


def link_fault(path: str, target: str) -> str | None:
    """Say why a symbolic link at ``path`` (inside a tree) may not point to ``target``, or return None."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = next((count for count, part in enumerate(parts) if part != ".."), len(parts))
    if target.startswith("/") or not target or up > path.count("/"):
        return "points out of its tree"
    # After a name, '..' may follow another link and leave the tree although the text of the path stays inside.
    return path_fault("/".join(parts[up:])) if parts[up:] else None
