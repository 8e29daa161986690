"""Moves of a plan's arrays between processes, piece by piece, by one of the transports of `carriers`.

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
from multimesh.runtime.actions import Lane, Parcel, lanes
from multimesh.runtime.between.carriers import carrier, on_device
from multimesh.runtime.between.first_transfers import try_ways
from multimesh.runtime.transport import ends

turn = threading.RLock()
"""Held while a plan runs. Threads that ran plans at once would run them in another order in each process."""


class Exchange:
    """The movers of one plan's arrays between processes."""

    def __init__(self, plan: int, transport: str | None):
        self.plan, self._run = plan, 0
        self.carrier = carrier(transport)
        self._untried: list[Lane] = []  # of the movers made since `start`
        self._starts = 0

    def start(self) -> None:
        """Wait for all processes, then let a first transfer go each way that new movers use.

        All processes call it when they have made the same movers.

        Raises ``LostProcessError`` if a process does not come here, or a first transfer does not arrive, in time.
        """
        what = f"moves {self._starts} of plan {self.plan} are" if self._starts else f"plan {self.plan} is"
        agree.barrier(f"{what} compiled")
        try_ways(self.carrier, self._untried, (self.plan, 0, self._starts))
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
        both = [
            ends(_mesh_layout(s), t, tuple(a.shape), a.dtype) for s, t, a in zip(sources, targets, avals, strict=True)
        ]
        whole = lanes([end.way for end in both])
        full = [math.prod(end.piece.shape) > 0 for end in both]  # nothing is sent of an array without elements
        crossing = [
            replace(lane, parcels=tuple(parcel for parcel in lane.parcels if full[parcel.array]))
            for lane in whole
            if lane.source != lane.target
        ]
        crossing = [lane for lane in crossing if lane.parcels]
        self._untried += crossing
        types = [_drop_layout(end.piece) if at else end.piece for end, at in zip(both, shown, strict=True)]
        carry = self.carrier.link(crossing, types)
        me = jax.process_index()
        sent = [parcel for lane in crossing if lane.source == me for parcel in lane.parcels]
        stays = [parcel for lane in whole if lane.source == lane.target == me for parcel in lane.parcels]
        copied = {
            parcel for parcel in sent if self.carrier.late and lent[parcel.array] and not both[parcel.array].fresh
        }
        places = [SingleDeviceSharding(p.piece.target, memory_kind=targets[p.array].memory_kind) for p in stays]
        leaves = [here(source.device_set) for source in sources]
        arriving = {(p.array, p.piece): p for lane in whole if lane.target == me for p in lane.parcels}
        empty = {
            parcel: jax.device_put(np.empty(both[parcel.array].piece.shape, both[parcel.array].piece.dtype), device)
            for parcel, device in ((p, p.piece.target) for p in arriving.values() if not full[p.array])
        }
        mine = [[arriving[n, p] for p in e.way.pieces if p.target.process_index == me] for n, e in enumerate(both)]

        def move(*arrays: Any) -> list[Any]:
            held = [end.leave(x) if at else () for end, x, at in zip(both, arrays, leaves, strict=True)]

            def piece(parcel: Parcel) -> Any:
                return held[parcel.array][parcel.piece.cut][parcel.piece.source]

            pieces = {parcel: jnp.copy(piece(parcel)) if parcel in copied else piece(parcel) for parcel in sent}
            got = empty | carry((self.plan, self._run, number), pieces)
            if stays:
                got.update(zip(stays, jax.device_put([piece(parcel) for parcel in stays], places), strict=True))
            return [
                end.arrive([got[parcel] for parcel in wanted]) if wanted else None
                for end, wanted in zip(both, mine, strict=True)
            ]

        return move


def _mesh_layout(layout: Any) -> NamedSharding:
    """Return the layout of a caller's array as a ``NamedSharding``; it may be on one device without a mesh."""
    if isinstance(layout, NamedSharding):
        return layout
    if len(layout.device_set) == 1:
        return on_device(next(iter(layout.device_set)))
    raise UsageError(f"an argument has the layout {layout}, which can't be moved: give it a NamedSharding")


def _drop_layout(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype)
