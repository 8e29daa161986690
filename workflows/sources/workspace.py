"""Where things lie in a clone, and what makes a sync safe: one at a time, and every change in a stage first."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workflows import console, files


@dataclass(frozen=True)
class Workspace:
    """The folders and files of one clone that sources touch."""

    root: Path

    @property
    def manifest(self) -> Path:
        """What is wanted."""
        return self.root / "sources.yaml"

    @property
    def lock(self) -> Path:
        """Exactly which bytes."""
        return self.root / "sources.lock"

    @property
    def third_party(self) -> Path:
        """Where components lie."""
        return self.root / "third_party"

    @property
    def stages(self) -> Path:
        """Where they are built, on the same file system; one folder a run."""
        return self.third_party / ".stage"

    @property
    def stashes(self) -> Path:
        """Trees that ``--stash`` put aside."""
        return self.third_party / ".stash"

    def place(self, name: str) -> Path:
        """Where a component lies."""
        return self.third_party / name

    @property
    def _links(self) -> Path:
        return self.third_party / ".links.json"

    def links(self) -> dict[str, str]:
        """Return the symbolic links that this tooling made, by name."""
        try:
            return dict(json.loads(self._links.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def save_links(self, links: Mapping[str, str]) -> None:
        """Remember which symbolic links are ours."""
        files.write_json(self._links, dict(links))

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let one run at a time change ``third_party/``; the system drops the lock when its holder dies."""
        self.third_party.mkdir(exist_ok=True)
        with (self.third_party / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                console.note("waiting for another run that changes third_party/")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def stage(self) -> Iterator[tuple[Path, tuple[Path, ...]]]:
        """Give a folder to build in, and the ones that killed runs left behind; both are gone afterwards.

        A killed run's git may still write into its own stage, so a stage is never used twice. The left ones are good
        for their finished packs.
        """
        self._put_back()
        left = tuple(sorted(self.stages.glob("run-*"))) if self.stages.is_dir() else ()
        stage = self.stages / f"run-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            stage.mkdir(parents=True)
            yield stage, left
        finally:
            for folder in (stage, *left):
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.stages.rmdir()

    def _put_back(self) -> None:
        """Return trees to their place that a run took away but was killed before it replaced them."""
        for old in self.stages.glob("run-*/old/*"):
            place = self.place(old.name)
            if not place.exists() and not place.is_symlink():
                old.rename(place)

    def swap(self, new: Path, name: str, stage: Path, *, stash: bool) -> Path | None:
        """Move a finished tree into its place; return where the old one is kept, if it is."""
        place, old = self.place(name), stage / "old" / name
        if stash:
            old = self._stash_for(name)
        old.parent.mkdir(parents=True, exist_ok=True)
        replaced = place.is_symlink() or place.exists()
        if replaced:
            place.rename(old)
        try:
            new.rename(place)
        except BaseException:
            if replaced:
                old.rename(place)
            raise
        return old if stash and replaced else None

    def _stash_for(self, name: str) -> Path:
        numbers = (number for number in range(1, 1_000_000) if not os.path.lexists(self.stashes / f"{name}-{number}"))
        return self.stashes / f"{name}-{next(numbers)}"


def workspace() -> Workspace:
    """Return the clone that this package lies in."""
    return Workspace(Path(__file__).resolve().parent.parent.parent)
