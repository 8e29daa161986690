"""Scanned layers: one stack per piece of a stage, where MaxText alone has one stack of all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

import multimesh
from multimesh_maxtext.stages import Stages

Stack = tuple[str, int, Any]
"""Name of a stack, number of its layers, and where they get their random numbers from."""


@dataclass(frozen=True)
class Share:
    """Random number generators of some of the layers: those that they have in one stack of all layers."""

    every: nnx.Rngs
    layers: range

    def fork(self, *, split: int) -> nnx.Rngs:
        """Give each of the ``split`` layers of this share its own, stacked."""
        graph, state = nnx.split(self.every)
        return nnx.merge(graph, jax.tree.map(lambda x: x[self.layers.start : self.layers.start + split], state))


def list_stacks(pieces: Sequence[range], rngs: nnx.Rngs | None) -> list[Stack]:
    """Name the stack of each piece by its first and last layer, so that `Stages.of_path` knows its stage.

    The layers get the random numbers, and so the parameters, of one stack of all layers.
    """
    every = rngs.fork(split=pieces[-1].stop) if rngs else None
    return [(f"layers_{p.start}_{p.stop - 1}", len(p), Share(every, p) if every else None) for p in pieces]


def apply_stack(stages: Stages, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make MaxText's scan over a stack a task on the submesh of its stage."""

    def scan(stack: nnx.Module, y: Any, *args: Any) -> tuple[Any, nnx.Module, None]:
        graph, params, rest = nnx.split(stack, nnx.Param, ...)

        def pure(params: Any, rest: Any, y: Any, *args: Any) -> tuple[Any, Any]:
            y, scanned, _ = fn(nnx.merge(graph, params, rest), y, *args)
            return y, nnx.state(scanned, nnx.Not(nnx.Param))

        y, rest = multimesh.task(pure, name, mesh=stages.of_layer(int(name.split("_")[1])))(params, rest, y, *args)
        nnx.update(stack, rest)
        return y, stack, None

    return scan
