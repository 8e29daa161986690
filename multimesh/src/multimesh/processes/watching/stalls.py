"""Which process holds up the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STALLED = 120.0  # seconds without progress after which a line says so, and again after twice as long


class StepsOfAll:
    """How far each process has come, and which of them holds up the others."""

    def __init__(self, count: int, stall: float, now: float) -> None:
        self._at = dict.fromkeys(range(count), (0, 0))  # calls that ended, and that began
        self._since = dict.fromkeys(self._at, now)  # who has said nothing yet has been here since then
        self._together = now  # when nobody was behind
        self._stall, self._first = stall, min(stall or STALLED, STALLED)
        self._told_of: Any = None
        self._after = self._first

    def note(self, rank: int, at: Sequence[int], now: float) -> None:
        """Note what a process says of its progress."""
        if rank in self._at and self._at[rank] != tuple(at) and len(at) == 2:
            self._at[rank], self._since[rank] = (int(at[0]), int(at[1])), now

    def done(self, rank: int) -> None:
        """Forget a process that has ended well: it holds up nobody."""
        self._at.pop(rank, None)

    def held_up_by(self, now: float) -> int | None:
        """Return a process that has been behind the others for long; None if there is none to report.

        Those that wait for it are in the next call already, or have ended it. Where all are between the same two calls,
        they compile, save or read: that is told of, but later.
        """
        if not self._at or max(self._at.values())[0] == 0:
            self._together = now
            return None  # nobody has ended a call: they compile
        if together := self._between_calls():
            self._together = now
        rank = min(self._at, key=lambda rank: (sum(self._at[rank]), rank))
        if self._told_of != (rank, self._at[rank]):
            self._told_of, self._after = (rank, self._at[rank]), self._first
        still = self._still(rank, now)
        if self._ends(still):
            return rank
        if still < (max(self._after, STALLED) if together else self._after):
            return None
        self._after = self._stall if still < self._stall else 2 * still
        return rank

    def said(self, rank: int, now: float) -> tuple[str, bool]:
        """Say where a process stands that holds up others, and whether the job ends for it."""
        at, still = self._at.get(rank, (0, 0)), self._still(rank, now)
        others = sorted({each for other, each in self._at.items() if other != rank})
        if others == [at]:
            where = "as all others are"
        else:
            places = dict.fromkeys(_place(each) for each in others[:1] + others[-1:])
            where = f"{'all' if len(places) == 1 else 'the'} others are {' to '.join(places)}"
        ends = self._ends(still)
        return f"{'has been' if ends else 'is'} {_place(at)} for {still:.0f} s, {where}", ends

    def _still(self, rank: int, now: float) -> float:
        """Seconds without progress; of a process that is behind the others, seconds since it fell behind."""
        since = self._since.get(rank, now)
        return now - (since if self._between_calls() else max(since, self._together))

    def _ends(self, still: float) -> bool:
        return 0 < self._stall <= still and not self._between_calls()

    def _between_calls(self) -> bool:
        """Whether all have ended the same calls, and begun no other."""
        ended, begun = first = next(iter(self._at.values()), (0, 1))
        return ended == begun and all(at == first for at in self._at.values())


def _place(at: tuple[int, int]) -> str:
    ended, begun = at
    return f"in step {begun}" if begun > ended else f"after step {ended}"
