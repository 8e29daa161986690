"""The collectives of a compiled program, from its HLO text: their bytes, devices and lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from multimesh.observe.hlo import ARRAY, Computations, read_arrays

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_PATH = re.compile(r'op_name="([^"]*)"')
_SYNCHRONOUS = re.compile(r'"is_sync":true')


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes
    ----------
    kind
        One of `KINDS`.
    arrays
        Dtype and shape of each result on a device, as HLO writes them: ``("bf16", (4096, 8192))``.
    nbytes
        Bytes of the results on a device, in one run.
    times
        How often it runs in one run of the program, as far as XLA knows it.
    asynchronous
        Whether other operations of the device may run beside it.
    groups
        Positions of the devices in the mesh that take part together; of a permutation, pairs of them.
    line
        ``file:line`` of the operation that it was made for, or an empty string.
    operation
        Path of that operation in the traced function, as ``jit(step)/all_to_all``.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    nbytes: int
    times: int
    asynchronous: bool
    groups: tuple[tuple[int, ...], ...]
    line: str
    operation: str = ""

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of the mesh along which it runs; all of them where XLA does not say."""
        members = [group for group in self.groups if len(group) > 1]
        if not members:
            return tuple(name for name, size in mesh.shape.items() if size > 1)
        places = [np.array(np.unravel_index(group, mesh.devices.shape)) for group in members]
        return tuple(name for d, name in enumerate(mesh.axis_names) if any(np.ptp(place[d]) for place in places))

    def __str__(self) -> str:
        arrays = ", ".join(f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in self.arrays)
        return f"{self.kind} {arrays}" + (f" x {self.times}" if self.times > 1 else "")


def find_collectives(program: Computations) -> tuple[Collective, ...]:
    """Return the collectives of a program, in the order of its text."""
    begun: dict[str, str] = {}  # name of a collective that began to the line where it did
    found: dict[str, list[Collective]] = {}
    lines = _Lines(program.head)
    starts = program.starts()
    for name, operations in program.operations.items():
        own = found.setdefault(name, [])
        for op in operations:
            kind = op.kind.removesuffix("-start").removesuffix("-done")
            if kind in KINDS and op.kind.endswith("-start"):
                begun[op.name] = op.text
            elif kind in KINDS:  # what began with -start is noted where it ends
                text = begun.get(op.first, op.text)
                start = starts.get(name, text)
                asynchronous = start is not op.text and not _SYNCHRONOUS.search(start)
                arrays = tuple(read_arrays(op.type))
                path = named[1] if (named := _PATH.search(text)) else ""
                of = Collective(kind, arrays, _bytes(op.type), 1, asynchronous, _groups(text), lines.of(text), path)
                own.append(of)
    return tuple(replace(each, times=times) for name, times in program.runs() for each in found.get(name, ()))


def collective_bytes(found: Iterable[Collective]) -> dict[str, float]:
    """Return the bytes of the results of each kind of collective on a device, in one run of their program.

    The body of a loop counts as often as XLA knows that it runs, or else once.
    """
    total: dict[str, float] = {}
    for each in found:
        total[each.kind] = total.get(each.kind, 0.0) + each.nbytes * each.times
    return total


def _bytes(types: str) -> int:
    """Return the bytes of an array, or of a tuple of them, as HLO writes its type: ``f32[8,64]{1,0}``."""
    sizes = (
        (int(bits or 8), math.prod(int(n) for n in dims.split(",") if n)) for _, bits, _, dims in ARRAY.findall(types)
    )
    return sum(bits * number // 8 for bits, number in sizes)


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Read the groups of devices, which HLO writes in three ways; without any, all devices are one group."""
    if listed := _LISTED.search(text):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if iota := _IOTA.search(text):
        return tuple(tuple(map(int, row)) for row in _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2])))
    if mesh := _MESH.search(text):
        sizes = {name.strip(" '"): int(size) for name, _, size in (part.partition("=") for part in mesh[1].split(","))}
        among = [name.strip(" '") for name in mesh[4].split(",")]
        if set(among) <= set(sizes):
            shape = tuple(sizes.values())
            numbers = _iota(mesh[2] or ",".join(map(str, shape)), mesh[3]).reshape(shape)
            places = [[*sizes].index(name) for name in among]
            moved = np.moveaxis(numbers, places, range(-len(places), 0))
            return tuple(tuple(map(int, row)) for row in moved.reshape(-1, math.prod(sizes[n] for n in among)))
    return ()


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Return numbers from 0 on in an array of these sizes, with its dimensions in another order: ``[2,4]T(1,0)``."""
    numbers = np.arange(math.prod(map(int, sizes.split(",")))).reshape(tuple(map(int, sizes.split(","))))
    return numbers.transpose(tuple(map(int, order.split(",")))) if order else numbers


class _Lines:
    """The table of source lines at the head of HLO text: numbers of stack frames to files and lines."""

    def __init__(self, head: str) -> None:
        self._files = dict(re.findall(r'^(\d+) "(.*)"$', head.partition("FunctionNames")[0], re.MULTILINE))
        self._places = {
            number: (file, line)
            for number, file, line in re.findall(r"^(\d+) \{file_name_id=(\d+) .*? line=(\d+)", head, re.MULTILINE)
        }
        self._frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", head, re.MULTILINE))

    def of(self, text: str) -> str:
        """Return ``file:line`` of an operation's innermost frame."""
        frame = re.search(r"stack_frame_id=(\d+)", text)
        file, line = self._places.get(self._frames.get(frame[1], "") if frame else "", ("", ""))
        return f"{self._files[file]}:{line}" if file in self._files else ""
