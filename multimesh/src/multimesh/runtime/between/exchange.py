"""Moves of a plan's arrays between processes, piece by piece, by one of the transports of `transports`.

Every process makes the same calls in the same order, each as far as it takes part. The key of a call is the same in all
of them: the plan, the number of the run, and the place of the call in the plan.

First transfers, before a plan runs, have a time limit: NCCL and TCP may wait for ever. A call of XLA that waits cannot
be interrupted, so a thread of its own makes it. No later transfer is watched.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from multimesh.core import _compat
from multimesh.errors import LostProcessError, UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import is_here
from multimesh.processes.liveness import name_process
from multimesh.runtime.actions import Piece, ProcessTransfer, process_transfers
from multimesh.runtime.between.transports import Key, Transport, get_transport, on_device
from multimesh.runtime.resharding import Copy, Resharding, make_resharder

turn = threading.RLock()
"""Held while a plan runs. Threads that ran plans at once would run them in another order in each process."""

_PIECE = jax.ShapeDtypeStruct((1 << 14,), np.float32)  # more than a packet: some networks lose only large ones


class Exchange:
    """The movers of one plan's arrays between processes."""

    def __init__(self, plan: int, transport: str | None):
        self.plan, self._run = plan, 0
        self.transport = get_transport(transport)
        self._untried: list[ProcessTransfer] = []  # of the movers made since `start`
        self._starts = 0

    def start(self) -> None:
        """Wait for all processes, then make a first transfer on each pair of devices that new movers use.

        Raises ``LostProcessError`` if a process does not come here, or a first transfer does not arrive, in time.
        """
        state = f"moves {self._starts} of plan {self.plan} are" if self._starts else f"plan {self.plan} is"
        agree.barrier(f"{state} compiled")
        try_transfers(self.transport, self._untried, (self.plan, 0, self._starts))
        self._untried, self._starts = [], self._starts + 1

    def begin(self) -> None:
        """Start another run of the plan."""
        self._run += 1

    def mover(
        self,
        number: int,
        sources: Sequence[NamedSharding],
        targets: Sequence[NamedSharding],
        avals: Sequence[Any],
        lent: Sequence[bool],
        shown: Sequence[bool],
    ) -> Callable[..., list[Any]]:
        """Return a function that moves arrays of known ``sources`` to layouts ``targets``.

        An argument without a shard in this process may be None, and such a result is None. A later kernel may reuse the
        buffers of arrays that are ``lent``. Arrays marked ``shown`` are returned to the caller and keep their mesh in
        the type. Others drop it if they lie on one device, which saves 10 us.
        """
        layouts = zip(map(_mesh_layout, sources), targets, avals, strict=True)
        both = [make_resharder(source, target, tuple(a.shape), a.dtype) for source, target, a in layouts]
        every = process_transfers([r.resharding for r in both])
        full = [math.prod(end.piece.shape) > 0 for end in both]  # nothing is sent of an array without elements
        crossing = [
            replace(t, pieces=tuple(piece for piece in t.pieces if full[piece.array]))
            for t in every
            if t.source != t.target
        ]
        crossing = [t for t in crossing if t.pieces]
        self._untried += crossing
        pieces = zip([end.piece for end in both], shown, strict=True)
        types = [jax.ShapeDtypeStruct(piece.shape, piece.dtype) if at else piece for piece, at in pieces]
        send = self.transport.connect(crossing, types)
        rank = jax.process_index()
        sent = [piece for t in crossing if t.source == rank for piece in t.pieces]
        stays = [piece for t in every if t.source == t.target == rank for piece in t.pieces]
        copied = {
            piece for piece in sent if self.transport.late and lent[piece.array] and both[piece.array].cut is None
        }
        places = [SingleDeviceSharding(p.copy.target, memory_kind=targets[p.array].memory_kind) for p in stays]
        leaves = [is_here(source.device_set) for source in sources]
        arriving = {(p.array, p.copy): p for t in every if t.target == rank for p in t.pieces}
        empty = {
            piece: jax.device_put(np.empty(both[piece.array].piece.shape, both[piece.array].piece.dtype), device)
            for piece, device in ((p, p.copy.target) for p in arriving.values() if not full[p.array])
        }
        local = [[c for c in end.resharding.copies if c.target.process_index == rank] for end in both]
        expected = [[arriving[n, c] for c in copies] for n, copies in enumerate(local)]

        def move(*arrays: Any) -> list[Any]:
            shards = [end.split(x) if at else () for end, x, at in zip(both, arrays, leaves, strict=True)]

            def data(piece: Piece) -> Any:
                return shards[piece.array][piece.copy.cut][piece.copy.source]

            pieces = {piece: jnp.copy(data(piece)) if piece in copied else data(piece) for piece in sent}
            got = empty | send((self.plan, self._run, number), pieces)
            if stays:
                got.update(zip(stays, jax.device_put([data(piece) for piece in stays], places), strict=True))
            return [
                end.join_pieces([got[piece] for piece in pieces]) if pieces else None
                for end, pieces in zip(both, expected, strict=True)
            ]

        return move


