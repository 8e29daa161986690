"""Moves arrays of a plan between processes, piece by piece, by one of two transports.

Every process makes the same calls in the same order, each as far as it takes part. The key of a call is the same in all
of them: the plan, the number of the run, and the place of the call in the plan.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.marking import contexts
from multimesh.processes import post
from multimesh.processes.arrays import absent, here
from multimesh.processes.initialize import TRANSPORT
from multimesh.runtime.actions import Lane, Parcel, by_devices, lanes
from multimesh.runtime.transport import ends

turn = threading.RLock()
"""Held while a plan runs. Threads that ran plans at once would run them in another order in each process."""


class Exchange:
    """Makes functions that move arrays of one plan between processes."""

    def __init__(self, plan: int, transport: str | None):
        self.plan, self._run = plan, 0
        self.carrier = carrier(transport)

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
        """A function that moves arrays of known ``sources`` to layouts ``targets``.

        An argument without a shard in this process may be None, and such a result is None. A later kernel may reuse
        the buffers of arrays that are ``lent``. What is ``shown`` to the caller has its mesh in its type; kernels don't
        look at that, and an array that lies on one device arrives 10 us sooner without it.
        """
        both = [ends(_named(s), t, tuple(a.shape), a.dtype) for s, t, a in zip(sources, targets, avals, strict=True)]
        whole = lanes([end.way for end in both])
        full = [math.prod(end.piece.shape) > 0 for end in both]  # nothing is sent of an array without elements
        crossing = [
            replace(lane, parcels=tuple(parcel for parcel in lane.parcels if full[parcel.array]))
            for lane in whole
            if lane.source != lane.target
        ]
        crossing = [lane for lane in crossing if lane.parcels]
        types = [_unplaced(end.piece) if at else end.piece for end, at in zip(both, shown, strict=True)]
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


def _named(layout: Any) -> NamedSharding:
    """The layout of an array of the caller, which may be on one device without a mesh."""
    if isinstance(layout, NamedSharding):
        return layout
    if len(layout.device_set) == 1:
        return on_device(next(iter(layout.device_set)))
    raise UsageError(f"an argument has the layout {layout}, which can't be moved: give it a NamedSharding")


Key = tuple[int, int, int]  # plan, run, call
Pieces = dict[Parcel, Any]
Carry = Callable[[Key, Pieces], Pieces]


class Carrier(Protocol):
    """A transport: it brings pieces from devices of one process to those of another, while kernels run."""

    everyone: bool  # a process that neither sends nor receives has to make the call too
    late: bool  # it reads a piece after the call returned; such a piece must not be donated

    def link(self, way: Sequence[Lane], types: Sequence[jax.ShapeDtypeStruct]) -> Carry:
        """A function of a key and the pieces that this process sends; it returns the pieces that arrive here.

        ``way`` has lanes between two processes each, ``types`` the type of a piece of each array.
        """
        ...


class Pull:
    """Receivers pull over TCP with ``jax.experimental.transfer``. Only the two parties take part, in any order."""

    everyone, late = False, True

    def __init__(self) -> None:
        from jax.experimental import transfer

        self._me = jax.process_index()
        address = _compat.own_address()
        self._client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(self._client, f"{address}:0", [f"{address}:0"] * 2)
        self._offer = _compat.offerer(self._server)
        post.put(f"multimesh/transfer/{self._me}", self._server.address().encode())

    @functools.cache  # noqa: B019 - lives as long as the process
    def _puller(self, process: int) -> Callable[[int, list[Any]], list[Any]]:
        """Pulls arrays of another process, by a number and their types."""
        address = post.get(f"multimesh/transfer/{process}", "transfers", process).decode()
        return _compat.puller(self._server.connect(address), self._client)

    def link(self, way: Sequence[Lane], types: Sequence[jax.ShapeDtypeStruct]) -> Carry:
        """See `Carrier`."""
        sends = [lane for lane in way if lane.source == self._me]
        pulls = [(lane, [_struct(parcel, types) for parcel in lane.parcels]) for lane in way if lane.target == self._me]

        def carry(key: Key, pieces: Pieces) -> Pieces:
            for lane in sends:
                self._offer(_number(key, lane.target), [pieces[parcel] for parcel in lane.parcels])
            got: Pieces = {}
            for lane, wanted in pulls:
                arrived = self._puller(lane.source)(_number(key, self._me), wanted)
                got.update(zip(lane.parcels, arrived, strict=True))
            return got

        return carry


def _struct(parcel: Parcel, types: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    like = types[parcel.array]
    place = like.sharding or SingleDeviceSharding(parcel.piece.target)
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)


def _unplaced(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype)


def _number(key: Key, target: int) -> int:
    """64 bits; no two pulls under way from one process have the same."""
    plan, run, call = key
    return (((plan % 2**12) << 20 | run % 2**20) << 20 | call % 2**20) << 12 | target % 2**12


class Put:
    """``jax.device_put`` between processes; NCCL on GPUs. Two parties take part in one order; on CPUs all processes."""

    def __init__(self) -> None:
        self.everyone = self.late = jax.devices()[0].platform == "cpu"
        if self.everyone and not _compat.device_put_address():
            raise UsageError(
                "transport='device_put' on CPUs: set jax_cross_host_transfer_socket_address to an address of this "
                "machine with a free port (not 0) before the first use of a device"
            )

    def link(self, way: Sequence[Lane], types: Sequence[jax.ShapeDtypeStruct]) -> Carry:
        """See `Carrier`."""
        pairs = [pair for lane in way for pair in by_devices(lane) if self.everyone or here(pair[:2])]
        nothing = {
            parcel: absent(types[parcel.array], on_device(source))
            for source, _, parcels in pairs
            if not here([source])
            for parcel in parcels
        }

        def carry(key: Key, pieces: Pieces) -> Pieces:
            got: Pieces = {}
            given = pieces | nothing
            for source, target, parcels in pairs:
                arrays = [_with(given[parcel], on_device(source)) for parcel in parcels]
                moved = jax.device_put(arrays, [on_device(target)] * len(arrays))
                if here([target]):
                    got.update((parcel, x.addressable_data(0)) for parcel, x in zip(parcels, moved, strict=True))
            return got

        return carry


CARRIERS: Mapping[str, Callable[[], Carrier]] = dict(zip(contexts.TRANSPORTS, (Pull, Put), strict=True))


def carrier(name: str | None) -> Carrier:
    """The transport of a name, that of the environment, or the platform's; each is made once."""
    name = name or os.environ.get(TRANSPORT)
    if name and name not in CARRIERS:
        raise UsageError(f"{TRANSPORT}: give one of {', '.join(CARRIERS)} or unset it, not {name!r}")
    with _making:
        return _made(name or ("pull" if jax.devices()[0].platform == "cpu" else "device_put"))


_making = threading.Lock()
_made = functools.cache(lambda name: CARRIERS[name]())


@functools.cache
def on_device(device: jax.Device) -> NamedSharding:
    """The layout of an array that lies on one device alone."""
    return NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())


def _with(x: Any, layout: NamedSharding) -> Any:
    """The same array on one device with another name of its layout."""
    if x.sharding == layout:
        return x
    return jax.make_array_from_single_device_arrays(x.shape, layout, [x])
