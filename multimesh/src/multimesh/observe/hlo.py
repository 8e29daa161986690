"""The text of a compiled program, HLO: its computations, their operations and collectives, and how often each runs.

jaxlib's objects of HLO give operands and shapes, but no groups of devices, trip counts or lines: these stand in the
text alone.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import Mesh

from multimesh.errors import internal_error

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-broadcast", "collective-permute"),
)
"""Kinds of collectives."""

MOVES = ("copy", "transpose", "bitcast", "reshape", "convert")
"""Operations that keep the values of an array, but for rounding."""

ARRAY = re.compile(r"([a-z]+)(\d*)([a-z0-9]*)\[([\d,]*)\]")
"""The type of an array: letters, bits and the rest of its dtype, and its dimensions."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OP = re.compile(r"%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((?:%?([\w.-]+))?")
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
_PATH = re.compile(r'op_name="([^"]*)"')
_SYNCHRONOUS = re.compile(r'"is_sync":true')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[\]}]')
_CALL = re.compile(r'custom_call_target="([^"]+)"')
_FUSION = re.compile(r'"kind":"(__[\w$]+)"')


@dataclass(frozen=True)
class Operation:
    """An operation of a computation.

    ``first`` is the name of its first operand, ``type`` that of its result as HLO writes it, ``text`` the whole line.
    """

    name: str
    type: str
    kind: str
    first: str
    text: str


@dataclass(frozen=True)
class Computations:
    """The computations of a program.

    ``operations`` are those of each, ``calls`` the computations that it calls, and how often in one run of it. ``head``
    is the text before the first one, with the table of source lines.
    """

    head: str
    entry: str
    operations: Mapping[str, Sequence[Operation]]
    calls: Mapping[str, Sequence[tuple[str, int]]]

    def runs(self, apart: Collection[str] = ()) -> Iterator[tuple[str, int]]:
        """Yield each computation but some, once for each place that calls it, and how often it runs there.

        The body of a loop counts as often as XLA knows that it runs, or else once.
        """
        return self._runs(self.entry, 1, apart)

    def starts(self) -> dict[str, str]:
        """Return the line that starts each computation which runs beside the one that calls it."""
        begin = [op for operations in self.operations.values() for op in operations if op.kind in _STARTS]
        return {called: op.text for op in begin for called in read_calls(op.text)}

    def _runs(self, name: str, times: int, apart: Collection[str]) -> Iterator[tuple[str, int]]:
        yield name, times
        for called, trips in self.calls.get(name, ()):
            if called not in apart:
                yield from self._runs(called, times * trips, apart)


def read_computations(hlo: str) -> Computations:
    """Return the computations of a program.

    ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it.
    """
    operations: dict[str, list[Operation]] = {"": []}
    calls: dict[str, list[tuple[str, int]]] = {"": []}
    entry = name = ""
    for text in hlo.splitlines():
        if head := _HEAD.match(text):
            name = head[2]
            operations[name], calls[name] = [], []
            entry = name if head[1] else entry
        elif op := _OP.search(text):
            operations[name].append(Operation(op[1], op[2], op[3], op[4] or "", text))
            if op[3] in _CALLERS:
                trips = int(match[1]) if (match := _TRIPS.search(text)) else 1
                calls[name] += [(callee, trips) for callee in read_calls(text)]
    return Computations(hlo.partition("\n%")[0], entry, operations, calls)


def read_calls(text: str) -> list[str]:
    """Return the names of the computations that an operation calls."""
    parts = [part.strip("%, ") for group in _CALLED.findall(text) for part in group.split(",")]
    return [name for name in parts if name]


def list_operands(text: str) -> list[str]:
    """Return the names of the operands of an operation, in its line of HLO."""
    match = _ARGUMENTS.search(text)
    return _NAMES.findall(match[1]) if match else []


