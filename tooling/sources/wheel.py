"""A component's wheel, by name, version and hash: read into git objects, never unpacked."""

from __future__ import annotations

import os
import re
import stat
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tooling.core import errors, proc
from tooling.sources import git
from tooling.sources.manifest import Component, Wheel
from tooling.sources.paths import link_fault, path_fault


def download(component: Component, wheel: Wheel, hashes: Sequence[str], folder: Path) -> Path:
    """Bring a wheel into ``folder``, held by pip against one of its hashes; none for one that is yet to be pinned."""
    folder.mkdir(parents=True, exist_ok=True)
    path, label, wanted = folder / wheel.file, component.name, f"{wheel.package}=={component.version}"
    requirement = folder / "requirement.txt"
    requirement.write_text(" ".join([wanted, *(f"--hash=sha256:{each}" for each in hashes)]), encoding="utf-8")
    # The package may ask for a newer Python than ours. With its patches it runs here.
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--no-input", "--progress-bar=off", "-q",
               "--disable-pip-version-check", *(["--require-hashes"] if hashes else [])]  # fmt: skip
    pip = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(requirement)]
    result = proc.run(pip, check=False, env=os.environ | {"PYTHONSAFEPATH": "1"})
    if result.returncode == 0 and path.is_file():
        return path
    said = (result.stderr + result.stdout).decode("utf-8", "replace")
    if re.search(proc.OTHER_FILES, said):
        raise errors.IntegrityError(
            f"{label}: the index offers another {path.name} than is pinned ({', '.join(hashes)}); do not use it"
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
