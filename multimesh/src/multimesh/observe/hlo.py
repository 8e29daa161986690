"""The text of a compiled program, HLO: its computations, their operations and collectives, and how often each runs.

jaxlib's objects of HLO give operands and shapes, but no groups of devices, trip counts or lines: these stand in the
text alone.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from multimesh.errors import internal_error

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-broadcast", "collective-permute"),
)
"""Kinds of collectives."""

THRESHOLDS = {
    kind: f"xla_gpu_{kind.replace('-', '_')}_combine_threshold_bytes"
    for kind in ("all-gather", "all-reduce", "reduce-scatter")
}
"""XLA's flag for the bytes up to which it joins collectives of a kind."""

MOVES = ("copy", "transpose", "bitcast", "reshape", "convert")
"""Operations that keep the values of an array, but for rounding."""

ARRAY = re.compile(r"([a-z]+)(\d*)([a-z0-9]*)\[([\d,]*)\]")
"""The type of an array: letters, bits and the rest of its dtype, and its dimensions."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OP = re.compile(r"%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ARGUMENTS = re.compile(r" [a-z][\w-]*\(([^)]*)\)")
_NAMES = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|branch_computations|true_computation|false_computation)=\{?([^}\s]+(?:, %[^}\s]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_STARTS = ("async-start", "fusion-start")  # the second, of a collective that XLA compiles for GPUs as its own
_CALLERS = ("while", "call", "conditional", "fusion", *_STARTS)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_DEVICES = re.compile(r", (?:replica_groups|source_target_pairs|channel_id)=")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PATH = re.compile(r'op_name="([^"]*)"')
_SYNCHRONOUS = re.compile(r'"is_sync":true')


@dataclass(frozen=True)
class Operation:
    """An operation of a computation: ``type`` is that of its result as HLO writes it, ``text`` the whole line."""

    name: str
    type: str
    kind: str
    text: str

    @functools.cached_property
    def operands(self) -> Sequence[str]:
        """The names of its operands."""
        match = _ARGUMENTS.search(self.text)
        return _NAMES.findall(match[1]) if match else []

    @functools.cached_property
    def calls(self) -> Sequence[str]:
        """The names of the computations that it runs."""
        called = _CALLED.findall(self.text) if self.kind in _CALLERS else []
        return [name for group in called for part in group.split(",") if (name := part.strip("%, "))]

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of its result."""
        return count_bytes(self.type)


@dataclass(frozen=True)
class Computations:
    """The operations of each computation of a program, the name of the first that runs, and the text before all."""

    head: str
    entry: str
    operations: Mapping[str, Sequence[Operation]]

    def runs(self, skip: Collection[str] = (), name: str | None = None, times: int = 1) -> Iterator[tuple[str, int]]:
        """Yield each computation but some, once for each place that calls it, and how often it runs there.

        The body of a loop counts as often as XLA knows that it runs, or else once.
        """
        name = self.entry if name is None else name
        yield name, times
        for op in self.operations.get(name, ()):
            trips = int(match[1]) if op.calls and (match := _TRIPS.search(op.text)) else 1
            for called in (called for called in op.calls if called not in skip):
                yield from self.runs(skip, called, times * trips)


def read_computations(hlo: str) -> Computations:
    """Return the computations of a program.

    ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it.
    """
    operations: dict[str, list[Operation]] = {"": []}
    entry = name = ""
    for text in hlo.splitlines():
        if head := _HEAD.match(text):
            name = head[2]
            operations[name] = []
            entry = name if head[1] else entry
        elif op := _OP.search(text):
            operations[name].append(Operation(op[1], op[2], op[3], text))
    return Computations(hlo.partition("\n%")[0], entry, operations)


def read_arrays(types: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield dtype and shape of each array of a type: ``bf16``, ``(8, 64)``."""
    for letters, bits, suffix, dims in ARRAY.findall(types):
        yield letters + bits + suffix, tuple(int(n) for n in dims.split(",") if n)


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
    sources
        Names in the program of the arrays that it sends, as they were before the device converted or moved them.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    nbytes: int
    times: int
    asynchronous: bool
    groups: tuple[tuple[int, ...], ...]
    line: str
    operation: str = ""
    sources: tuple[str, ...] = ()

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
    """Return the collectives of a program, in the order of its text.

    Raises ``MultiMeshError`` if an operation between devices is none of `KINDS`.
    """
    begun: dict[str, Operation] = {}  # collectives that end elsewhere, by name
    by_name: dict[str, list[Collective]] = {}
    lines = _read_lines(program.head)
    every = [op for operations in program.operations.values() for op in operations]
    beside = {called: op.text for op in every if op.kind in _STARTS for called in op.calls}
    for name, operations in program.operations.items():
        listed = by_name.setdefault(name, [])
        named = {op.name: op for op in operations}
        for op in operations:
            kind, result = op.kind.removesuffix("-start").removesuffix("-done"), op.type
            if op.kind == "send" and "is_host_transfer=true" not in op.text:  # a permutation that XLA writes as two
                kind, result = "collective-permute", op.type.partition(", u32[]")[0]
            if kind in KINDS and op.kind.endswith("-start"):
                begun[op.name] = op
            elif kind in KINDS:  # what began with -start is noted where it ends
                origin = next((begun[operand] for operand in op.operands[:1] if operand in begun), op)
                text, start = origin.text, beside.get(name, origin.text)
                asynchronous = op.kind == "send" or (start is not op.text and not _SYNCHRONOUS.search(start))
                path = match[1] if (match := _PATH.search(text)) else ""
                line = lines.get(match[1], "") if (match := _FRAME.search(text)) else ""
                sources = tuple(_find_source(operand, named, program) for operand in origin.operands)
                arrays, size = tuple(read_arrays(result)), count_bytes(result)
                listed.append(Collective(kind, arrays, size, 1, asynchronous, _groups(text), line, path, sources))
            elif kind not in ("async", "fusion", "send", "recv") and _DEVICES.search(op.text):
                raise internal_error(f"a kernel has an operation between devices, {op.kind!r}, that is no collective")
    return tuple(replace(of, times=times) for name, times in program.runs() for of in by_name.get(name, ()))


def _find_source(name: str, operations: Mapping[str, Operation], program: Computations) -> str:
    """Return the name of the array that another was made of by conversions, copies and the like."""
    while (op := operations.get(name)) and len(op.operands) == 1:
        body = program.operations.get(op.calls[0], ()) if op.calls else (op,)
        if not {inner.kind for inner in body} <= {*MOVES, "parameter"}:
            break
        (name,) = op.operands
    return name


def count_bytes(types: str) -> int:
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


def _read_lines(head: str) -> dict[str, str]:
    """Map the numbers of stack frames, in the tables at the head of HLO text, to ``file:line`` of the innermost."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', head.partition("FunctionNames")[0], re.MULTILINE))
    places = re.findall(r"^(\d+) \{file_name_id=(\d+) .*? line=(\d+)", head, re.MULTILINE)
    line_of = {number: f"{files[file]}:{line}" for number, file, line in places if file in files}
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", head, re.MULTILINE)
    return {frame: line_of[place] for frame, place in frames if place in line_of}
