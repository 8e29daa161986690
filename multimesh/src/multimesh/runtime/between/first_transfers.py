"""First transfers between processes, before a plan runs. They have a time limit: NCCL and TCP may wait for ever.

A call of XLA that waits cannot be interrupted, so a thread of its own makes it. No later transfer is watched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from multimesh.core import _compat
from multimesh.errors import LostProcessError
from multimesh.processes import timeouts
from multimesh.processes.initialize import name_process
from multimesh.runtime.actions import Lane, lanes
from multimesh.runtime.between.carriers import Carrier, Key
from multimesh.runtime.transport import Piece, Way

_PIECE = jax.ShapeDtypeStruct((1 << 14,), np.float32)  # more than a packet: some networks lose only large ones


def try_ways(carrier: Carrier, wanted: Iterable[Lane], key: Key) -> None:
    """Send something small on each new way between two devices. Both processes of each way are here.

    Raises ``LostProcessError`` if something does not arrive within the timeout ``transfer``; names the two processes
    and the remedy.
    """
    new = dict.fromkeys((parcel.piece.source, parcel.piece.target) for lane in wanted for parcel in lane.parcels)
    pairs = [pair for pair in new if pair not in carrier.tried]
    me, limit = jax.process_index(), timeouts.current().transfer
    every = lanes([Way((), (), tuple(Piece(source, 0, target, 0) for source, target in pairs))])
    ways = sorted((lane for lane in every if carrier.everyone or me in (lane.source, lane.target)), key=_turn)
    if not ways:
        return
    at: list[Lane] = []
    failed: list[Exception] = []
    thread = threading.Thread(
        target=_transfers, args=(carrier, ways, key, at, failed), name="multimesh-first-transfers", daemon=True
    )
    thread.start()
    thread.join(limit)
    if not thread.is_alive() and not failed:
        carrier.tried.update(pairs)
        return
    how = f"failed: {_first_line(failed[0])}" if failed else f"did not arrive within {limit:.0f} s"
    wait = "" if failed else f"; a longer transfer_timeout ({timeouts.variable('transfer')}) waits longer"
    source, target = name_process(at[-1].source), name_process(at[-1].target)
    raise LostProcessError(
        f"the first transfer from {source} to {target} {how}; {carrier.advice(at[-1].source)}{wait}"
    ) from (failed[0] if failed else None)


def _turn(lane: Lane) -> tuple[int, int, int]:
    """Return the order in which all processes connect.

    Along a chain every second pair comes first, to shorten waits.
    """
    low, apart = min(lane.source, lane.target), abs(lane.source - lane.target)
    return low // apart % 2, lane.source, lane.target


def _transfers(carrier: Carrier, ways: Sequence[Lane], key: Key, at: list[Lane], failed: list[Exception]) -> None:
    """Make the transfers; the last of ``at`` is the one under way."""
    me, zeros, came = jax.process_index(), np.zeros(_PIECE.shape, _PIECE.dtype), []
    try:
        with _compat.explicit_transfers():
            for lane in ways:
                at.append(lane)
                sent = lane.parcels if lane.source == me else ()
                pieces = {parcel: jax.device_put(zeros, parcel.piece.source) for parcel in sent}
                came.append(carrier.link([lane], [_PIECE])(key, pieces))
            for lane, arrays in zip(ways, came, strict=True):
                at.append(lane)
                jax.block_until_ready([*arrays.values()])
    except Exception as error:  # noqa: BLE001 - `try_ways` raises it
        failed.append(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
