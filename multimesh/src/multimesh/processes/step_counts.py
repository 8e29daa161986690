"""Which process holds up the others."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from multimesh.processes import post

STALLED = 120.0  # seconds without progress after which a line says so, and again after twice as long
LEFT = 5.0  # seconds that others wait in a step for a process that has ended


class Stall(NamedTuple):
    """A process that holds up others: a line says how, and the job may end for it."""

    rank: int
    how: str
    ends: bool


@dataclasses.dataclass
class _Progress:
    ended: int = 0  # calls of plans
    begun: int = 0
    partners: frozenset[int] = frozenset()  # of the call; empty: all processes
    done: bool = False
    since: float = 0.0

    @property
    def at(self) -> tuple[int, int]:
        return self.ended, self.begun

    def __str__(self) -> str:
        return f"in step {self.begun}" if self.begun > self.ended else f"after step {self.ended}"


class StepsOfAll:
    """How far each process has come, and which of them holds up the others."""

    def __init__(self, count: int, stall: float, now: float) -> None:
        self._all = {rank: _Progress(since=now) for rank in range(count)}
        self._together = now  # when nobody was behind
        self._stall, self._first = stall, min(stall or STALLED, STALLED)
        self._reported: object = None
        self._after = self._first

    def note(self, rank: int, progress: bytes, now: float) -> None:
        """Note the progress of a process, as `text_of` has it."""
        ended, begun, partners, *_ = progress.decode().split()
        ranks = frozenset(map(int, partners.split(","))) if partners != "-" else frozenset()
        at = int(ended), int(begun)
        since = self._all[rank].since if self._all[rank].at == at else now
        self._all[rank] = _Progress(*at, ranks, post.is_done(progress), since)

    def find(self, now: float) -> Stall | None:
        """Return a process that has held up the others for long; None if there is none to report now.

        One that has ended before a call that needs it ends the job; any other one only if that was asked for. Those
        that wait are in the next call already, or have ended it. Where all are between the same two calls, they
        compile, save or read: that is only told.
        """
        running = {rank: each for rank, each in self._all.items() if not each.done}
        for rank in self._all.keys() - running.keys():
            gone = self._all[rank]
            for each in running.values():
                if each.begun > gone.begun and rank in (each.partners or {rank}) and now - each.since > LEFT:
                    return Stall(rank, f"ended {gone}, and others have begun step {each.begun}, which needs it", True)
        if not running or max(each.ended for each in running.values()) == 0:
            self._together = now  # nobody has ended a call: they compile
            return None
        rank, last = min(running.items(), key=lambda item: (sum(item[1].at), item[0]))
        between = last.begun == last.ended and len({each.at for each in running.values()}) == 1
        self._together = now if between else self._together
        still = now - (last.since if between else max(last.since, self._together))
        if self._reported != (rank, last.at):
            self._reported, self._after = (rank, last.at), self._first
        ends = 0 < self._stall <= still and not between
        if not ends and still < (max(self._after, STALLED) if between else self._after):
            return None
        self._after = self._stall if still < self._stall else 2 * still
        others = [each for other, each in running.items() if other != rank]
        places = sorted({str(each) for each in others})
        where = f"all others are {places[0]}" if len(places) == 1 else f"others are {' and '.join(places[:2])}"
        how = f"{'has been' if ends else 'is'} {last} for {still:.0f} s, {where if others else 'all others have ended'}"
        return Stall(rank, how, ends)


def text_of(at: list[int], partners: frozenset[int], done: bool) -> bytes:
    """Return the progress of a process as bytes: calls that have ended and begun, and who is in the call."""
    return f"{at[0]} {at[1]} {','.join(map(str, sorted(partners))) or '-'}{post.DONE * done}".encode()
