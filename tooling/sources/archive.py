"""Archives as a transport: wheels by name, version and hash, or files by url; read into git objects, never unpacked."""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from tooling.core import errors, proc
from tooling.sources import git, safety
from tooling.sources.manifest import Component, Transport

_CHUNK = 1 << 20
_TIMEOUT_S = 60


def download(
    component: Component,
    transport: Transport,
    sha256: str | None,
    folder: Path,
    *,
    mirror: str | None,
    on_progress: git.Progress | None = None,
) -> Path:
    """Bring an archive into ``folder`` and hold it against its hash; None for one that is yet to be pinned."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / transport.file
    if transport.kind == "pypi":
        _from_index(f"{transport.package}=={component.version}", sha256, path, component.name)
    else:
        url = f"{mirror.rstrip('/')}/{quote(transport.file)}" if mirror else transport.url
        _from_url(url, path, component.name, on_progress)
    if sha256 is not None and (found := file_sha256(path)) != sha256:
        raise errors.IntegrityError(
            f"{component.name}: {path.name} has sha256 {found}, sources.lock pins {sha256}; do not use it"
        )
    return path


def _from_index(wanted: str, sha256: str | None, path: Path, label: str) -> None:
    requirement = path.with_name("requirement.txt")
    requirement.write_text(f"{wanted} --hash=sha256:{sha256}\n" if sha256 else f"{wanted}\n", encoding="utf-8")
    # The package may ask for a newer Python than ours. With its patches it runs here.
    options = ["--no-deps", "--ignore-requires-python", "--only-binary=:all:", "--no-input", "--progress-bar=off", "-q",
               "--disable-pip-version-check", *(["--require-hashes"] if sha256 else [])]  # fmt: skip
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *options,
        "--dest",
        path.parent,
        "-r",
        requirement,
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {"PYTHONSAFEPATH": "1"}
    result = proc.run(command, check=False, env=env)
    if result.returncode == 0 and path.is_file():
        return
    said = (result.stderr + result.stdout).decode("utf-8", "replace")
    if proc.OTHER_FILES.search(said):
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


def _from_url(url: str, path: Path, label: str, on_progress: git.Progress | None) -> None:
    import requests

    try:
        with requests.get(url, stream=True, timeout=_TIMEOUT_S) as answer, path.open("wb") as file:
            if answer.status_code in (404, 410):
                raise errors.MissingCommitError(
                    f"{label}: {url} does not exist; check the version or take another --mirror"
                )
            answer.raise_for_status()
            total = float(answer.headers.get("Content-Length", 0)) or None
            for chunk in answer.iter_content(_CHUNK):
                file.write(chunk)
                if on_progress:
                    on_progress(file.tell(), total)
    except requests.RequestException as error:
        raise errors.NetworkError(f"{label}: cannot fetch {url} ({type(error).__name__}); check the network") from error


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def import_tree(repo: git.Repo, path: Path, root: str, *, label: str) -> str:
    """Write the folder ``root`` of an archive into a repository and return the hash of its tree."""
    try:
        entries = sorted(_entries(path, root, label))
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise errors.IntegrityError(f"{label}: {path.name} cannot be read as an archive ({error})") from error
    if not entries:
        raise errors.IntegrityError(f"{label}: {path.name} has no folder {root}; correct 'root' in sources.yaml")
    for (before, *_), (name, *_) in itertools.pairwise(entries):
        if before == name:
            raise errors.IntegrityError(f"{label}: {path.name} holds {name} twice")
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
    prefix = "" if root == "." else root.rstrip("/") + "/"
    for raw, mode, data in _tar_members(path) if tarfile.is_tarfile(path) else _zip_members(path):
        name = raw.removeprefix("./")
        if fault := safety.path_fault(name):
            raise errors.IntegrityError(f"{label}: {path.name} holds a file '{raw}' whose path {fault}; do not use it")
        if name.startswith(prefix):
            kind = "120000" if stat.S_ISLNK(mode) else "100755" if mode & 0o100 else "100644"
            if stat.S_ISLNK(mode) and (
                fault := safety.link_fault(name.removeprefix(prefix), data.decode("utf-8", "replace"))
            ):
                raise errors.IntegrityError(f"{label}: {path.name} holds a link '{raw}' that {fault}; do not use it")
            yield name.removeprefix(prefix), kind, data


def _zip_members(path: Path) -> Iterator[tuple[str, int, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.is_dir():
                # orig_filename: Python cuts the other one at a NUL byte.
                yield info.orig_filename, info.external_attr >> 16, archive.read(info)


def _tar_members(path: Path) -> Iterator[tuple[str, int, bytes]]:
    with tarfile.open(path) as archive:
        for info in archive:
            if info.issym():
                yield info.name, stat.S_IFLNK, info.linkname.encode()
            elif info.isfile() or info.islnk():
                content = archive.extractfile(info)
                yield info.name, info.mode, content.read() if content else b""
            elif not info.isdir():
                raise tarfile.TarError(f"{info.name} is neither a file nor a link")
