"""Which processes of a job have come, where no launcher knows: in Kubernetes the pod of a lost node waits for ever.

Each process writes its name into a folder that all see, and shows that it lives. When all have come, or time is up, the
first of those that live chooses the grid, and says who takes part.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from multimesh.launch import ADDRESS
from multimesh_maxtext.command.fallback import Grid, choose
from multimesh_maxtext.errors import ProcessLostError

OWN_ADDRESS = "MULTIMESH_MAXTEXT_ADDRESS"
"""Environment variable that asks for a roll call: where other processes reach this one, as HOST:PORT."""

PATIENCE = 300.0  # seconds that processes may take to come, if the user does not say
_BEAT = 1.0  # seconds between signs of life
_LAST = 30.0  # seconds that a process which is done waits for the first one
_SILENT = 15.0  # seconds without a sign after which a process is gone


@dataclass(frozen=True)
class Place:
    """The part of this process: the grid, its rank there, and the address of the first."""

    grid: Grid
    rank: int
    address: str

    def variables(self) -> dict[str, str]:
        """Return what a launcher would have told the process."""
        numbers = {"RANK": self.rank, "SIZE": self.grid.processes}
        return {ADDRESS: self.address, **{f"MULTIMESH_MAXTEXT_{name}": str(n) for name, n in numbers.items()}}


class _Seen:
    """The processes in a folder that showed life lately, by the clock of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed: dict[str, tuple[str, float]] = {}

    def look(self) -> dict[int, dict[str, str]]:
        now = time.monotonic()
        for file in self._folder.glob("[0-9]*.json"):
            with suppress(OSError):
                text = file.read_text()
                if self._changed.get(file.name, ("", 0.0))[0] != text:
                    # What lies here at the first look may be of a process of another day.
                    self._changed[file.name] = text, now if file.name in self._changed else now - _SILENT + 2.5 * _BEAT
        living = {name: text for name, (text, when) in self._changed.items() if now - when < _SILENT}
        return {int(name.removesuffix(".json")): json.loads(text) for name, text in living.items()}


def answer(
    folder: Path, rank: int, count: int, address: str, grids: Sequence[Grid], patience: float = PATIENCE
) -> Place | None:
    """Say that this process is there, and wait for its place; none if the grid can do without it.

    Parameters
    ----------
    folder
        Of this attempt; all processes see it.
    rank, count
        Of this process, and how many there are if all come.
    address
        Where others reach this process.
    grids
        Those that may be chosen, the best first.
    patience
        Seconds to wait for all.

    Raises
    ------
    ProcessLostError
        No grid can do with those that came.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = {"name": secrets.token_hex(8), "address": address}
    seen, until, beat = _Seen(folder), time.monotonic() + patience, 0
    decided = folder / "grid.json"
    while True:
        beat += 1
        _write(folder / f"{rank}.json", {**own, "beat": str(beat)})
        if (found := _read(decided)) and own["name"] in found["names"]:
            return _place(found, own["name"])
        living = seen.look()
        complete = len(living) == count or time.monotonic() > until
        if complete and rank == min(living, default=rank):
            names = [(living[each]["name"], living[each]["address"]) for each in sorted(living)]
            grid = choose(grids, len(names))
            told = f"{len(names)} of {count} processes came within {patience:.0f} s"
            if grid is None:
                raise ProcessLostError(f"{told}, too few for any grid of --fallback; look for pods that wait")
            who = [name for name, _ in names]
            _write(decided, {"names": who, "grid": astuple(grid), "address": names[0][1]})
        time.sleep(_BEAT)


@contextmanager
def until_all_are_done(folder: Path, place: Place | None) -> Iterator[None]:
    """Leave after the first process has: Kubernetes may end all when one succeeds. A process without a place waits."""
    done = folder / "done"
    try:
        yield
    finally:
        if place and place.rank == 0:
            done.touch()
    until = math.inf if place is None else time.monotonic() + _LAST
    while not done.exists() and time.monotonic() < until:
        time.sleep(_BEAT)


def _place(found: dict[str, Any], name: str) -> Place | None:
    title, processes, words = found["grid"]
    rank = found["names"].index(name)
    return Place(Grid(title, processes, tuple(words)), rank, found["address"]) if rank < processes else None


def _write(file: Path, value: object) -> None:
    half = file.with_name(f".{file.name}.{os.getpid()}")
    half.write_text(json.dumps(value))
    half.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return None
