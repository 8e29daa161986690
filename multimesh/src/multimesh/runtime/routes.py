"""Which pieces of arrays go from one process to another. All processes work it out alone, with the same result."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from multimesh.runtime.transport import Piece, Way

Owner = Callable[[jax.Device], int]  # the process of a device


def owner(device: jax.Device) -> int:
    """The process of a device."""
    return int(device.process_index)


@dataclass(frozen=True, eq=False)
class Parcel:
    """A piece of one of the arrays of a call; compared by identity, so that a run can look it up."""

    array: int
    piece: Piece


@dataclass(frozen=True)
class Route:
    """The parcels that go from one process to another, or stay within one, in one call."""

    source: int
    target: int
    parcels: tuple[Parcel, ...]


def routes(ways: Sequence[Way], owner: Owner = owner) -> tuple[Route, ...]:
    """The routes of a call, in the same order in all processes."""
    found: dict[tuple[int, int], list[Parcel]] = collections.defaultdict(list)
    for array, piece in ((n, piece) for n, way in enumerate(ways) for piece in way.pieces):
        found[owner(piece.source), owner(piece.target)].append(Parcel(array, piece))
    return tuple(Route(*ends, tuple(parcels)) for ends, parcels in sorted(found.items()))


def by_devices(route: Route) -> list[tuple[jax.Device, jax.Device, tuple[Parcel, ...]]]:
    """The parcels of a route for each pair of devices."""

    def pair(parcel: Parcel) -> tuple[Any, Any]:
        return parcel.piece.source.id, parcel.piece.target.id

    groups = (tuple(group) for _, group in itertools.groupby(sorted(route.parcels, key=pair), pair))
    return [(group[0].piece.source, group[0].piece.target, group) for group in groups]
