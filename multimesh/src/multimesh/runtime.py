"""Runs a compiled plan: one pass over a flat list of steps, no decisions left to make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

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

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Run on flat arguments; returns flat results."""
        env = self._staged(args)
        for program, ins, outs, frees in self.steps:
            if program is None:
                sources, layouts = ins
                results = jax.device_put([env[i] for i in sources], layouts)
            else:
                results = program(*[env[i] for i in ins])
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


def _steps(compiled: CompiledPlan) -> list[tuple[Any, Any, tuple[int, ...], tuple[int, ...]]]:
    """(program, inputs, outputs, frees); transfers have no program, and adjacent ones are one ``device_put``."""
    steps: list[list[Any]] = []
    for step in compiled.plan.instructions:
        if step.kind == "RUN" and step.kernel is not None:
            steps.append([compiled.programs[step.kernel], step.ins, step.outs, ()])
        elif step.kind == "SEND":
            if steps and steps[-1][0] is None and not steps[-1][3]:
                steps[-1][1][0] += step.ins
            else:
                steps.append([None, [step.ins, ()], (), ()])
        elif step.kind == "RECV":
            steps[-1][1][1] += tuple(compiled.layouts[s] for s in step.outs)
            steps[-1][2] += step.outs
        else:
            steps[-1][3] += step.ins
    return [
        (program, (ins[0], list(ins[1])) if program is None else ins, outs, frees)
        for program, ins, outs, frees in steps
    ]
