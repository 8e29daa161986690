"""Kernels that do, once compiled, what their author surely did not want: one function for each such fault."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import axes_of
from multimesh.core.text import amount
from multimesh.observe.hlo import Collective, count_bytes
from multimesh.plan.instructions import Kernel, Run
from multimesh.plan.plan import Plan

_THRESHOLDS = {
    kind: f"xla_gpu_{kind.replace('-', '_')}_combine_threshold_bytes"
    for kind in ("all-gather", "all-reduce", "reduce-scatter")
}
"""XLA's flag for the bytes up to which it joins collectives of a kind."""

_WAITS = 10_000_000  # bytes of a collective that nothing hides


@dataclass(frozen=True)
class Finding:
    """A fault of a compiled kernel.

    Attributes
    ----------
    rule
        One of ``gathered-weights``, ``gathered-again``, ``per-microbatch``, ``float32-product``, ``synchronous``,
        ``replicated`` and ``all-to-all``.
    kernel
        Index into ``Plan.kernels``.
    nbytes
        Bytes on a device, in one call, that it concerns.
    line
        ``file:line`` of the user, or an empty string.
    text
        The fault and its remedy.
    """

    rule: str
    kernel: int
    nbytes: int
    line: str
    text: str

    def __str__(self) -> str:
        return f"{self.line}: {self.text}" if self.line else self.text


def inspect(plan: Plan, programs: Sequence[Sequence[Collective]], least: int) -> tuple[Finding, ...]:
    """Return the faults of the kernels of a plan that concern ``least`` bytes on a device or more, the largest first.

    ``plan``: the plan.
    ``programs``: the collectives of each kernel, in the order of ``plan.kernels``.
    """
    times = collections.Counter(run.kernel for run in plan.runs)
    findings: list[Finding] = []
    for number, run in plan.first_runs.items():
        kernel = _Kernel(plan, number, run, programs[number], times[number])
        for rule in (
            _find_gathered_weights,
            _find_gathered_again,
            _find_per_microbatch,
            _find_float32_products,
            _find_synchronous,
            _find_whole_results,
            _find_all_to_alls,
        ):
            findings += rule(kernel)
    most: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        if finding.nbytes >= least:
            key = finding.rule, finding.line, finding.text
            most[key] = max(most.get(key, finding), finding, key=lambda one: one.nbytes)
    return tuple(sorted(most.values(), key=lambda one: -one.nbytes))


@dataclass(frozen=True)
class _Kernel:
    """A kernel with the collectives of its program, and how often a call runs it."""

    plan: Plan
    number: int
    run: Run
    collectives: Sequence[Collective]
    times: int

    @property
    def kernel(self) -> Kernel:
        return self.plan.kernels[self.number]

    @property
    def mesh(self) -> Mesh:
        return self.plan.submeshes[self.kernel.submesh]

    @property
    def weights(self) -> Iterator[tuple[tuple[int, ...], NamedSharding]]:
        """Shapes and layouts of arguments of the call that are no rows of a microbatch: parameters."""
        before = len(self.kernel.sums) + bool(self.kernel.rows) + len(self.kernel.rows)
        for slot in self.run.ins[before:]:
            if slot in self.plan.initial_slots and len(self.plan.slots[slot].shape) > 1:
                yield self.plan.slots[slot].shape, self.plan.layouts[slot]

    @functools.cached_property
    def data_axes(self) -> set[str]:
        """Axes of the mesh that divide rows of the batch, on any submesh: those of what the loop cuts."""
        names: set[str] = set()
        for number, run in self.plan.first_runs.items():
            kernel = self.plan.kernels[number]
            before = len(kernel.sums) + bool(kernel.rows)
            for slot in run.ins[before : before + len(kernel.rows)]:
                names |= {axis for part in self.plan.layouts[slot].spec[:2] for axis in axes_of(part)}
        return {axis for axis in names if self.mesh.shape.get(axis, 1) > 1}

    def gathered(self, collective: Collective) -> set[str] | None:
        """Return the axes over which an all-gather completes a parameter; None if it gathers something else."""
        if collective.kind != "all-gather":
            return None
        axes = set(collective.axes(self.mesh))
        for (_, shape), (full, layout) in itertools.product(collective.arrays, self.weights):
            if axes & {axis for part in layout.spec for axis in axes_of(part)} and sorted(shape) in (
                sorted(full),
                sorted(_shard(full, layout, axes)),
            ):
                return axes
        return None

    def line(self, collective: Collective) -> str:
        """Return the user's line of a collective, or else of the kernel's last operation."""
        return collective.line or (_compat.user_line(self.kernel.ops[-1].source) if self.kernel.ops else "")

    def find(self, rule: str, nbytes: int, line: str, text: str) -> Finding:
        return Finding(rule, self.number, nbytes, line, f"{self.kernel.name!r}: {text}")

    def find_moving(self, rule: str, collective: Collective, text: str) -> Finding:
        """Return the finding of a rule about a collective, with its bytes and its line."""
        return self.find(rule, self.bytes_of(collective), self.line(collective), text)

    def bytes_of(self, collective: Collective) -> int:
        """Return the bytes of a collective in a call, which runs the kernel several times."""
        return collective.nbytes * collective.times * self.times

    @property
    def in_loop(self) -> Sequence[Collective]:
        """Collectives that run for each microbatch."""
        return self.collectives if self.times > 1 else ()


