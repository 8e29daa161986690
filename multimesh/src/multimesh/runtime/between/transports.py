"""The transports between devices of different processes, which move pieces of arrays while kernels run.

Every process makes the same calls in the same order, each as far as it takes part. The key of a call is the same in all
of them.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from multimesh.core import _compat
from multimesh.errors import UsageError
from multimesh.marking import contexts
from multimesh.processes import agree
from multimesh.processes.arrays import absent, is_here
from multimesh.processes.initialize import TRANSPORT
from multimesh.runtime.actions import Piece, ProcessTransfer, by_devices

Key = tuple[int, int, int]  # plan, run, call
Pieces = dict[Piece, Any]
Send = Callable[[Key, Pieces], Pieces]


class Transport(Protocol):
    """A transport: it brings pieces from devices of one process to those of another, while kernels run."""

    everyone: bool  # a process that neither sends nor receives has to make the call too
    late: bool  # it reads a piece after the call returned; such a piece must not be donated
    tried: set[tuple[jax.Device, jax.Device]]  # source and target of each first transfer

    def connect(self, transfers: Sequence[ProcessTransfer], types: Sequence[jax.ShapeDtypeStruct]) -> Send:
        """Return a function that sends pieces under a key, and returns the pieces that arrive at this process.

        ``transfers`` are between two processes each, ``types`` the type of a piece of each array.
        """
        ...

    def advice(self, source: int) -> str:
        """Return the remedy for a user if nothing arrives from the process ``source``."""
        ...


class Pull:
    """A transport by ``jax.experimental.transfer``: receivers pull over TCP.

    Only two parties take part, in any order.
    """

    everyone, late = False, True

    def __init__(self) -> None:
        from jax.experimental import transfer

        self.tried: set[tuple[jax.Device, jax.Device]] = set()
        self._me, self._addresses = jax.process_index(), dict[int, str]()
        address = _compat.own_address()
        self._client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(self._client, f"{address}:0", [f"{address}:0"] * 2)
        self._offer = _compat.offerer(self._server)
        agree.put(f"multimesh/transfer/{self._me}", self._server.address().encode())

    @functools.cache  # noqa: B019 - lives as long as the process
    def _puller(self, process: int) -> Callable[[int, list[Any]], list[Any]]:
        """Return a function that pulls arrays of another process, by a number and their types."""
        self._addresses[process] = agree.wait_for({process: f"multimesh/transfer/{process}"}, "transfers")[0].decode()
        return _compat.puller(self._server.connect(self._addresses[process]), self._client)

    def advice(self, source: int) -> str:
        """See `Transport`."""
        at = self._addresses.get(source, "a port of its own")
        return (
            f"transport='pull' reaches process {source} at {at}: let no firewall close ports between the hosts; "
            "processes take their addresses in the network of the coordinator_address"
        )

    def connect(self, transfers: Sequence[ProcessTransfer], types: Sequence[jax.ShapeDtypeStruct]) -> Send:
        """See `Transport`."""
        sends = [t for t in transfers if t.source == self._me]
        pulls = [(t, [_struct(piece, types) for piece in t.pieces]) for t in transfers if t.target == self._me]

        def send(key: Key, pieces: Pieces) -> Pieces:
            for transfer in sends:
                self._offer(_number(key, transfer.target), [pieces[piece] for piece in transfer.pieces])
            got: Pieces = {}
            for transfer, structs in pulls:
                arrived = self._puller(transfer.source)(_number(key, self._me), structs)
                got.update(zip(transfer.pieces, arrived, strict=True))
            return got

        return send


def _struct(piece: Piece, types: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    like = types[piece.array]
    place = like.sharding or SingleDeviceSharding(piece.copy.target)
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place)


def _number(key: Key, target: int) -> int:
    """Return the number of a pull in 64 bits; no two pulls under way from one process have the same."""
    plan, run, call = key
    return (((plan % 2**12) << 20 | run % 2**20) << 20 | call % 2**20) << 12 | target % 2**12


class Put:
    """A transport by ``jax.device_put``; NCCL on GPUs. Two parties take part in one order; on CPUs all processes."""

    def __init__(self) -> None:
        self.tried: set[tuple[jax.Device, jax.Device]] = set()
        self.everyone = self.late = jax.devices()[0].platform == "cpu"
        if self.everyone and not _compat.device_put_address():
            raise UsageError(
                "transport='device_put' on CPUs: set jax_cross_host_transfer_socket_address to an address of this "
                "machine with a free port (not 0) before the first use of a device"
            )

    def advice(self, source: int) -> str:
        """See `Transport`."""
        other = "MULTIMESH_TRANSPORT=pull in all processes sends arrays over TCP"
        if self.everyone:
            return f"instead of transport='device_put', {other}"
        return (
            "transport='device_put' uses NCCL, which needs a GPU of its own for each process: NCCL_DEBUG=INFO shows "
            f"what it does, NCCL_SOCKET_IFNAME chooses its network; or {other}"
        )

    def connect(self, transfers: Sequence[ProcessTransfer], types: Sequence[jax.ShapeDtypeStruct]) -> Send:
        """See `Transport`."""
        pairs = [pair for t in transfers for pair in by_devices(t) if self.everyone or is_here(pair[:2])]
        nothing = {
            piece: absent(types[piece.array], on_device(source))
            for source, _, pieces in pairs
            if not is_here([source])
            for piece in pieces
        }

        def send(key: Key, pieces: Pieces) -> Pieces:
            got: Pieces = {}
            sent = pieces | nothing
            for source, target, group in pairs:
                arrays = [_with(sent[piece], on_device(source)) for piece in group]
                moved = jax.device_put(arrays, [on_device(target)] * len(arrays))
                if is_here([target]):
                    got.update((piece, x.addressable_data(0)) for piece, x in zip(group, moved, strict=True))
            return got

        return send


CLASSES: Mapping[str, Callable[[], Transport]] = dict(zip(contexts.TRANSPORTS, (Pull, Put), strict=True))


def get_transport(name: str | None) -> Transport:
    """Return the transport of a name, that of the environment, or the platform's. Each is created once."""
    name = name or os.environ.get(TRANSPORT)
    if name and name not in CLASSES:
        raise UsageError(f"{TRANSPORT}: give one of {', '.join(CLASSES)} or unset it, not {name!r}")
    with _creation:
        return _create(name or ("pull" if jax.devices()[0].platform == "cpu" else "device_put"))


_creation = threading.Lock()
_create = functools.cache(lambda name: CLASSES[name]())


@functools.cache
def on_device(device: jax.Device) -> NamedSharding:
    """Return the layout of an array that lies on one device alone."""
    return NamedSharding(Mesh(np.array([device]), ("device",)), PartitionSpec())


def _with(x: Any, layout: NamedSharding) -> Any:
    """Return the same array on one device with another layout, copied if it lies in memory of the host."""
    if x.sharding == layout:
        return x
    if x.sharding.memory_kind != layout.memory_kind:
        return jax.device_put(x, layout)
    return jax.make_array_from_single_device_arrays(x.shape, layout, [x])
