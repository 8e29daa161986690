"""Patch series: ``patches/<component>/series`` names the files in order; ``git am`` makes one commit of each."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tooling.core import console, errors
from tooling.sources import git

if TYPE_CHECKING:
    from git import Repo

Series = dict[str, bytes]
"""Patches by file name, in their order; paths in them are relative to ``third_party/<component>``."""
_AUTHOR = b"From: MultiMesh <patches@multimesh.invalid>\nDate: Sat, 1 Jan 2000 00:00:00 +0000\n"


def load_series(root: Path, component: str) -> Series:
    """Read the patch series of a component; no folder and an empty series are the same."""
    folder = root / "patches" / component
    patches = {path.name: path for path in folder.glob("*.patch")}
    lines = (folder / "series").read_text(encoding="utf-8").split("\n") if (folder / "series").is_file() else []
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if odd := sorted({*names} ^ {*patches}) or [name for name in patches if names.count(name) > 1]:
        raise errors.SourceError(f"patches/{component}/series: name each .patch file beside it once, not {odd[0]}")
    return {name: patches[name].read_bytes() for name in names}


def sums(series: Series) -> dict[str, str]:
    """Return the sha256 of each patch by its name, in order."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in series.items()}


def apply_series(repo: Repo, series: Series, component: str) -> None:
    """Commit each patch on top of what is checked out. git refuses paths and links that lead out of the tree."""
    if series:
        console.note(f"{component}: applying {len(series)} patches")
    for name, data in series.items():
        path = Path(repo.git_dir, name)
        path.write_bytes(_mail(name, data))
        try:
            git.run(repo, "am", "--quiet", "--keep-cr", "--no-scissors", "--whitespace=nowarn", str(path))
        except errors.SourceError as error:
            raise errors.SourceError(
                f"patches/{component}/{name}: does not apply ({error}); adapt it to the pinned source, or remove it if "
                "that has the change"
            ) from error


def _mail(name: str, data: bytes) -> bytes:
    """Return a patch as ``git am`` reads it: with an author, and the file's name where it has no subject."""
    head, separator, diff = data.partition(b"diff --git ")
    if not re.search(rb"(?m)^Subject: ", head):
        head = b"Subject: " + name.removesuffix(".patch").encode() + b"\n\n---\n"
    return (b"" if re.search(rb"(?m)^From: ", head) else _AUTHOR) + head + separator + diff
