"""Layouts of arguments: which are derived, where each argument lives, and which calls fit a compiled function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from multimesh import ir
from multimesh.arguments import Signature, stripped
from multimesh.passes.autoshard import autoshard
from multimesh.plan import Plan

Derived = Mapping[tuple[int, int], PartitionSpec]  # (argument leaf, submesh) to its spec there


def derive(plan: Plan, program: ir.Program, specs: Sequence[PartitionSpec | None]) -> Derived:
    """Specs of the argument leaves that have none, from the constraints of the placed program."""
    if None not in specs:
        return {}
    found = autoshard(program)
    derived: dict[tuple[int, int], PartitionSpec] = {}
    for arg, slot in plan.inputs:
        submesh = plan.slots[slot].submesh
        spec = found.get((program.inputs[arg], plan.submeshes[submesh]))
        if specs[arg] is None and spec is not None:
            derived[arg, submesh] = spec
    return derived


def input_shardings(plan: Plan, specs: Sequence[PartitionSpec], derived: Derived) -> tuple[NamedSharding | None, ...]:
    """Where each argument leaf lives, and its layout there; None for one that no operation reads.

    Of several submeshes that read it: the one that makes the result which replaces it, else the first.
    """
    made_on = {
        plan.like[slot]: plan.slots[slot].submesh for kind, slot in plan.outputs if kind == "slot" and slot in plan.like
    }
    homes: dict[int, int] = {}
    for arg, slot in plan.inputs:
        if arg not in homes or plan.slots[slot].submesh == made_on.get((arg,)):
            homes[arg] = slot
    return tuple(_sharding(plan, spec, derived, arg, homes.get(arg)) for arg, spec in enumerate(specs))


def _sharding(plan: Plan, spec: PartitionSpec, derived: Derived, arg: int, slot: int | None) -> NamedSharding | None:
    if slot is None:
        return None
    return plan.layout(slot, derived.get((arg, plan.slots[slot].submesh), spec))


def matching(signature: Signature, known: Mapping[Signature, Any]) -> Any | None:
    """What was compiled for a like signature: the arguments now have the layouts that were derived for them then."""
    for other, compiled in known.items():
        lowered = getattr(compiled, "lowered", None)
        if lowered is not None and replace(other, specs=signature.specs) == signature:
            shardings = lowered.input_shardings
            if all(map(_agree, signature.specs, other.specs, shardings)):
                return compiled
    return None


def _agree(now: PartitionSpec | None, then: PartitionSpec | None, sharding: NamedSharding | None) -> bool:
    return now == then or (then is None and sharding is not None and now == stripped(sharding.spec))