def _shard(shape: tuple[int, ...], layout: NamedSharding, without: set[str]) -> tuple[int, ...]:
    """Return the shape of a shard where some axes divide nothing."""
    parts = [*layout.spec, *[None] * (len(shape) - len(layout.spec))]
    ways = [math.prod(layout.mesh.shape[axis] for axis in axes_of(part) if axis not in without) for part in parts]
    return tuple(size // n for size, n in zip(shape, ways, strict=True))


def _find_gathered_weights(of: _Kernel) -> Iterator[Finding]:
    """Yield parameters that each microbatch gathers along an axis that divides no rows, and so not for FSDP."""
    for call in of.in_loop:
        axes = of.gathered(call)
        if axes and not axes & of.data_axes:
            yield of.find_moving(
                "gathered-weights", call,
                f"gathers a parameter along {_names(axes)} for each microbatch: {_cost(call, of)}; "
                "constrain operand or result so that features, not tokens, are divided along that axis",
            )  # fmt: skip


def _find_gathered_again(of: _Kernel) -> Iterator[Finding]:
    """Yield arrays that a kernel gathers several times along the same axes: once for each operation that reads them."""
    gathers: dict[tuple[str, Any, tuple[str, ...]], list[Collective]] = {}
    for call in of.collectives:
        for source, array in zip(call.sources, call.arrays, strict=False) if call.kind == "all-gather" else ():
            gathers.setdefault((source, array, call.axes(of.mesh)), []).append(call)
    for (_, array, axes), calls in gathers.items():
        name = f"{array[0]}[{','.join(map(str, array[1]))}]"
        size = (len(calls) - 1) * count_bytes(name) * calls[0].times * of.times
        if len(calls) > 1:
            kind = "parameter" if of.gathered(replace(calls[0], arrays=(array,))) else "value"
            yield of.find(
                "gathered-again", size, of.line(calls[0]),
                f"gathers the {kind} {name} {len(calls)} times along {_names(axes)}, {amount(size, 'bytes')} a call "
                "too many; constrain it to its layout without that axis before all that reads it, or make one of the "
                "products (in MaxText fused_qkv=true, fused_mlp=true)",
            )  # fmt: skip


def _find_per_microbatch(of: _Kernel) -> Iterator[Finding]:
    """Yield collectives over axes of the data in the loop, apart from those of parameters divided over them."""
    sharded = {axis for _, layout in of.weights for part in layout.spec for axis in axes_of(part)} & of.data_axes
    for call in of.in_loop:
        axes = set(call.axes(of.mesh)) & of.data_axes
        if not axes or of.gathered(call) or (sharded & axes and call.kind in ("reduce-scatter", "all-reduce")):
            continue
        yield of.find_moving(
            "per-microbatch", call,
            f"runs {_cost(call, of)} along {_names(axes)}, over which rows are divided, for each microbatch; "
            "sum on each device and reduce after the loop, or keep rows divided",
        )  # fmt: skip


def _find_float32_products(of: _Kernel) -> Iterator[Finding]:
    """Yield products of arrays that were just converted to float32 from 16 bits."""
    for name, sizes, line in _products(of.kernel.ops):
        size = sum(sizes) * of.times
        yield of.find(
            "float32-product", size, line,
            f"multiplies {name} arrays in float32 ({amount(size, 'bytes')} a call), which is several times slower; "
            "leave the operands as they are, and ask for sums with preferred_element_type=float32",
        )  # fmt: skip


def _find_synchronous(of: _Kernel) -> Iterator[Finding]:
    """Yield large collectives beside which nothing runs. CPUs have no others."""
    if of.mesh.devices.flat[0].platform == "cpu":
        return
    for call in of.collectives:
        if not call.asynchronous and call.nbytes > _WAITS:
            remedy = "smaller microbatches or fewer devices along the axis make it shorter"
            if len(call.arrays) > 1 and (threshold := _THRESHOLDS.get(call.kind)):
                remedy = f"XLA joined {len(call.arrays)} arrays; with --{threshold}={call.nbytes // 2} some hide others"
            yield of.find_moving(
                "synchronous", call,
                f"waits for {_cost(call, of)} along {_names(call.axes(of.mesh))}: XLA found nothing to run beside it; "
                f"{remedy}",
            )  # fmt: skip


def _find_whole_results(of: _Kernel) -> Iterator[Finding]:
    """Yield results of the loop that each of several devices holds whole."""
    if of.mesh.size == 1 or of.times == 1:
        return
    for value, slot in zip(of.kernel.outs, of.run.outs[len(of.kernel.sums) :], strict=False):
        shape, layout = of.plan.slots[slot].shape, of.plan.layouts[slot]
        if len(shape) > 1 and np.issubdtype(of.plan.slots[slot].dtype, np.inexact) and layout.is_fully_replicated:
            maker = next((op for op in of.kernel.ops if value in op.outs), None)
            size = of.plan.slots[slot].nbytes * of.times
            yield of.find(
                "replicated", size, _compat.user_line(maker.source) if maker else "",
                f"makes {value.aval.dtype}[{','.join(map(str, shape))}] whole on each of {of.mesh.size} devices "
                f"({amount(size, 'bytes')} a call); constrain it, as to PartitionSpec({of.mesh.axis_names[0]!r})",
            )  # fmt: skip


def _find_all_to_alls(of: _Kernel) -> Iterator[Finding]:
    """Yield all-to-alls that no operation of the user is: the partitioner changes a layout."""
    for call in of.collectives:
        if call.kind == "all-to-all" and "all_to_all" not in call.operation and "ragged" not in call.operation:
            yield of.find_moving(
                "all-to-all", call,
                f"changes a layout along {_names(call.axes(of.mesh))} by {_cost(call, of)}; a "
                "with_sharding_constraint of the operand that has the layout of the result saves it",
            )  # fmt: skip


def _cost(collective: Collective, of: _Kernel) -> str:
    return f"{collective} ({amount(of.bytes_of(collective), 'bytes')} a call)"


def _names(axes: Iterable[str]) -> str:
    return ", ".join(sorted(repr(axis) for axis in axes))


def _products(ops: Iterable[ir.Op]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield products whose operands were converted from 16 bits: dtype, bytes of the operands, the user's line."""
    narrow: dict[Any, tuple[str, int]] = {}
    for op in ops:
        if op.prim.name == "convert_element_type" and isinstance(op.ins[0], ir.Value):
            source = op.ins[0].aval
            if str(source.dtype) in ("bfloat16", "float16") and str(op.outs[0].aval.dtype) == "float32":
                narrow[op.outs[0]] = str(source.dtype), op.ins[0].nbytes
        elif op.prim.name in ("reshape", "transpose", "sharding_constraint", "multimesh_leave") and op.ins[0] in narrow:
            narrow[op.outs[0]] = narrow[op.ins[0]]
        elif op.prim.name == "dot_general" and all(operand in narrow for operand in op.ins):
            operands = [narrow[operand] for operand in op.ins]
            yield operands[0][0], tuple(size for _, size in operands), _compat.user_line(op.source)
