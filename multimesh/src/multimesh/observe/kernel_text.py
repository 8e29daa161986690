"""The costs of one run of a compiled program on a device, read off its text: of kernels, and of any other program."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from multimesh.observe.hlo import (
    MOVES,
    Collective,
    Computations,
    Operation,
    collective_bytes,
    count_bytes,
    count_custom_calls,
    find_collectives,
    list_operands,
    product_operations,
    read_calls,
    read_computations,
)

_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "domain"),
    *("while", "call", "conditional", "partition-id", "replica-id", "add-dependency", "send", "recv"),
    *("fusion-done", "async-update", "async-done"),
}
"""Operations that touch no memory: names, callers of what does, and ends of what is counted where it begins."""

_FUSIONS = ("fusion", "fusion-start", "async-start")
_MOVES = {*MOVES, "parameter", "constant", "tuple"}
_SLICES = ("dynamic-slice", "slice", "gather")
_WORKSPACE = re.compile(r"\b[su]8\[\d+\]")


@dataclass(frozen=True)
class KernelText:
    """The collectives of a program, its custom calls, the operations of its products, and its traffic on a device.

    ``accessed``: bytes that a run reads and writes, those of ``copies`` kernels ``copied`` among them. A copy is a
    kernel that copies or transposes an array and computes nothing.
    """

    collectives: tuple[Collective, ...] = ()
    custom_calls: Mapping[str, int] = field(default_factory=dict)
    operations: float = 0.0
    accessed: float = 0.0
    copies: float = 0.0
    copied: float = 0.0

    @functools.cached_property
    def costs(self) -> dict[str, float]:
        """Operations and bytes of one run, by the names of `Compiled.cost_analysis`."""
        values = {"flops": self.operations, "bytes accessed": self.accessed}
        return values | {"copies": self.copies, "bytes copied": self.copied} | collective_bytes(self.collectives)


def read_kernel(hlo: str) -> KernelText:
    """Return the facts of a program. ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it."""
    program = read_computations(hlo)
    counts = find_collectives(program), count_custom_calls(program), product_operations(program)
    return KernelText(*counts, *_count_traffic(program))


def count_costs(hlo: str) -> dict[str, float]:
    """Return what one run of a compiled program costs on a device, by the names of `Compiled.cost_analysis`.

    A step of a pipeline is compared so with one program of the same model: ``jax.jit(step).lower(...).compile()``.

    Parameters
    ----------
    hlo
        Optimized HLO, as ``as_text()`` of a compiled function gives it.
    """
    return read_kernel(hlo).costs


def _count_traffic(program: Computations) -> Iterator[float]:
    """Yield bytes accessed, copies and bytes copied in one run of a program.

    A loop counts as often as XLA knows that it runs, or else once.

    An array counts each time that a kernel reads or writes it, as in XLA's own analysis: of an array that is sliced or
    updated in place only that part, and no workspace of a library.
    """
    fusions = (op for operations in program.operations.values() for op in operations if op.kind in _FUSIONS)
    fused = {name for op in fusions for name in read_calls(op.text)}
    costs = {name: tuple(_count(program, name)) for name in program.operations if name not in fused}
    runs = [(kernel, times) for name, times in program.runs(fused) for kernel in costs[name]]
    return (sum(times * kernel[part] for kernel, times in runs) for part in range(3))


def _count(program: Computations, name: str) -> Iterator[tuple[float, float, float]]:
    """Yield bytes accessed, copies and bytes copied of each kernel of a computation."""
    sizes = {op.name: count_bytes(op.type) for op in program.operations[name]}
    for op in program.operations[name]:
        if op.kind in _NOTHING:
            continue
        body = program.operations[read_calls(op.text)[0]] if op.kind in _FUSIONS else (op,)
        size = _count_reads(op, body, sizes) + _count_writes(op, body, sizes)
        kinds = {inner.kind for inner in body}
        moves = op.kind.startswith("copy") or (kinds <= _MOVES and not kinds.isdisjoint(("copy", "transpose")))
        yield size, moves and not op.kind.endswith("-done"), moves and size


def _count_reads(op: Operation, body: Sequence[Operation], sizes: Mapping[str, int]) -> int:
    """Return the bytes of the operands that a kernel reads. What ends an operation was read where it began."""
    names = list_operands(op.text)
    if op.kind.endswith("-done"):
        return 0
    if body == (op,):
        return sum(_count_read(name, body, sizes) for name in names)
    numbers = {inner.text.partition("parameter(")[2].partition(")")[0]: inner for inner in body}
    inside = {inner.name: count_bytes(inner.type) for inner in body}
    arrays = [(name, numbers.get(str(number))) for number, name in enumerate(names)]
    return sum(min(sizes[name], _count_read(array.name, body, inside)) for name, array in arrays if array)


def _count_read(name: str, body: Iterable[Operation], sizes: Mapping[str, int]) -> int:
    """Return the bytes of an array that a kernel reads: those of its slices, where nothing reads all of it."""
    size = 0
    for reader in body:
        operands = list_operands(reader.text)
        if name not in operands or (reader.kind == "dynamic-update-slice" and operands[0] == name):
            continue
        if reader.kind == "bitcast":
            size += _count_read(reader.name, body, sizes)
        elif reader.kind in _SLICES and operands[0] == name:
            size += sizes[reader.name]
        else:
            return sizes.get(name, 0)
    return min(size, sizes.get(name, 0))


def _count_writes(op: Operation, body: Sequence[Operation], sizes: Mapping[str, int]) -> int:
    """Return the bytes that a kernel writes. What begins without a body is written where it ends."""
    if body == (op,) and op.kind.endswith("-start"):
        return 0
    if op.kind == "custom-call":
        return count_bytes(_WORKSPACE.sub("", op.type))
    inner = {part.name: part for part in body}
    root = next((last for last in body if last.text.lstrip().startswith("ROOT ")), body[-1])
    size = 0
    for result in (
        [inner[name] for name in list_operands(root.text) if name in inner] if root.kind == "tuple" else [root]
    ):
        while result.kind == "bitcast" and list_operands(result.text)[0] in inner:
            result = inner[list_operands(result.text)[0]]
        part = list_operands(result.text)[1] if result.kind == "dynamic-update-slice" else ""
        size += count_bytes(inner[part].type) if part in inner else sizes.get(part, count_bytes(result.type))
    return size
