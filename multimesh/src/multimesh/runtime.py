"""Runs a compiled plan: one pass over a flat list of steps, no decisions left to make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from multimesh import _compat
from multimesh.compiling import CompiledPlan


class Runner:
    """Executes a compiled plan in one process.

    All state of a call is local to it: threads may share a runner, and an exception in the middle leaves nothing
    behind but donated arguments that were already consumed.
    """

    def __init__(self, compiled: CompiledPlan):
        self.compiled = compiled
        plan = compiled.plan
        self._inputs = tuple((arg, slot, compiled.layouts[slot]) for arg, slot in plan.inputs)
        placed = jax.device_put([a for a, _ in plan.constants], [compiled.layouts[s] for _, s in plan.constants])
        self._blank: list[Any] = [None] * len(plan.slots)
        for (_, slot), array in zip(plan.constants, placed, strict=True):
            self._blank[slot] = array
        self.steps = tuple(_steps(compiled))

    @property
    def constants(self) -> dict[int, Any]:
        """Slots that hold the same array in every call."""
        return {slot: array for slot, array in enumerate(self._blank) if array is not None}

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Run on flat arguments; returns flat results."""
        env = self._staged(args)
        with _compat.explicit_transfers():
            for call, ins, outs, frees in self.steps:
                results = call(*[env[i] for i in ins])
                for slot, array in zip(outs, results):  # noqa: B905 - the lengths were fixed when the plan was made
                    env[slot] = array
                del results
                for slot in frees:
                    env[slot] = None
        return [_result(kind, value, env, args) for kind, value in self.compiled.plan.outputs]

    def _staged(self, args: Sequence[Any]) -> list[Any]:
        env = list(self._blank)
        moved: list[Any] = []
        where: list[tuple[int, Any]] = []
        for arg, slot, layout in self._inputs:
            x = args[arg]
            sharding = getattr(x, "sharding", None)
            if sharding is layout or sharding == layout:
                env[slot] = x
            else:
                moved.append(x)
                where.append((slot, layout))
        if moved:
            for (slot, _), array in zip(where, jax.device_put(moved, [layout for _, layout in where]), strict=True):
                env[slot] = array
        return env


def _result(kind: str, value: Any, env: Sequence[Any], args: Sequence[Any]) -> Any:
    if kind == "slot":
        return env[value]
    return jnp.asarray(args[value] if kind == "arg" else value)


_Step = tuple[Callable[..., Sequence[Any]], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _steps(compiled: CompiledPlan) -> list[_Step]:
    """(call, inputs, outputs, frees) of programs and transfers in order; transfers between two programs are one call.

    Within a process a SEND does all of a transfer.
    """
    plan = compiled.plan
    made: dict[int, Any] = {}  # slot to the sharding that its program gives it
    steps: list[list[Any]] = []
    for step in plan.instructions:
        if step.kind == "RUN" and step.kernel is not None:
            program = compiled.programs[step.kernel]
            made.update(zip(step.outs, program.output_shardings, strict=True))
            steps.append([program, step.ins, step.outs, ()])
        elif step.kind == "SEND":
            transfer = plan.transfers[step.transfer or 0]
            if not steps or steps[-1][0] is not None:
                steps.append([None, (), (), ()])
            steps[-1][1] += transfer.ins
            steps[-1][2] += transfer.outs
        elif step.kind == "FREE":
            steps[-1][3] += step.ins
    return [(call or _transfer(compiled, made, ins, outs), ins, outs, frees) for call, ins, outs, frees in steps]


def _transfer(
    compiled: CompiledPlan, made: dict[int, Any], ins: Sequence[int], outs: Sequence[int]
) -> Callable[..., Sequence[Any]]:
    layouts = [compiled.layouts[slot] for slot in outs]
    return _compat.transfer([made[slot] for slot in ins], layouts, [compiled.plan.slots[slot] for slot in ins])
