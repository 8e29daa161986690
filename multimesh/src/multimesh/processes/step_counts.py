"""Which process holds up the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from multimesh.processes.agree import DONE

STALLED = 120.0  # seconds without progress after which a line says so, and again after twice as long
LEFT = 5.0  # seconds that others wait in a step for a process that has ended


class _Progress(NamedTuple):
    ended: int = 0  # calls of plans
    begun: int = 0
    partners: frozenset[int] = frozenset()  # of the call; empty: all processes
    done: bool = False
    since: float = 0.0

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

    def find(self, progress: Mapping[int, bytes], now: float) -> tuple[int, str, bool] | None:
        """Note the progress of all, and return a process that has held up the others for long, if it is to be told now.

        A line says how, and the job may end for it: for one that has ended before a call that needs it, and for any
        other one if that was asked for. Those that wait are in the next call already, or have ended it. Where all are
        between the same two calls, they compile, save or read: that is only told.
        """
        for rank, text in progress.items():
            ended, begun, partners, *_ = text.decode().split()
            ranks = frozenset(map(int, partners.split(","))) if partners != "-" else frozenset()
            new = _Progress(int(ended), int(begun), ranks, text.endswith(DONE), now)
            old = self._all[rank]
            self._all[rank] = new._replace(since=old.since) if old[:2] == new[:2] else new
        running = {rank: state for rank, state in self._all.items() if not state.done}
        for rank in self._all.keys() - running.keys():
            gone = self._all[rank]
            for state in running.values():
                if state.begun > gone.begun and rank in (state.partners or {rank}) and now - state.since > LEFT:
                    return rank, f"ended {gone}, and others have begun step {state.begun}, which needs it", True
        if not running or max(state.ended for state in running.values()) == 0:
            self._together = now  # nobody has ended a call: they compile
            return None
        rank, last = min(running.items(), key=lambda item: (sum(item[1][:2]), item[0]))
        between = last.begun == last.ended and len({state[:2] for state in running.values()}) == 1
        self._together = now if between else self._together
        still = now - (last.since if between else max(last.since, self._together))
        if self._reported != (rank, last[:2]):
            self._reported, self._after = (rank, last[:2]), self._first
        ends = 0 < self._stall <= still and not between
        if not ends and still < (max(self._after, STALLED) if between else self._after):
            return None
        self._after = self._stall if still < self._stall else 2 * still
        places = sorted({str(state) for other, state in running.items() if other != rank})
        where = f"others are {' and '.join(places[:2])}" if places else "all others have ended"
        where = f"all {where}" if len(places) == 1 else where
        return rank, f"{'has been' if ends else 'is'} {last} for {still:.0f} s, {where}", ends


def text_of(at: list[int], partners: frozenset[int], done: bool) -> bytes:
    """Return the progress of a process: calls that have ended and begun, and who is in the call."""
    return f"{at[0]} {at[1]} {','.join(map(str, sorted(partners))) or '-'}".encode() + DONE * done