def read_arrays(types: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield dtype and shape of each array of a type: ``bf16``, ``(8, 64)``."""
    for letters, bits, suffix, dims in ARRAY.findall(types):
        yield letters + bits + suffix, tuple(int(n) for n in dims.split(",") if n)


def product_operations(program: Computations) -> float:
    """Return the operations of all products on a device in one run of a program, two for each multiplication.

    Products are those of XLA, Triton and cuBLAS. Attention of cuDNN is none.
    """
    counts: dict[str, float] = {}
    for name, operations in program.operations.items():
        types = {op.name: op.type for op in operations}
        for op in operations:
            if op.kind not in ("dot", "custom-call") or not (contracted := _CONTRACTED.search(op.text)):
                continue
            (_, result), (_, lhs) = (next(read_arrays(types[operand])) for operand in (op.name, op.first))
            along = [int(n) for n in contracted[1].replace('"', "").split(",") if n]
            counts[name] = counts.get(name, 0.0) + 2.0 * math.prod(result) * math.prod(lhs[d] for d in along)
    return sum(counts.get(name, 0.0) * times for name, times in program.runs())


def count_custom_calls(program: Computations) -> Mapping[str, int]:
    """Return in how many places a program calls each kernel that is not of XLA's own loops.

    On GPUs ``__cublas$lt$matmul`` is a product of cuBLASLt, ``__cudnn$fmhaSoftmax`` an attention of cuDNN,
    ``__triton_nested_gemm_fusion`` a product by Triton.
    """
    texts = (op.text for operations in program.operations.values() for op in operations)
    counts = collections.Counter(name for text in texts for name in (*_CALL.findall(text), *_FUSION.findall(text)))
    return dict(sorted(counts.items()))


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
    begun: dict[str, str] = {}  # name of a collective that began to the line where it did
    by_name: dict[str, list[Collective]] = {}
    lines = _Lines(program.head)
    starts = program.starts()
    for name, operations in program.operations.items():
        listed = by_name.setdefault(name, [])
        named = {op.name: op for op in operations}
        for op in operations:
            kind, result = op.kind.removesuffix("-start").removesuffix("-done"), op.type
            if op.kind == "send" and "is_host_transfer=true" not in op.text:  # a permutation that XLA writes as two
                kind, result = "collective-permute", op.type.partition(", u32[]")[0]
            if kind in KINDS and op.kind.endswith("-start"):
                begun[op.name] = op.text
            elif kind in KINDS:  # what began with -start is noted where it ends
                text = begun.get(op.first, op.text)
                start = starts.get(name, text)
                asynchronous = op.kind == "send" or (start is not op.text and not _SYNCHRONOUS.search(start))
                arrays = tuple(read_arrays(result))
                path = match[1] if (match := _PATH.search(text)) else ""
                sources = tuple(_find_source(each, named, program) for each in list_operands(text))
                size, groups, line = count_bytes(result), _groups(text), lines.of(text)
                listed.append(Collective(kind, arrays, size, 1, asynchronous, groups, line, path, sources))
            elif kind not in ("async", "fusion", "send", "recv") and _DEVICES.search(op.text):
                raise internal_error(f"a kernel has an operation between devices, {op.kind!r}, that is no collective")
    return tuple(replace(of, times=times) for name, times in program.runs() for of in by_name.get(name, ()))


def _find_source(name: str, operations: Mapping[str, Operation], program: Computations) -> str:
    """Return the name of the array that another was made of by conversions, copies and the like."""
    while (op := operations.get(name)) and op.kind != "parameter" and op.first:
        body = program.operations.get(called[0], ()) if (called := read_calls(op.text)) else (op,)
        if len(list_operands(op.text)) > 1 or not {inner.kind for inner in body} <= {*MOVES, "parameter"}:
            break
        name = op.first
    return name


def collective_bytes(collectives: Iterable[Collective]) -> dict[str, float]:
    """Return the bytes of the results of each kind of collective on a device, in one run of their program.

    The body of a loop counts as often as XLA knows that it runs, or else once.
    """
    total: dict[str, float] = {}
    for collective in collectives:
        total[collective.kind] = total.get(collective.kind, 0.0) + collective.nbytes * collective.times
    return total


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
