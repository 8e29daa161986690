"""Patch series: ``patches/<component>/series`` names the files in order; each becomes one reproducible commit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from email.parser import BytesHeaderParser
from email.policy import default as default_policy
from pathlib import Path
from typing import NamedTuple

from tooling.core import errors
from tooling.sources import git
from tooling.sources.paths import link_fault

SERIES = "series"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.patch")


class Patch(NamedTuple):
    """One patch file of a component; paths in it are relative to ``third_party/<component>``."""

    component: str
    file: str
    data: bytes

    @property
    def message(self) -> str:
        """The commit message: the patch's Subject and text, or the file's name where it has none."""
        head, _, _ = self.data.partition(b"\ndiff --git ")
        if head.startswith(b"diff --git "):
            head = b""
        if head.startswith(b"From "):
            head = head.partition(b"\n")[2]
        mail = BytesHeaderParser(policy=default_policy).parsebytes(head)
        subject = re.sub(r"^\[PATCH[^\]]*\]\s*", "", " ".join(str(mail.get("Subject", "")).split()))
        body = head.partition(b"\n\n")[2].decode("utf-8", "replace") if subject else ""
        body = re.split(r"(?m)^---\s*$", body)[0].strip()
        return "\n\n".join(part for part in (subject or self.file.removesuffix(".patch"), body) if part) + "\n"

    @property
    def label(self) -> str:
        """How errors name this patch."""
        return f"patches/{self.component}/{self.file}"


def load_series(root: Path, component: str) -> tuple[Patch, ...]:
    """Read the patch series of a component; no folder and an empty series are the same."""
    folder = root / "patches" / component
    series, where = folder / SERIES, f"patches/{component}/series"
    present = sorted(path.name for path in folder.glob("*.patch"))
    if not series.is_file():
        if not present:
            return ()
        raise errors.ManifestError(f"{where}: not found; list {', '.join(present)} there in order")
    names = [line.strip() for line in series.read_text(encoding="utf-8").splitlines()]
    names = [name for name in names if name and not name.startswith("#")]
    for name in names:
        if not _FILE.fullmatch(name):
            raise errors.ManifestError(f"{where}: '{name}' is not the name of a .patch file beside it")
        if name not in present:
            raise errors.ManifestError(f"{where}: {name} is not a file in patches/{component}")
    if len(set(names)) != len(names):
        raise errors.ManifestError(f"{where}: names a patch twice")
    if forgotten := sorted(set(present) - set(names)):
        raise errors.ManifestError(f"{where}: does not list {', '.join(forgotten)}; add or delete it")
    return tuple(Patch(component, name, (folder / name).read_bytes()) for name in names)


def digests(patches: Sequence[Patch]) -> tuple[tuple[str, str], ...]:
    """Return file name and sha256 of each patch, in order."""
    return tuple((patch.file, hashlib.sha256(patch.data).hexdigest()) for patch in patches)


def digest(patches: Sequence[Patch]) -> str:
    """Return one hash for a whole series."""
    return hashlib.sha256("\n".join(map(" ".join, digests(patches))).encode()).hexdigest()


def apply_series(repo: git.Repo, base: str, patches: Sequence[Patch]) -> str:
    """Commit each patch on top of ``base`` without touching the work tree; return the last commit."""
    commit = base
    repo("read-tree", base)
    for patch in patches:
        label, data = patch.label, patch.data
        result = repo("apply", "--cached", "--whitespace=nowarn", "-", stdin=data, check=False)
        if result.returncode:
            if repo("apply", "--cached", "--check", "--reverse", "-", stdin=data, check=False).returncode == 0:
                raise errors.PatchError(
                    f"{label}: the pinned source already has this change; remove the patch from the series"
                )
            raise errors.PatchError(f"{label}: does not apply ({result.complaint}); adapt it to the pinned source")
        tree = repo("write-tree").text
        if tree == repo.object(f"{commit}^{{tree}}"):
            raise errors.PatchError(f"{label}: changes nothing; remove it from the series")
        _check_links(repo, commit, tree, label)
        commit = repo("commit-tree", tree, "-p", commit, stdin=patch.message.encode(), env=git.IDENTITY).text
    return commit


def _check_links(repo: git.Repo, before: str, after: str, label: str) -> None:
    """Refuse a symbolic link of a patch that points out of the component's tree."""
    told = repo("diff-tree", "-r", "-z", "--no-renames", "--diff-filter=AMT", before, after).stdout.split(b"\0")
    for entry, name in zip(told[::2], told[1::2], strict=False):
        _, mode, _, blob, _ = entry.decode().split()
        if mode == "120000":
            path, target = name.decode("utf-8", "replace"), repo("cat-file", "blob", blob).text
            if fault := link_fault(path, target):
                raise errors.PatchError(f"{label}: makes a link {path} that {fault}; no patch may")
