"""Arrays on their way between processes: who sends which pieces to whom, and the transports that carry them.

Every process makes the same calls in the same order, each as far as it takes part. What a call is called, its key, is
made of the plan, the number of its run, and the place of the call in the plan: the same in all processes.
"""

from __future__ import annotations

import functools
import math
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
from multimesh.processes import agree
from multimesh.processes.arrays import absent, here
from multimesh.runtime.project import Parcel, Route, by_devices, routes
from multimesh.runtime.transport import Ends, ends

Key = tuple[int, int, int]  # plan, run, call
Pieces = dict[Parcel, Any]
Carry = Callable[[Key, Pieces], Pieces]

turn = threading.RLock()
"""Held while a plan runs: threads that ran plans at once would do so in another order in each process."""


class Carrier(Protocol):
    """A transport: brings pieces from devices of one process to those of another.

    Attributes
    ----------
    everyone
        Whether a process that neither sends nor receives has to make the call too.
    late
        Whether a piece is read after the call returned, so that it must not be donated.
    """

    everyone: bool
    late: bool

    def link(self, way: Sequence[Route], types: Sequence[jax.ShapeDtypeStruct]) -> Carry:
        """A function of a key and the pieces that this process sends; it returns those that it gets.

        ``way`` has routes between two processes each, ``types`` the type of a piece of each array.
        """
        ...


class Pull:
    """Shards pulled over TCP through ``jax.experimental.transfer``: the two parties, in any order, beside programs."""

    everyone, late = False, True

    def __init__(self) -> None:
        from jax.experimental import transfer

        self._me = jax.process_index()
        address = _compat.own_address()
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{address}:0", [f"{address}:0"] * 2)
        _compat.key_value_store().key_value_set(f"multimesh/transfer/{self._me}", self._server.address())

    @functools.cache  # noqa: B019 - lives as long as the process
    def _peer(self, process: int) -> Any:
        store = _compat.key_value_store()
        address = store.blocking_key_value_get(f"multimesh/transfer/{process}", int(1000 * agree.WAIT))
        return self._server.connect(address)

    def link(self, way: Sequence[Route], types: Sequence[jax.ShapeDtypeStruct]) -> Carry:
        """See `Carrier`."""
        sends = [route for route in way if route.source == self._me]
        pulls = [(route, [_struct(parcel, types) for parcel in route.parcels]) for route in way if self._gets(route)]

        def carry(key: Key, pieces: Pieces) -> Pieces:
            for route in sends:
                self._server.await_pull(_number(key, route.target), [pieces[parcel] for parcel in route.parcels])
            got: Pieces = {}
            for route, wanted in pulls:
                arrived = self._peer(route.source).pull(_number(key, self._me), wanted)
                got.update(zip(route.parcels, arrived, strict=True))
            return got

        return carry

    def _gets(self, route: Route) -> bool:
        return route.target == self._me


def _struct(parcel: Parcel, types: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    like, place = types[parcel.array], SingleDeviceSharding(parcel.piece.target)
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)


def _number(key: Key, target: int) -> int:
    """64 bits that no other pull from the same process has which is under way."""
    plan, run, call = key
    return (((plan % 2**12) << 20 | run % 2**20) << 20 | call % 2**20) << 12 | target % 2**12


