"""The memory that a plan will need on the devices of each submesh, from shapes alone."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from multimesh import _compat, ir
from multimesh.plan import Plan
from multimesh_maxtext.layouts import Axes, evaluate, given, nested, slot_axes, ways
from multimesh_maxtext.memory import Need

_ARRAYS = frozenset(
    {
        *("dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "sort", "cumsum", "top_k"),
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "dynamic_update_slice"),
        *("concatenate", "pad", "random_bits", "scan", "while", "cond", "transpose"),
    }
)
"""Operations whose results are arrays of their own; others are made where they are used if that is in one place."""

_SAME = frozenset({"sharding_constraint", "name", "optimization_barrier", "reshape", "squeeze", "copy", "copy_p"})
"""Operations whose results are their operands, one by one."""

_CHEAP = frozenset(
    {"broadcast_in_dim", "iota", "convert_element_type", "eq", "lt", "le", "gt", "ge", "and", "or", "not"}
)
"""Operations that are made again wherever they are used."""


def needs(plan: Plan, specs: Sequence[PartitionSpec], state: Any) -> list[Need]:
    """Return what each submesh needs.

    Parameters
    ----------
    plan
        Of the train step.
    specs
        Of each argument leaf.
    state
        The train state, arrays or their types, each leaf with its sharding: the first argument of the step.
    """
    slots, kernels = slot_axes(plan, specs)
    sizes = {slot: _bytes(plan, slot, slots.get(slot)) for slot in range(len(plan.slots))}
    work = {k: _workspace(plan, k, known) for k, known in kernels.items()}
    parameters, optimizer = _held(plan, state, ("model",)), _held(plan, state, ("optimizer",))
    static = {slot for _, slot in (*plan.inputs, *plan.constants)}
    result = []
    for submesh, (gradients, activations, workspace) in enumerate(_peaks(plan, sizes, work, static)):
        inputs = sum(sizes[slot] for slot in static if plan.slots[slot].submesh == submesh)
        batch = max(0, inputs - parameters[submesh] - optimizer[submesh])
        result.append(Need(parameters[submesh], optimizer[submesh], batch, gradients, activations, workspace))
    return result


def _bytes(plan: Plan, slot: int, axes: Axes | None) -> int:
    return plan.slots[slot].nbytes // ways(axes or (), plan.submeshes[plan.slots[slot].submesh])


def _held(plan: Plan, state: Any, prefix: tuple[str, ...]) -> list[int]:
    """Bytes of the leaves under a name on each device of each submesh."""
    held = [0] * len(plan.submeshes)
    owner = {frozenset(mesh.devices.flat): i for i, mesh in enumerate(plan.submeshes)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        if names[: len(prefix)] == prefix:
            shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
            held[owner[frozenset(leaf.sharding.device_set)]] += (
                shard * _compat.nbytes(leaf) // max(1, math.prod(leaf.shape))
            )
    return held


def _peaks(
    plan: Plan, sizes: Mapping[int, int], work: Mapping[int, int], static: set[int]
) -> Iterable[tuple[int, int, int]]:
    """Gradients, activations and workspace on each submesh when their sum is largest."""
    sums = {
        s
        for step in plan.instructions
        if step.kernel is not None
        for s in step.ins[: len(plan.kernels[step.kernel].sums)]
    }
    live: list[dict[int, int]] = [{} for _ in plan.submeshes]
    peak = [(0, 0, 0)] * len(plan.submeshes)
    args = {slot: arg for arg, slot in plan.inputs}
    for step in plan.instructions:
        for slot in step.ins if step.kind == "FREE" else ():
            live[plan.slots[slot].submesh].pop(slot, None)
        if step.kind not in ("RUN", "RECV"):
            continue
        mine = live[step.submesh]
        reused = _reused(plan, step, args)
        mine |= {slot: 0 if slot in reused else sizes[slot] for slot in step.outs if slot not in static}
        running = work.get(step.kernel, 0) if step.kernel is not None else 0
        gradients = sum(size for slot, size in mine.items() if slot in sums)
        now = (gradients, sum(mine.values()) - gradients, running)
        peak[step.submesh] = max(peak[step.submesh], now, key=sum)
    return peak


def _reused(plan: Plan, step: Any, args: Mapping[int, int]) -> set[int]:
    """Results that take over the buffer of a donated argument."""
    if step.kernel is None:
        return set()
    donated = {args[step.ins[i]] for i in plan.donations.get(step.kernel, ()) if step.ins[i] in args}
    return {slot for slot in step.outs if plan.like.get(slot, (None,))[0] in donated}


def _workspace(plan: Plan, number: int, known: Mapping[ir.Value, Axes]) -> int:
    """Bytes of the arrays that a program makes for itself, at the moment when most of them are alive."""
    kernel = plan.kernels[number]
    mesh = plan.submeshes[kernel.submesh]
    steps = [(op.prim.name, op.params, op.ins, op.outs) for op in kernel.ops]
    # A microbatch's gradients: as products (in the peak), as they are laid out and reduced, and as they are added.
    gradients = 2 * sum(_size(v, known, mesh) for v in _reduced(plan, number))
    return gradients + _peak(
        steps, known, {*kernel.ins, *kernel.rows, *kernel.outs}, (*kernel.outs, *kernel.sums), mesh
    )


def _reduced(plan: Plan, number: int) -> list[ir.Value]:
    """Gradients that a program reduces over devices; those that wait for the end of the loop it only adds."""
    run = next(step for step in plan.instructions if step.kernel == number)
    return [v for v, slot in zip(plan.kernels[number].sums, run.outs, strict=False) if slot not in plan.over]


def _peak(
    steps: Sequence[tuple[str, Mapping[str, Any], Sequence[Any], Sequence[Any]]],
    known: Mapping[Any, Axes],
    outside: set[Any],
    wanted: Iterable[Any],
    mesh: Mesh,
) -> int:
    """Most bytes of results alive at once; a result that is fused away keeps alive what it is made of."""
    same: dict[Any, Any] = {}
    for name, _, ins, outs in steps:
        if name in _SAME:
            same |= {o: same.get(i, i) for i, o in zip(ins, outs, strict=True) if not _is_literal(i)}
    users = collections.Counter(
        same.get(v, v) for name, _, ins, _ in steps if name not in _SAME for v in {i for i in ins if not _is_literal(i)}
    )
    outside = outside | {same.get(v, v) for v in outside}
    made_of: dict[Any, tuple[Any, ...]] = {}

    def arrays(atoms: Iterable[Any]) -> Iterable[Any]:
        found = (same.get(v, v) for v in atoms if not _is_literal(v))
        return itertools.chain.from_iterable(made_of.get(v, (v,)) for v in found)

    last: dict[Any, int] = {}
    own: list[Sequence[Any]] = []
    for n, (name, _, ins, outs) in enumerate(steps):
        through = tuple(dict.fromkeys(arrays(ins)))
        last |= dict.fromkeys(through, n)
        material = name in _ARRAYS
        mine = [v for v in outs if material or v in outside or (users[v] > 1 and name not in _CHEAP | _SAME)]
        made_of |= {v: (v,) if v in mine else through for v in outs}
        own.append(mine)
    last |= dict.fromkeys(arrays(wanted), len(steps))
    live: dict[Any, int] = {}
    peak = 0
    for n, (name, params, ins, _) in enumerate(steps):
        live |= {v: _size(v, known, mesh) for v in own[n] if v not in outside and last.get(v, -1) > n}
        peak = max(peak, sum(live.values()) + _inside(name, params, ins, known, mesh))
        live = {v: size for v, size in live.items() if last[v] > n}
    return peak


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _inside(name: str, params: Mapping[str, Any], ins: Sequence[Any], known: Mapping[Any, Axes], mesh: Mesh) -> int:
    """What one iteration of a scan, or a nested program, makes for itself."""
    jaxpr = nested(name, params)
    if jaxpr is None:
        return 0
    inner = given(
        name, params, jaxpr, [known.get(v, ((),) * len(v.aval.shape)) if not _is_literal(v) else () for v in ins]
    )
    evaluate(jaxpr, inner, mesh)
    steps = [(eqn.primitive.name, eqn.params, eqn.invars, eqn.outvars) for eqn in jaxpr.eqns]
    return _peak(steps, inner, set(jaxpr.invars), jaxpr.outvars, mesh)


def _size(value: Any, known: Mapping[Any, Axes], mesh: Mesh) -> int:
    return _compat.nbytes(value.aval) // ways(known.get(value, ()), mesh)
