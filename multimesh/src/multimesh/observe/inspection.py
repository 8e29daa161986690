"""Kernels that do, once compiled, what their author surely did not want: one function for each such fault."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from multimesh import ir
from multimesh.core import _compat
from multimesh.core.specs import axes_of
from multimesh.core.text import amount
from multimesh.observe.hlo import THRESHOLDS, Collective, count_bytes
from multimesh.plan.instructions import Kernel, Run
from multimesh.plan.plan import Plan

_WAITS = 10_000_000  # bytes of a collective that nothing hides


@dataclass(frozen=True)
class Finding:
    """A fault of a compiled kernel.

    Attributes
    ----------
    rule
        The name of the rule: one of those of `multimesh.calling.aot.Compiled.inspect`.
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


@dataclass(frozen=True)
class _Kernel:
    """A kernel with the collectives of its program, and how often a call runs it."""

    plan: Plan
    kernel: Kernel
    run: Run
    collectives: Sequence[Collective]
    times: int

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
            spec = [set(axes_of(part)) for part in (*layout.spec, *[None] * (len(full) - len(layout.spec)))]
            ways = [math.prod(layout.mesh.shape[axis] for axis in part - axes) for part in spec]
            shard = [size // n for size, n in zip(full, ways, strict=True)]
            if axes & set().union(*spec) and sorted(shape) in (sorted(full), sorted(shard)):
                return axes
        return None

    def line(self, collective: Collective) -> str:
        """Return the user's line of a collective, or else of the kernel's last operation."""
        return collective.line or (_compat.user_line(self.kernel.ops[-1].source) if self.kernel.ops else "")

    @property
    def in_loop(self) -> Sequence[Collective]:
        """Collectives that run for each microbatch."""
        return self.collectives if self.times > 1 else ()


_Fault = dict[str, Any]
"""Fields of the text of a rule: a collective as ``call``, or bytes on a device in a call and the user's line."""


def _find_gathered_weights(of: _Kernel) -> Iterator[_Fault]:
    """Yield parameters that each microbatch gathers along an axis that divides no rows, and so not for FSDP."""
    for call in of.in_loop:
        axes = of.gathered(call)
        if axes and not axes & of.data_axes:
            yield {"call": call}


def _find_gathered_again(of: _Kernel) -> Iterator[_Fault]:
    """Yield arrays that a kernel gathers several times along the same axes: once for each operation that reads them."""
    gathers: dict[tuple[str, Any, tuple[str, ...]], list[Collective]] = {}
    for call in of.collectives:
        for source, array in zip(call.sources, call.arrays, strict=False) if call.kind == "all-gather" else ():
            gathers.setdefault((source, array, call.axes(of.mesh)), []).append(call)
    for (_, array, axes), (first, *others) in gathers.items():
        name = f"{array[0]}[{','.join(map(str, array[1]))}]"
        kind = "parameter" if of.gathered(replace(first, arrays=(array,))) else "value"
        size = len(others) * count_bytes(name) * first.times * of.times
        if others:
            times = len(others) + 1
            yield {"nbytes": size, "line": of.line(first), "axes": axes, "kind": kind, "name": name, "times": times}


def _find_per_microbatch(of: _Kernel) -> Iterator[_Fault]:
    """Yield collectives over axes of the data in the loop, apart from those of parameters divided over them."""
    sharded = {axis for _, layout in of.weights for part in layout.spec for axis in axes_of(part)} & of.data_axes
    for call in of.in_loop:
        axes = set(call.axes(of.mesh)) & of.data_axes
        if axes and not of.gathered(call) and not (sharded & axes and call.kind in ("reduce-scatter", "all-reduce")):
            yield {"call": call, "axes": axes}


def _find_float32_products(of: _Kernel) -> Iterator[_Fault]:
    """Yield products of arrays that were just converted to float32 from 16 bits."""
    narrow: dict[Any, tuple[str, int]] = {}
    for op in of.kernel.ops:
        if op.prim.name == "convert_element_type" and isinstance(op.ins[0], ir.Value):
            source = op.ins[0].aval
            if str(source.dtype) in ("bfloat16", "float16") and str(op.outs[0].aval.dtype) == "float32":
                narrow[op.outs[0]] = str(source.dtype), op.ins[0].nbytes
        elif op.prim.name in ("reshape", "transpose", "sharding_constraint", "multimesh_leave") and op.ins[0] in narrow:
            narrow[op.outs[0]] = narrow[op.ins[0]]
        elif op.prim.name == "dot_general" and all(operand in narrow for operand in op.ins):
            size = sum(narrow[operand][1] for operand in op.ins) * of.times
            yield {"nbytes": size, "line": _compat.user_line(op.source), "name": narrow[op.ins[0]][0]}


def _find_synchronous(of: _Kernel) -> Iterator[_Fault]:
    """Yield large collectives beside which nothing runs. CPUs have no others."""
    on_cpu = of.mesh.devices.flat[0].platform == "cpu"
    for call in () if on_cpu else of.collectives:
        if not call.asynchronous and call.nbytes > _WAITS:
            remedy = "smaller microbatches or fewer devices along the axis make it shorter"
            if len(call.arrays) > 1 and (threshold := THRESHOLDS.get(call.kind)):
                remedy = f"XLA joined {len(call.arrays)} arrays; with --{threshold}={call.nbytes // 2} some hide others"
            yield {"call": call, "remedy": remedy}


def _find_whole_results(of: _Kernel) -> Iterator[_Fault]:
    """Yield results of the loop that each of several devices holds whole."""
    results = zip(of.kernel.outs, of.run.outs[len(of.kernel.sums) :], strict=False)
    for value, number in results if of.mesh.size > 1 and of.times > 1 else ():
        slot, layout = of.plan.slots[number], of.plan.layouts[number]
        if len(slot.shape) > 1 and np.issubdtype(slot.dtype, np.inexact) and layout.is_fully_replicated:
            maker = next((op for op in of.kernel.ops if value in op.outs), None)
            line = _compat.user_line(maker.source) if maker else ""
            name = f"{value.aval.dtype}[{','.join(map(str, slot.shape))}]"
            yield {"nbytes": slot.nbytes * of.times, "line": line, "name": name, "mesh": of.mesh}


def _find_all_to_alls(of: _Kernel) -> Iterator[_Fault]:
    """Yield all-to-alls that no operation of the user is: the partitioner changes a layout."""
    for call in of.collectives:
        if call.kind == "all-to-all" and "all_to_all" not in call.operation and "ragged" not in call.operation:
            yield {"call": call}


_RULES: Mapping[str, tuple[Callable[[_Kernel], Iterator[_Fault]], str]] = {
    "gathered-weights": (
        _find_gathered_weights,
        "gathers a parameter along {axes} for each microbatch: {cost}; constrain operand or result so that features, "
        "not tokens, are divided along that axis",
    ),
    "gathered-again": (
        _find_gathered_again,
        "gathers the {kind} {name} {times} times along {axes}, {size} a call too many; constrain it to its layout "
        "without that axis before all that reads it, or make one of the products (in MaxText fused_qkv=true, "
        "fused_mlp=true)",
    ),
    "per-microbatch": (
        _find_per_microbatch,
        "runs {cost} along {axes}, over which rows are divided, for each microbatch; sum on each device and reduce "
        "after the loop, or keep rows divided",
    ),
    "float32-product": (
        _find_float32_products,
        "multiplies {name} arrays in float32 ({size} a call), which is several times slower; leave the operands as "
        "they are, and ask for sums with preferred_element_type=float32",
    ),
    "synchronous": (
        _find_synchronous,
        "waits for {cost} along {axes}: XLA found nothing to run beside it; {remedy}",
    ),
    "replicated": (
        _find_whole_results,
        "makes {name} whole on each of {mesh.size} devices ({size} a call); constrain it, as to "
        "PartitionSpec({mesh.axis_names[0]!r})",
    ),
    "all-to-all": (
        _find_all_to_alls,
        "changes a layout along {axes} by {cost}; a with_sharding_constraint of the operand that has the layout of the "
        "result saves it",
    ),
}
"""What each rule finds in a kernel, and the fault and its remedy in words."""


def inspect(plan: Plan, programs: Sequence[Sequence[Collective]], least: int) -> tuple[Finding, ...]:
    """Return the faults of the kernels of a plan that concern ``least`` bytes on a device or more, the largest first.

    ``programs``: the collectives of each kernel, in the order of ``plan.kernels``.
    """
    times = collections.Counter(run.kernel for run in plan.runs)
    most: dict[tuple[str, str, str], Finding] = {}
    for number, run in plan.first_runs.items():
        of = _Kernel(plan, plan.kernels[number], run, programs[number], times[number])
        for rule, (find, words) in _RULES.items():
            for fault in find(of):
                finding = Finding(rule, number, *_describe(fault, of, words))
                key = rule, finding.line, finding.text
                if finding.nbytes >= least and (key not in most or finding.nbytes > most[key].nbytes):
                    most[key] = finding
    return tuple(sorted(most.values(), key=lambda one: -one.nbytes))


def _describe(fault: _Fault, of: _Kernel, words: str) -> tuple[int, str, str]:
    """Return the bytes of a fault in a call, the user's line, and the text."""
    if call := fault.get("call"):
        nbytes = call.nbytes * call.times * of.times
        fault = {"axes": call.axes(of.mesh), "nbytes": nbytes, "line": of.line(call)} | fault
    size = amount(fault["nbytes"], "bytes")
    axes = ", ".join(sorted(map(repr, fault.get("axes", ()))))
    text = words.format(**fault | {"axes": axes, "size": size, "cost": f"{call} ({size} a call)"})
    return fault["nbytes"], fault["line"], f"{of.kernel.name!r}: {text}"