class Put:
    """``jax.device_put`` between processes: on GPUs NCCL. The two parties, in one order; on CPUs all processes."""

    def __init__(self) -> None:
        self.everyone = self.late = jax.devices()[0].platform == "cpu"
        if self.everyone and not _compat.device_put_address():
            raise UsageError(
                "transport='device_put' on CPUs: set jax_cross_host_transfer_socket_address to an address of this "
                "machine with a free port (not 0) before the first use of a device"
            )

    def link(self, way: Sequence[Route], types: Sequence[jax.ShapeDtypeStruct]) -> Carry:
        """See `Carrier`."""
        pairs = [pair for route in way for pair in by_devices(route) if self.everyone or here(pair[:2])]
        nothing = {
            parcel: absent(types[parcel.array], _on(source))
            for source, _, parcels in pairs
            if not here([source])
            for parcel in parcels
        }

        def carry(key: Key, pieces: Pieces) -> Pieces:
            got: Pieces = {}
            given = pieces | nothing
            for source, target, parcels in pairs:
                arrays = [_with(given[parcel], _on(source)) for parcel in parcels]
                moved = jax.device_put(arrays, [_on(target)] * len(arrays))
                if here([target]):
                    got.update((parcel, x.addressable_data(0)) for parcel, x in zip(parcels, moved, strict=True))
            return got

        return carry


CARRIERS: Mapping[str, Callable[[], Carrier]] = dict(zip(contexts.TRANSPORTS, (Pull, Put), strict=True))


def carrier(name: str | None) -> Carrier:
    """The transport of a name, made once; of None that of the platform."""
    name = name or ("pull" if jax.devices()[0].platform == "cpu" else "device_put")
    with turn:
        if name not in _carriers:
            _carriers[name] = CARRIERS[name]()
        return _carriers[name]


_carriers: dict[str, Carrier] = {}


@functools.cache
def _on(device: jax.Device) -> NamedSharding:
    return NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())


def _with(x: Any, layout: NamedSharding) -> Any:
    """An array on one device under another name of its layout."""
    if x.sharding == layout:
        return x
    return jax.make_array_from_single_device_arrays(x.shape, layout, [x])


class Exchange:
    """Makes the functions that move arrays of one plan between processes."""

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
    ) -> Callable[..., list[Any]]:
        """A function that gives its arguments, arrays of known ``sources``, layouts ``targets``.

        Arguments of which this process has no shard may be None, and so are such results. Buffers of arrays that are
        ``lent`` may be donated to a later program.
        """
        both = [_ends(_named(s), t, _type(a)) for s, t, a in zip(sources, targets, avals, strict=True)]
        whole = routes([end.way for end in both])
        full = [math.prod(end.piece.shape) > 0 for end in both]  # nothing is sent of an array without elements
        crossing = [
            replace(route, parcels=tuple(parcel for parcel in route.parcels if full[parcel.array]))
            for route in whole
            if route.source != route.target
        ]
        crossing = [route for route in crossing if route.parcels]
        carry = self.carrier.link(crossing, [end.piece for end in both])
        me = jax.process_index()
        sent = [parcel for route in crossing if route.source == me for parcel in route.parcels]
        stays = [parcel for route in whole if route.source == route.target == me for parcel in route.parcels]
        copied = {
            parcel for parcel in sent if self.carrier.late and lent[parcel.array] and not both[parcel.array].fresh
        }
        places = [SingleDeviceSharding(p.piece.target, memory_kind=targets[p.array].memory_kind) for p in stays]
        empty = {
            parcel: jax.device_put(np.empty(both[parcel.array].piece.shape, both[parcel.array].piece.dtype), place)
            for route in whole
            if route.source != route.target == me
            for parcel in route.parcels
            if not full[parcel.array]
            for place in [parcel.piece.target]
        }
        leaves = [here(source.device_set) for source in sources]
        arriving = {(p.array, p.piece): p for route in whole if route.target == me for p in route.parcels}
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


def _type(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(aval.shape), aval.dtype)


def _named(layout: Any) -> NamedSharding:
    """The layout of an array of the caller, which may be on one device without a mesh."""
    if isinstance(layout, NamedSharding):
        return layout
    if len(layout.device_set) == 1:
        return _on(next(iter(layout.device_set)))
    raise UsageError(f"an argument has the layout {layout}, which can't be moved: give it a NamedSharding")


@functools.lru_cache(maxsize=4096)
def _ends(source: NamedSharding, target: NamedSharding, aval: jax.ShapeDtypeStruct) -> Ends:
    return ends(source, target, aval)
