"""Layouts of arguments: where each argument lives, and which calls fit a compiled function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from multimesh.arguments import Signature, stripped
from multimesh.plan import Plan


def input_shardings(plan: Plan, count: int) -> tuple[NamedSharding | None, ...]:
    """Where each of ``count`` argument leaves lives, and its layout there; None for one that no operation reads.

    Of several submeshes that read it: the one that makes the result which replaces it, else the first.
    """
    made_on = {
        plan.like[slot]: plan.slots[slot].submesh for kind, slot in plan.outputs if kind == "slot" and slot in plan.like
    }
    homes: dict[int, int] = {}
    for arg, slot in plan.inputs:
        if arg not in homes or plan.slots[slot].submesh == made_on.get((arg,)):
            homes[arg] = slot
    return tuple(plan.layouts[homes[arg]] if arg in homes else None for arg in range(count))


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