def _mesh_layout(layout: Any) -> NamedSharding:
    """Return the layout of a caller's array as a ``NamedSharding``; it may be on one device without a mesh."""
    if isinstance(layout, NamedSharding):
        return layout
    if len(layout.device_set) == 1:
        return on_device(next(iter(layout.device_set)))
    raise UsageError(f"an argument has the layout {layout}, which can't be moved: give it a NamedSharding")


def try_transfers(transport: Transport, transfers: Iterable[ProcessTransfer], key: Key) -> None:
    """Send something small between each two devices that sent nothing yet. Both processes of each pair call it.

    Raises ``LostProcessError`` if something does not arrive within the timeout ``transfer``; names the two processes
    and the remedy.
    """
    new = dict.fromkeys((piece.copy.source, piece.copy.target) for transfer in transfers for piece in transfer.pieces)
    pairs = [pair for pair in new if pair not in transport.tried]
    rank, limit = jax.process_index(), agree.seconds_of("transfer")
    every = process_transfers([Resharding((), (), tuple(Copy(source, 0, target, 0) for source, target in pairs))])
    transfers = sorted((t for t in every if transport.everyone or rank in (t.source, t.target)), key=_turn)
    if not transfers:
        return
    at: list[ProcessTransfer] = []
    failed: list[Exception] = []
    thread = threading.Thread(
        target=_send_all, args=(transport, transfers, key, at, failed), name="multimesh-first-transfers", daemon=True
    )
    thread.start()
    thread.join(limit)
    if not thread.is_alive() and not failed:
        transport.tried.update(pairs)
        return
    how = f"failed: {_first_line(failed[0])}" if failed else f"did not arrive within {limit:.0f} s"
    wait = "" if failed else f"; a longer transfer_timeout ({agree.timeout_variable('transfer')}) waits longer"
    source, target = name_process(at[-1].source), name_process(at[-1].target)
    raise LostProcessError(
        f"the first transfer from {source} to {target} {how}; {transport.advice(at[-1].source)}{wait}"
    ) from (failed[0] if failed else None)


def _turn(transfer: ProcessTransfer) -> tuple[int, int, int]:
    """Return the order in which all processes connect: along a chain every second pair first, to shorten waits."""
    low, distance = min(transfer.source, transfer.target), abs(transfer.source - transfer.target)
    return low // distance % 2, transfer.source, transfer.target


def _send_all(
    transport: Transport, transfers: list[ProcessTransfer], key: Key, at: list[ProcessTransfer], failed: list[Exception]
) -> None:
    """Make the transfers; the last of ``at`` is the one under way."""
    rank, zeros, came = jax.process_index(), np.zeros(_PIECE.shape, _PIECE.dtype), []
    try:
        with _compat.explicit_transfers():
            for transfer in transfers:
                at.append(transfer)
                sent = transfer.pieces if transfer.source == rank else ()
                pieces = {piece: jax.device_put(zeros, piece.copy.source) for piece in sent}
                came.append(transport.connect([transfer], [_PIECE])(key, pieces))
            for transfer, arrays in zip(transfers, came, strict=True):
                at.append(transfer)
                jax.block_until_ready([*arrays.values()])
    except Exception as error:  # noqa: BLE001 - `try_transfers` raises it
        failed.append(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
