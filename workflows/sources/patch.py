"""Patch series: ``patches/<component>/series`` names the files in order; each becomes one reproducible commit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from email.policy import default as default_policy
from pathlib import Path

from workflows import errors
from workflows.sources import git, safety

SERIES = "series"
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*\.patch")


@dataclass(frozen=True)
class Patch:
    """One patch file of a component; paths in it are relative to ``third_party/<component>``."""

    component: str
    file: str
    data: bytes

    @property
    def sha256(self) -> str:
        """The sha256 of the file in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

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
    if not folder.exists():
        return ()
    if folder.is_symlink() or not folder.is_dir():
        raise errors.ManifestError(f"patches/{component}: is not a folder of this repository")
    series = folder / SERIES
    present = sorted(path.name for path in folder.glob("*.patch"))
    if not series.is_file() or series.is_symlink():
        if not present:
            return ()
        raise errors.ManifestError(f"patches/{component}/series: not found; list {', '.join(present)} there in order")
    names = [line.strip() for line in series.read_text(encoding="utf-8").splitlines()]
    names = [name for name in names if name and not name.startswith("#")]
    for name in names:
        if not _FILE.fullmatch(name):
            raise errors.ManifestError(
                f"patches/{component}/series: '{name}' is not the name of a .patch file beside it"
            )
        if name not in present or (folder / name).is_symlink():
            raise errors.ManifestError(f"patches/{component}/series: {name} is not a file in patches/{component}")
    if len(set(names)) != len(names):
        raise errors.ManifestError(f"patches/{component}/series: names a patch twice")
    if forgotten := sorted(set(present) - set(names)):
        raise errors.ManifestError(
            f"patches/{component}/series: does not list {', '.join(forgotten)}; add or delete it"
        )
    return tuple(Patch(component, name, (folder / name).read_bytes()) for name in names)


def digest(patches: Sequence[Patch]) -> str:
    """Return one hash for a whole series."""
    return hashlib.sha256("\n".join(f"{patch.file} {patch.sha256}" for patch in patches).encode()).hexdigest()


def apply_series(repo: git.Repo, base: str, patches: Sequence[Patch]) -> str:
    """Commit each patch on top of ``base`` without touching the work tree; return the last commit."""
    commit = base
    repo("read-tree", base)
    for patch in patches:
        _check_paths(repo, patch)
        result = repo("apply", "--cached", "--whitespace=nowarn", "-", stdin=patch.data, check=False)
        if result.returncode:
            raise errors.PatchError(_rejection(repo, patch, result.complaint))
        tree = repo("write-tree").text
        check_tree(repo, tree, patch.label, errors.PatchError, since=commit)
        if tree == repo.object(f"{commit}^{{tree}}"):
            raise errors.PatchError(f"{patch.label}: changes nothing; remove it from the series")
        message = patch.message.encode()
        commit = repo("commit-tree", tree, "-p", commit, stdin=message, env=git.IDENTITY).text
    return commit


def _check_paths(repo: git.Repo, patch: Patch) -> None:
    """Refuse a patch that names files outside of its tree or inside .git, before anything is done with it."""
    result = repo("apply", "--numstat", "-z", "-", stdin=patch.data, check=False)
    if result.returncode:
        raise errors.PatchError(f"{patch.label}: is no patch that git can read ({result.complaint}); make it anew")
    records = result.stdout.decode("utf-8", "surrogateescape").split("\0")
    paths = [record.rpartition("\t")[2] for record in records]
    paths += re.findall(r"(?m)^(?:rename|copy) (?:from|to) (.*)$", patch.data.decode("utf-8", "surrogateescape"))
    for path in filter(None, paths):
        if fault := safety.path_fault(path.strip('"')):
            raise errors.PatchError(f"{patch.label}: '{path}' {fault}; a patch may only touch files of its component")


def _rejection(repo: git.Repo, patch: Patch, complaint: str) -> str:
    undone = repo("apply", "--cached", "--check", "--reverse", "-", stdin=patch.data, check=False)
    if undone.returncode == 0:
        return f"{patch.label}: the pinned source already has this change; remove the patch from the series"
    return f"{patch.label}: does not apply ({complaint}); adapt it to the pinned source"


def check_tree(
    repo: git.Repo, tree: str, label: str, kind: type[errors.WorkflowsError], since: str | None = None
) -> None:
    """Refuse links that leave a tree, submodules and unsafe names, in a tree or in what changed since a commit."""
    if since is None:
        listing = repo("ls-tree", "-r", "-z", tree).stdout
        pairs = [line.partition(b"\t") for line in listing.split(b"\0") if line]
        entries = [(head.split()[0], head.split()[2], path) for head, _, path in pairs]
    else:
        fields = repo("diff-tree", "-r", "-z", "--no-renames", since, tree).stdout.split(b"\0")
        heads = [head.split() for head in fields[0:-1:2]]
        entries = [(head[1], head[3], path) for head, path in zip(heads, fields[1::2], strict=True)]
    for mode, blob, raw in entries:
        path = raw.decode("utf-8", "surrogateescape")
        if mode == b"000000":
            continue
        if fault := safety.path_fault(path):
            raise kind(f"{label}: '{path}' {fault}; refused")
        if mode == b"160000":
            raise kind(f"{label}: '{path}' is a submodule; only files and links are taken")
        if mode == b"120000":
            target = repo("cat-file", "blob", blob.decode()).stdout.decode("utf-8", "surrogateescape")
            if fault := safety.link_fault(path, target):
                raise kind(f"{label}: link '{path}' -> '{target}' {fault}; refused")
