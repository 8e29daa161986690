"""The costs of one run of a compiled program on a device, read off its text: of kernels, and of any other program."""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from multimesh.observe.hlo import (
    MOVES,
    Collective,
    Computations,
    Operation,
    count_bytes,
    find_collectives,
    read_arrays,
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
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)[\]}]')
_LIBRARY = re.compile(r'custom_call_target="([^"]+)"|"kind":"(__[\w$]+)"')


@dataclass(frozen=True)
class KernelText:
    """The collectives of a program, its custom calls, the operations of its products, and its traffic on a device.

    ``custom_calls``: in how many places the program calls each kernel that is not of XLA's own loops. On GPUs
    ``__cublas$lt$matmul`` is a product of cuBLASLt, ``__cudnn$fmhaSoftmax`` an attention of cuDNN,
    ``__triton_nested_gemm_fusion`` a product by Triton.
    ``operations``: of all products on a device, two for each multiplication. Products are those of XLA, Triton and
    cuBLAS. Attention of cuDNN is none.
    ``accessed``: bytes that a run reads and writes, those of ``copies`` kernels ``copied`` among them. A copy is a
    kernel that copies or transposes an array and computes nothing.
    The body of a loop counts as often as XLA knows that it runs, or else once.
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
        values |= {"copies": self.copies, "bytes copied": self.copied}
        for collective in self.collectives:
            values[collective.kind] = values.get(collective.kind, 0.0) + collective.nbytes * collective.times
        return values


def read_kernel(hlo: str) -> KernelText:
    """Return the facts of a program. ``hlo``: optimized HLO, as ``as_text()`` of a compiled function gives it."""
    program = read_computations(hlo)
    names = (name for ops in program.operations.values() for op in ops for name in _LIBRARY.findall(op.text))
    calls = collections.Counter(target or fusion for target, fusion in names)
    products = {name: _count_products(operations) for name, operations in program.operations.items()}
    operations = sum(products.get(name, 0.0) * times for name, times in program.runs())
    return KernelText(find_collectives(program), dict(sorted(calls.items())), operations, *_count_traffic(program))


def count_costs(hlo: str) -> dict[str, float]:
    """Return what one run of a compiled program costs on a device, by the names of `Compiled.cost_analysis`.

    A step of a pipeline is compared so with one program of the same model: ``jax.jit(step).lower(...).compile()``.

    Parameters
    ----------
    hlo
        Optimized HLO, as ``as_text()`` of a compiled function gives it.
    """
    return read_kernel(hlo).costs


def _count_products(operations: Sequence[Operation]) -> float:
    """Return the operations of the products of a computation."""
    types, total = {op.name: op.type for op in operations}, 0.0
    for op in operations:
        if op.kind in ("dot", "custom-call") and (contracted := _CONTRACTED.search(op.text)):
            (_, result), (_, lhs) = (next(read_arrays(types[operand])) for operand in (op.name, op.operands[0]))
            along = [int(n) for n in contracted[1].replace('"', "").split(",") if n]
            total += 2.0 * math.prod(result) * math.prod(lhs[d] for d in along)
    return total


def _count_traffic(program: Computations) -> Iterator[float]:
    """Yield bytes accessed, copies and bytes copied in one run of a program.

    An array counts each time that a kernel reads or writes it, as in XLA's own analysis: of an array that is sliced or
    updated in place only that part, and no workspace of a library.
    """
    fused = {name for ops in program.operations.values() for op in ops if op.kind in _FUSIONS for name in op.calls}
    costs = {name: tuple(_count(program, name)) for name in program.operations if name not in fused}
    runs = [(kernel, times) for name, times in program.runs(fused) for kernel in costs[name]]
    return (sum(times * kernel[part] for kernel, times in runs) for part in range(3))


def _count(program: Computations, name: str) -> Iterator[tuple[float, float, float]]:
    """Yield bytes accessed, copies and bytes copied of each kernel of a computation."""
    sizes = {op.name: op.nbytes for op in program.operations[name]}
    for op in program.operations[name]:
        if op.kind in _NOTHING:
            continue
        body = program.operations[op.calls[0]] if op.kind in _FUSIONS else (op,)
        size = _count_reads(op, body, sizes) + _count_writes(op, body, sizes)
        kinds = {inner.kind for inner in body}
        moves = op.kind.startswith("copy") or (kinds <= _MOVES and not kinds.isdisjoint(("copy", "transpose")))
        yield size, moves and not op.kind.endswith("-done"), moves and size


def _count_reads(op: Operation, body: Sequence[Operation], sizes: Mapping[str, int]) -> int:
    """Return the bytes of the operands that a kernel reads. What ends an operation was read where it began."""
    if op.kind.endswith("-done"):
        return 0
    if body == (op,):
        return sum(_count_read(name, body, sizes) for name in op.operands)
    inside = {inner.name: inner.nbytes for inner in body}
    numbers = {inner.text.partition("parameter(")[2].partition(")")[0]: inner.name for inner in body}
    arrays = [(sizes[name], numbers.get(str(number))) for number, name in enumerate(op.operands)]
    return sum(min(size, _count_read(array, body, inside)) for size, array in arrays if array)


def _count_read(name: str, body: Iterable[Operation], sizes: Mapping[str, int]) -> int:
    """Return the bytes of an array that a kernel reads: those of its slices, where nothing reads all of it."""
    size, readers = 0, [reader for reader in body if name in reader.operands]
    for reader in readers:
        operands = reader.operands
        if reader.kind == "dynamic-update-slice" and operands[0] == name:
            continue
        if reader.kind in ("bitcast", "convert") and body != (reader,):
            size += _count_read(reader.name, body, sizes) * sizes[name] // max(1, sizes[reader.name])
        elif reader.kind in _SLICES and operands[0] == name:
            size += sizes[reader.name]
        else:
            return sizes.get(name, 0)
    return min(size, sizes.get(name, 0)) if readers else sizes.get(name, 0)


def _count_writes(op: Operation, body: Sequence[Operation], sizes: Mapping[str, int]) -> int:
    """Return the bytes that a kernel writes. What begins without a body is written where it ends."""
    if body == (op,) and op.kind.endswith("-start"):
        return 0
    if op.kind == "custom-call":
        return count_bytes(_WORKSPACE.sub("", op.type))
    inner = {part.name: part for part in body}
    root = next((last for last in body if last.text.lstrip().startswith("ROOT ")), body[-1])
    results = [inner[name] for name in root.operands if name in inner] if root.kind == "tuple" else [root]
    size = 0
    for result in results:
        while result.kind == "bitcast" and result.operands[0] in inner:
            result = inner[result.operands[0]]
        part = result.operands[1] if result.kind == "dynamic-update-slice" else ""
        size += inner[part].nbytes if part in inner else sizes.get(part, result.nbytes)
    return size
