"""The work of a training step: what each equation costs in a forward pass and in the backward passes that are needed.

Nothing is counted for a gradient that nobody asks for: of frozen arguments, behind `jax.lax.stop_gradient`, of results
that no loss depends on. Under `jax.checkpoint` the forward pass is counted again, without what its policy saves.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from multimesh.core import _compat
from multimesh.ir.flops import operations
from multimesh.stages.stage_cuts import Work

PRODUCTS = frozenset(("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"))
_OPAQUE = frozenset(("pallas_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "ffi_call"))
_BACKWARD = 2  # operations of a backward pass that we can't read, for each of its forward pass
_STOPS = "stop_gradient"


@dataclass(frozen=True)
class Gradients:
    """The values of a function that have a gradient in a training step."""

    active: Set[Any]  # trained arguments, and what is computed from them
    needed: Set[Any]  # those of them whose cotangent a backward pass computes

    def of(self, ins: Iterable[Any], outs: Iterable[Any]) -> list[Any]:
        """Return the operands of an equation whose cotangents its backward pass computes."""
        if not any(v in self.needed for v in outs):
            return []
        return [v for v in ins if not isinstance(v, _compat.Literal) and v in self.needed]


def find_gradients(eqns: Sequence[Any], trained: Iterable[Any], outs: Iterable[Any]) -> Gradients:
    """Return which values have a gradient, by the ``trained`` arguments and the ``outs`` that have a cotangent."""
    active = {v for v in trained if _is_differentiable(v)}
    for eqn in eqns:
        if eqn.primitive.name != _STOPS and any(is_in(a, active) for a in eqn.invars):
            active.update(filter(_is_differentiable, eqn.outvars))
    needed = {v for v in outs if is_in(v, active)}
    for eqn in reversed(eqns):
        if eqn.primitive.name != _STOPS and any(v in needed for v in eqn.outvars):
            needed.update(a for a in eqn.invars if is_in(a, active))
    return Gradients(active, needed)


def count_work(eqn: Any, gradients: Gradients, weights: Set[Any], *, again: bool = False) -> Work:
    """Return the work of an equation in a training step; under `jax.checkpoint` it is computed ``again``.

    A product's gradient for one of the ``weights``, arguments and what is cheaply computed of them, is W and not B.
    """
    forward = operations(eqn.primitive.name, eqn.params, eqn.invars, eqn.outvars)
    cotangents = gradients.of(eqn.invars, eqn.outvars)
    if not cotangents:
        return Work(forward)
    name = eqn.primitive.name
    inner = [_count_inside(eqn, jaxpr, gradients, weights) for jaxpr in _compat.subjaxprs(eqn.params)]
    counted = [work for work in inner if work is not None]
    if name in PRODUCTS:
        late = sum(v in weights for v in cotangents)
        back = Work(0.0, forward * (len(cotangents) - late), forward * late)
    elif name in _OPAQUE or len(counted) < len(inner):
        back = Work(0.0, _BACKWARD * forward)
    elif not inner:
        back = Work(0.0, forward)
    else:
        back = max(counted, key=sum) if name == "cond" else add_work(counted)
    return Work(forward, back.backward + (forward if again else 0.0), back.weights)


def find_residuals(eqns: Sequence[Any], policy: Any) -> frozenset[int]:
    """Return the numbers of the equations that a policy of `jax.checkpoint` saves, or whose only readers it saves."""
    readers: dict[Any, list[int]] = collections.defaultdict(list)
    for i, eqn in enumerate(eqns):
        for v in eqn.invars:
            if not isinstance(v, _compat.Literal):
                readers[v].append(i)
    saved: set[int] = set()
    for i, eqn in reversed([*enumerate(eqns)] if policy is not None else []):
        users = [r for v in eqn.outvars for r in readers[v]]
        named = users and saved.issuperset(users) and all(eqns[r].primitive.name == "name" for r in users)
        if named or _is_saved(policy, eqn):
            saved.add(i)
    return frozenset(saved)


def _is_saved(policy: Any, eqn: Any) -> bool:
    verdict = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return verdict is True or (not isinstance(verdict, bool) and type(verdict).__name__ != "RecomputeType")


def _count_inside(eqn: Any, jaxpr: Any, gradients: Gradients, weights: Set[Any]) -> Work | None:
    """Return the work of a program of an equation; None if nobody knows which operand is which of its arguments."""
    ins = eqn.invars[len(eqn.invars) - len(jaxpr.invars) :]
    if len(ins) != len(jaxpr.invars):
        return None
    names: Mapping[Any, Any] = dict(zip(jaxpr.invars, ins, strict=True))
    trained = {v for v, a in names.items() if is_in(a, gradients.active)}
    late = {v for v, a in names.items() if is_in(a, weights)}
    outs, times = list(jaxpr.outvars), 1
    if len(outs) == len(eqn.outvars):
        outs = [v for v, of in zip(outs, eqn.outvars, strict=True) if of in gradients.needed]
    if eqn.primitive.name == "scan":
        times = eqn.params["length"]
        consts, carries = _compat.scan_counts(eqn.params)
        carried = jaxpr.invars[consts : consts + carries]
        late.difference_update(carried)
        trained.update(v for v, of in zip(carried, eqn.outvars, strict=False) if of in gradients.active)
        outs += [v for v, of in zip(jaxpr.outvars[:carries], carried, strict=True) if of in trained]
    inside = find_gradients(jaxpr.eqns, trained, (v for v in outs if not isinstance(v, _compat.Literal)))
    again = eqn.primitive is _compat.remat_p
    saved = find_residuals(jaxpr.eqns, eqn.params["policy"]) if again else frozenset()
    works = (count_work(e, inside, late, again=again and i not in saved) for i, e in enumerate(jaxpr.eqns))
    return scale_work(add_work(works), times)


def add_work(many: Iterable[Work]) -> Work:
    """Return the sum of the work of several equations."""
    return Work(*map(sum, zip(Work(0.0), *many, strict=True)))


def scale_work(work: Work, times: float) -> Work:
    """Return the work of several runs."""
    return Work(*(times * part for part in work))


def is_in(atom: Any, values: Set[Any]) -> bool:
    """Return whether an atom of an equation is one of these values."""
    return not isinstance(atom, _compat.Literal) and atom in values


def _is_differentiable(value: Any) -> bool:
    return getattr(value.aval.dtype, "kind", "V") in "fcV"
