"""Transfers between neighboring stages by each transport: alone, and while all stages compute and reduce."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.commands.check.compute import make_sum
from multimesh.commands.check.steps import Bench
from multimesh.commands.check.verdicts import ABSENT, OK, Row
from multimesh.core import _compat
from multimesh.errors import MultiMeshError
from multimesh.processes import agree
from multimesh.processes.initialize import name_process
from multimesh.runtime.actions import owner, process_transfers
from multimesh.runtime.between.transports import get_transport
from multimesh.runtime.resharding import Copy, Resharding

Pair = tuple[jax.Device, jax.Device]
SMALL = 1024  # floats
_PLAN = 4000  # number of a plan that no plan has


class Moves:
    """Transfers of one array on each of some ways from device to device, all at once.

    Parameters
    ----------
    transport
        Name of the transport of those between processes.
    pairs
        Source and target of each way, the same in all processes.
    count
        Floats of each array.
    number
        Of these transfers, the same in all processes, and no other's.
    """

    def __init__(self, transport: str, pairs: Sequence[Pair], count: int, number: int) -> None:
        me, self._number, self._calls = jax.process_index(), number, 0
        every = process_transfers([Resharding((), (), tuple(Copy(source, 0, target, 0) for source, target in pairs))])
        between = [t for t in every if t.source != t.target]
        by = get_transport(transport) if between else None  # one process alone has no use for it
        self._transfers = [t for t in between if by and (by.everyone or me in (t.source, t.target))]
        types = [jax.ShapeDtypeStruct((count,), np.float32)]
        self._send = by.connect(self._transfers, types) if by and self._transfers else None
        self._within = [(source, target) for source, target in pairs if owner(source) == owner(target) == me]
        self._sent = [piece for t in self._transfers if t.source == me for piece in t.pieces]
        sources = {piece.copy.source for piece in self._sent} | {source for source, _ in self._within}
        self._values = {d: jax.device_put(np.full(count, d.id, np.float32), d) for d in sources}
        self._from = {target: source for source, target in pairs}
        jax.block_until_ready([*self._values.values()])

    @property
    def takes_part(self) -> bool:
        """Whether this process has a call to make."""
        return bool(self._transfers or self._within)

    def __call__(self) -> list[jax.Array]:
        """Start them; returns what arrives here."""
        self._calls += 1
        with _compat.explicit_transfers():
            pieces = {piece: self._values[piece.copy.source] for piece in self._sent}
            got = self._send((_PLAN, self._number, self._calls), pieces) if self._send else {}
            return [*got.values()] + [jax.device_put(self._values[source], target) for source, target in self._within]

    def check(self, arrived: Sequence[jax.Array]) -> None:
        """Compare what arrived with what was sent.

        Raises ``MultiMeshError`` if they differ.
        """
        for array in arrived:
            (device,) = array.devices()
            if not (np.asarray(array) == self._from[device].id).all():
                raise MultiMeshError(f"other values arrived on {device} than {self._from[device]} sent")


def _rounds(bench: Bench) -> Iterator[list[int]]:
    """Return groups of stages whose transfers to the next stage share no stage. The last one sends to the first."""
    last = bench.stages - 1
    yield [*range(0, last, 2)]
    yield [*range(1, last, 2)]
    if last > 1:
        yield [last]


def _both_ways(bench: Bench, stages: Sequence[int]) -> tuple[list[Pair], list[Pair]]:
    """Return the ways from the devices of stages to those of the next ones, and back."""
    every = [[*mesh.devices.flat] for mesh in bench.meshes]
    there = [pair for s in stages for pair in zip(every[s], every[(s + 1) % bench.stages], strict=True)]
    return there, [(target, source) for source, target in there]


def measure(transport: str, bench: Bench) -> Any:
    """Measure each pair of neighboring stages by a transport, both ways; then all pairs, while all stages compute.

    Returns seconds and the lesser rate of each pair whose first stage is here, and what a turn beside kernels took; or
    why there is nothing to try.
    """
    if reason := _impossible(transport, bench):
        return reason
    pairs: dict[str, tuple[float, float]] = {}
    large = _large(bench)
    for number, stages in enumerate(_rounds(bench)):
        agree.barrier(f"check: {transport} {number}")
        ways = _both_ways(bench, stages)
        if not ways[0]:
            continue
        bench.doing = f"transfers by {transport} between {_ends(ways[0])}"
        small = [Moves(transport, way, SMALL, 10 * number + at) for at, way in enumerate(ways)]
        if not small[0].takes_part:
            continue
        seconds, rates = _latency(small[0], small[1], _turns(bench)), []
        for at, way in enumerate(ways):
            bench.doing = f"transfers of {4 * large >> 20} MiB by {transport} between {_ends(way)}"
            moves = Moves(transport, way, large, 10 * number + 2 + at)
            rates.append(_rate(moves, small[1 - at], 4 * large, 3 if bench.quick else 20))
        for stage in stages:
            if owner(bench.meshes[stage].devices.flat[0]) == bench.rank:
                pairs[str(stage)] = seconds, min(rates)
    return {"pairs": pairs, "turn": _run_beside_kernels(transport, bench)}


def _run_beside_kernels(transport: str, bench: Bench) -> float:
    """Send both ways between all stages, while each computes and sums over its devices; return the seconds a turn."""
    ways = _both_ways(bench, range(bench.stages if bench.stages > 2 else 1))
    small = [Moves(transport, way, SMALL, 100 + at) for at, way in enumerate(ways)]
    large = Moves(transport, ways[0], _large(bench), 102)
    work = [(_busy(total), x) for stage in bench.own_stages() for total, x in [make_sum(bench, stage, 2**16)]]
    turns = _turns(bench)
    begun = time.perf_counter()
    for turn in range(turns):
        bench.doing = f"transfers by {transport} beside kernels and sums, turn {turn + 1} of {turns}"
        results = [run(x) for run, x in work]
        arrived = [(start, start()) for start in (*small, *([large] if turn % 10 == 0 else []))]
        if turn % 4 == 3 or turn == turns - 1:
            for start, arrays in arrived:
                start.check(arrays)
            jax.block_until_ready(results)
    return (time.perf_counter() - begun) / turns


def _turns(bench: Bench) -> int:
    return 20 if bench.quick else 1000


def _impossible(transport: str, bench: Bench) -> str:
    if bench.stages < 2:
        return "there is one stage"
    if len({owner(device) for mesh in bench.meshes for device in mesh.devices.flat}) == 1:
        return "one process has all stages" if transport == "pull" else ""
    if transport == "device_put" and not bench.accelerated and not _compat.device_put_address():
        return "on CPUs it needs jax_cross_host_transfer_socket_address"
    return ""


def _large(bench: Bench) -> int:
    return (2**24 if bench.accelerated else 2**20) // (4 if bench.quick else 1)


def _ends(pairs: Sequence[Pair]) -> str:
    ends = dict.fromkeys((owner(source), owner(target)) for source, target in pairs)
    shown = ", ".join(f"process {source} and {target}" for source, target in [*ends][:3])
    return shown + (f" and {len(ends) - 3} more" if len(ends) > 3 else "")


def _latency(there: Moves, back: Moves, turns: int) -> float:
    """Return the seconds of one way: half of there and back, the median of some turns."""
    times = []
    for _ in range(turns):
        begun = time.perf_counter()
        there.check(there())
        back.check(back())
        times.append((time.perf_counter() - begun) / 2)
    return float(np.median(times))


def _rate(there: Moves, answer: Moves, bytes_: int, turns: int) -> float:
    """Return bytes a second of one device: some arrays in flight, until the other side answers."""
    there.check(there())
    answer.check(answer())
    begun = time.perf_counter()
    arrived = [array for _ in range(turns) for array in there()]
    jax.block_until_ready(arrived)
    answer.check(answer())
    return bytes_ * turns / (time.perf_counter() - begun)


def _busy(total: Any) -> Any:
    """Return a kernel of products and a sum over the devices of its stage."""

    def run(x: jax.Array) -> jax.Array:
        square = jnp.tanh(x[:, : 2**14].reshape(-1, 128, 128))
        return total(x).sum() + (square @ square).sum()

    return jax.jit(run)


def judge(transport: str, bench: Bench, every: Sequence[Any]) -> list[Row]:
    """Name the slowest pair of stages."""
    name = f"transfers by {transport}"
    if reasons := [answer for answer in every if isinstance(answer, str)]:
        return [Row(name, ABSENT, reasons[0])]
    pairs = [(rate, int(stage), seconds) for answer in every for stage, (seconds, rate) in answer["pairs"].items()]
    least, stage, _ = min(pairs)
    ends = (bench.meshes[at % bench.stages].devices.flat[0] for at in (stage, stage + 1))
    text = (
        f"{len(pairs)} pair{'s' * (len(pairs) > 1)} of stages, both ways: "
        f"{max(seconds for *_, seconds in pairs) * 1e6:.0f} us small; {least / 1e9:.3g} GB/s large, slowest between "
        f"{' and '.join(name_process(owner(device)) for device in ends)}; {_turns(bench)} turns of all beside kernels, "
        f"{max(answer['turn'] for answer in every) * 1e3:.1f} ms each"
    )
    return [Row(name, OK, text)]


def advise(transport: str) -> str:
    """Return the remedy where transfers fail."""
    other = "device_put" if transport == "pull" else "pull"
    way = "let no firewall close ports between the hosts" if transport == "pull" else "NCCL_DEBUG=INFO says why"
    return f"{way}; NCCL_SOCKET_IFNAME chooses a network; MULTIMESH_TRANSPORT={other} is another way"
