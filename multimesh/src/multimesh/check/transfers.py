"""Transfers between neighboring stages by each transport: alone, and while all stages compute and reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multimesh.check.compute import look_up_rate, make_sum
from multimesh.check.steps import Bench
from multimesh.check.verdicts import ABSENT, NOTE, OK, Row
from multimesh.core import _compat
from multimesh.errors import MultiMeshError
from multimesh.processes import agree
from multimesh.processes.initialize import name_process
from multimesh.runtime.actions import lanes, owner
from multimesh.runtime.between.carriers import carrier
from multimesh.runtime.transport import Piece, Way

Pair = tuple[jax.Device, jax.Device]
SMALL = 1024  # floats
BELOW = 0.5  # of what the table expects: less is worth a look
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
        every = lanes([Way((), (), tuple(Piece(source, 0, target, 0) for source, target in pairs))])
        between = [lane for lane in every if lane.source != lane.target]
        by = carrier(transport) if between else None  # one process alone has no use for it
        self._lanes = [lane for lane in between if by and (by.everyone or me in (lane.source, lane.target))]
        self._carry = by.link(self._lanes, [jax.ShapeDtypeStruct((count,), np.float32)]) if by and self._lanes else None
        self._within = [(source, target) for source, target in pairs if owner(source) == owner(target) == me]
        self._sent = [parcel for lane in self._lanes if lane.source == me for parcel in lane.parcels]
        sources = {parcel.piece.source for parcel in self._sent} | {source for source, _ in self._within}
        self._values = {d: jax.device_put(np.full(count, d.id, np.float32), d) for d in sources}
        self._from = {target: source for source, target in pairs}
        jax.block_until_ready([*self._values.values()])

    @property
    def takes_part(self) -> bool:
        """Whether this process has a call to make."""
        return bool(self._lanes or self._within)

    def __call__(self) -> list[jax.Array]:
        """Start them; returns what arrives here."""
        self._calls += 1
        with _compat.explicit_transfers():
            pieces = {parcel: self._values[parcel.piece.source] for parcel in self._sent}
            got = self._carry((_PLAN, self._number, self._calls), pieces) if self._carry else {}
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


def _pairs(bench: Bench, stages: Sequence[int]) -> list[Pair]:
    every = [[*mesh.devices.flat] for mesh in bench.meshes]
    return [pair for s in stages for pair in zip(every[s], every[(s + 1) % bench.stages], strict=True)]


def alone(transport: str) -> Callable[[Bench], Any]:
    """Return the measurement of each pair of neighboring stages by a transport, both ways."""

    def measure(bench: Bench) -> Any:
        if reason := _impossible(transport, bench):
            return reason
        found: dict[str, dict[str, float]] = {}
        large = _large(bench)
        for number, stages in enumerate(_rounds(bench)):
            agree.barrier(f"check: {transport} {number}")
            there = _pairs(bench, stages)
            back = [(target, source) for source, target in there]
            if not there:
                continue
            bench.doing = f"transfers by {transport} between {_ends(there)}"
            first = 10 * number
            small = Moves(transport, there, SMALL, first), Moves(transport, back, SMALL, first + 1)
            if not small[0].takes_part:
                continue
            times = _latency(*small, 20 if bench.quick else 1000)
            rates = []
            for way, (pairs, answer) in enumerate(((there, small[1]), (back, small[0]))):
                bench.doing = f"transfers of {4 * large >> 20} MiB by {transport} between {_ends(pairs)}"
                moves = Moves(transport, pairs, large, first + 2 + way)
                rates.append(_rate(moves, answer, 4 * large, 3 if bench.quick else 20))
            for stage in stages:
                if owner(bench.meshes[stage].devices.flat[0]) == bench.rank:
                    found[str(stage)] = {"seconds": times, "there": rates[0], "back": rates[1]}
        return found

    return measure


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
    found = []
    for _ in range(turns):
        begun = time.perf_counter()
        there.check(there())
        back.check(back())
        found.append((time.perf_counter() - begun) / 2)
    return float(np.median(found))


def _rate(there: Moves, answer: Moves, bytes_: int, turns: int) -> float:
    """Return bytes a second of one device: some arrays in flight, until the other side answers."""
    there.check(there())
    answer.check(answer())
    begun = time.perf_counter()
    arrived = [array for _ in range(turns) for array in there()]
    jax.block_until_ready(arrived)
    answer.check(answer())
    return bytes_ * turns / (time.perf_counter() - begun)


def judge_alone(transport: str) -> Callable[[Bench, Sequence[Any]], list[Row]]:
    """Return the judge of `alone`."""

    def judge(bench: Bench, every: Sequence[Any]) -> list[Row]:
        name = f"transfers by {transport}"
        if reasons := [each for each in every if isinstance(each, str)]:
            return [Row(name, ABSENT, reasons[0])]
        pairs: dict[int, Mapping[str, float]] = {int(s): each for found in every for s, each in found.items()}
        rates = {stage: min(each["there"], each["back"]) for stage, each in pairs.items()}
        slowest = min(rates, key=lambda stage: rates[stage])
        late = max(pairs, key=lambda stage: pairs[stage]["seconds"])
        text = (
            f"{len(pairs)} pair{'s' * (len(pairs) > 1)} of stages, both ways: "
            f"{pairs[late]['seconds'] * 1e6:.0f} us small; "
            f"{rates[slowest] / 1e9:.3g} GB/s large, slowest between {_between(bench, slowest)}"
        )
        numbers = {"latency": pairs[late]["seconds"]}
        near = [rate for stage, rate in rates.items() if _near(bench, stage)]
        far = [rate for stage, rate in rates.items() if not _near(bench, stage)]
        numbers |= {"link": min(near)} if near else {}
        numbers |= {"network": min(far)} if far else {}
        rate, wanted = look_up_rate(bench, near=not far)
        low = transport == "device_put" and rates[slowest] < BELOW * rate
        remedy = (
            "NCCL_DEBUG=INFO says which network it takes; ib_write_bw and nccl-tests measure it alone" if low else ""
        )
        return [Row(name, NOTE if low else OK, text, wanted, remedy, numbers=numbers)]

    return judge


def _near(bench: Bench, stage: int) -> bool:
    ends = (bench.meshes[stage].devices.flat[0], bench.meshes[(stage + 1) % bench.stages].devices.flat[0])
    return len({bench.job.hosts[owner(device)] for device in ends}) == 1


def _between(bench: Bench, stage: int) -> str:
    ends = (bench.meshes[stage].devices.flat[0], bench.meshes[(stage + 1) % bench.stages].devices.flat[0])
    return " and ".join(name_process(owner(device)) for device in ends)


def under_load(transport: str) -> Callable[[Bench], Any]:
    """Return the trial of transfers both ways between all stages, while each computes and sums over its devices."""

    def measure(bench: Bench) -> Any:
        if reason := _impossible(transport, bench):
            return reason
        pairs = _pairs(bench, range(bench.stages if bench.stages > 2 else 1))
        back = [(target, source) for source, target in pairs]
        moves = Moves(transport, pairs, SMALL, 100), Moves(transport, back, SMALL, 101)
        large = Moves(transport, pairs, _large(bench), 102)
        work = [(_busy(total), x) for stage in bench.own_stages() for total, x in [make_sum(bench, stage, 2**16)]]
        turns = 20 if bench.quick else 1000
        begun = time.perf_counter()
        for turn in range(turns):
            bench.doing = f"transfers by {transport} beside kernels and sums, turn {turn + 1} of {turns}"
            made = [run(x) for run, x in work]
            arrived = [(each, each()) for each in moves + ((large,) if turn % 10 == 0 else ())]
            if turn % 4 == 3 or turn == turns - 1:
                for each, arrays in arrived:
                    each.check(arrays)
                jax.block_until_ready(made)
        return {"seconds": (time.perf_counter() - begun) / turns, "turns": turns}

    return measure


def _busy(total: Any) -> Any:
    """Return a kernel of products and a sum over the devices of its stage."""

    def run(x: jax.Array) -> jax.Array:
        square = jnp.tanh(x[:, : 2**14].reshape(-1, 128, 128))
        return total(x).sum() + (square @ square).sum()

    return jax.jit(run)


def judge_under_load(transport: str) -> Callable[[Bench, Sequence[Any]], list[Row]]:
    """Return the judge of `under_load`."""

    def judge(bench: Bench, every: Sequence[Any]) -> list[Row]:
        name = f"{transport} beside kernels and sums"
        if reasons := [each for each in every if isinstance(each, str)]:
            return [Row(name, ABSENT, reasons[0])]
        slowest = max(each["seconds"] for each in every)
        text = f"{every[0]['turns']} turns, both ways between all stages, {slowest * 1e3:.1f} ms each"
        return [Row(name, OK, text)]

    return judge


def advise(transport: str) -> str:
    """Return the remedy where transfers fail."""
    other = "device_put" if transport == "pull" else "pull"
    way = "let no firewall close ports between the hosts" if transport == "pull" else "NCCL_DEBUG=INFO says why"
    return f"{way}; NCCL_SOCKET_IFNAME chooses a network; MULTIMESH_TRANSPORT={other} is another way"
