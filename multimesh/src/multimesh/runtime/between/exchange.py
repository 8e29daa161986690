"""Moves of a plan's arrays between processes, piece by piece, by one of the transports of `transports`.

Every process makes the same calls in the same order, each as far as it takes part. The key of a call is the same in all
of them: the plan, the number of the run, and the place of the call in the plan.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from multimesh.errors import UsageError
from multimesh.processes import agree
from multimesh.processes.arrays import here
from multimesh.runtime.actions import Piece, ProcessTransfer, process_transfers
from multimesh.runtime.between.first_transfers import try_transfers
from multimesh.runtime.between.transports import get_transport, on_device
from multimesh.runtime.resharding import make_resharder

turn = threading.RLock()
"""Held while a plan runs. Threads that ran plans at once would run them in another order in each process."""


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
        me = jax.process_index()
        sent = [piece for t in crossing if t.source == me for piece in t.pieces]
        stays = [piece for t in every if t.source == t.target == me for piece in t.pieces]
        copied = {
            piece for piece in sent if self.transport.late and lent[piece.array] and both[piece.array].cut is None
        }
        places = [SingleDeviceSharding(p.copy.target, memory_kind=targets[p.array].memory_kind) for p in stays]
        leaves = [here(source.device_set) for source in sources]
        arriving = {(p.array, p.copy): p for t in every if t.target == me for p in t.pieces}
        empty = {
            piece: jax.device_put(np.empty(both[piece.array].piece.shape, both[piece.array].piece.dtype), device)
            for piece, device in ((p, p.copy.target) for p in arriving.values() if not full[p.array])
        }
        local = [[c for c in end.resharding.copies if c.target.process_index == me] for end in both]
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
