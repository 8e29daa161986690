"""The folders of a clone that sources touch, and their state. A sync is safe: one at a time, first in a stage."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tooling.core import files
from tooling.sources import git

ROOT = Path(__file__).resolve().parents[2]
_RECORD = Path(".git", "multimesh.json")
_STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--no-renames", "--untracked-files=normal")
State = Literal["missing", "clean", "dirty", "commits", "unknown", "link"]


class Record(NamedTuple):
    """The record that this tooling wrote into a tree when it made it.

    ``commit`` is the branch's commit after the patches, ``base`` the one before; ``source`` says where the bytes came
    from, ``override`` what the user named instead of the lock, if anything; ``series`` is a digest of the patches, and
    ``tree`` git's hash of what they give.
    """

    version: str
    base: str
    commit: str
    source: str
    override: str | None = None
    series: str = ""
    tree: str = ""

    def write(self, place: Path) -> None:
        """Write the record into a tree."""
        files.write_json(place / _RECORD, self._asdict())


class Observed(NamedTuple):
    """One look at ``third_party/<name>``.

    ``clean``: as this tooling left it. ``dirty``: files were changed or added. ``commits``: the branch has moved.
    ``unknown``: not made by this tooling. ``link``: a symbolic link, to ``target``.
    """

    state: State
    head: str | None = None
    record: Record | None = None
    changed: tuple[str, ...] = ()
    target: str = ""


def observe(place: Path) -> Observed:
    """Look at a folder of ``third_party/``; reads only, and runs one ``git status``."""
    if place.is_symlink():
        return Observed("link", target=os.readlink(place))
    if not place.exists():
        return Observed("missing")
    record = read_record(place)
    status = git.Repo(place)(*_STATUS, check=False) if record else None
    if status is not None and status.returncode:  # a disk that is full to the last byte takes no notes of git's
        status = git.Repo(place)("--no-optional-locks", *_STATUS, check=False)
    if record is None or status is None or status.returncode:
        return Observed("unknown", record=record)
    lines = status.stdout.decode("utf-8", "surrogateescape").split("\0")
    head = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    # The path of a porcelain-v2 line stands after 8 fields, 10 if unmerged, 1 if untracked.
    changed = tuple(
        line.split(" ", {"1": 8, "u": 10}.get(line[0], 1))[-1] for line in lines if line and not line.startswith("#")
    )
    return Observed("dirty" if changed else "clean" if head == record.commit else "commits", head, record, changed)


def read_record(place: Path) -> Record | None:
    """Return the record in a tree, or None for a tree that this tooling did not make."""
    try:
        return Record(**files.read_object(place / _RECORD))
    except TypeError:
        return None


class Workspace:
    """The folders and files of one clone that sources touch.

    Components lie in ``third_party``; ``stages`` has a folder for each run that builds some, on the same file system.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.third_party = root, root / "third_party"
        self.manifest, self.lock = root / "sources.yaml", root / "sources.lock"
        self.stages = self.third_party / ".stage"

    def place(self, name: str) -> Path:
        """Return where a component lies."""
        return self.third_party / name

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let one run at a time change ``third_party/``."""
        self.third_party.mkdir(exist_ok=True)
        with files.lock(self.third_party / ".lock", "waiting for another run that changes third_party/"):
            yield

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        """Give a folder to build in, which is gone afterwards, as are those that killed runs left.

        A killed run's git may still write into its own stage, so a stage is never used twice.
        """
        left = sorted(self.stages.glob("run-*"))
        for old in self.stages.glob("run-*/old/*"):  # taken away, but its run was killed before it was replaced
            if not os.path.lexists(self.place(old.name)):
                old.rename(self.place(old.name))
        stage = self.stages / f"run-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            stage.mkdir(parents=True)
            yield stage
        finally:
            for folder in (stage, *left):
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.stages.rmdir()

    def swap(self, new: Path, name: str, stage: Path) -> None:
        """Move a finished tree into its place, and the old one into the stage."""
        place, old = self.place(name), stage / "old" / name
        if not os.path.lexists(place):
            new.rename(place)
            return
        old.parent.mkdir(parents=True, exist_ok=True)
        place.rename(old)
        try:
            new.rename(place)
        except BaseException:
            old.rename(place)
            raise
