"""Tiny programs and their dumps, with values renumbered in the order in which they appear."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from multimesh.marking.contexts import Options
from multimesh.marking.tracing import partitioning
from multimesh.passes.cutting.parts import Parts
from multimesh.passes.pipeline import PASSES, PassInputs
from multimesh.passes.placing.place_operations import place_operations
from multimesh.passes.reading.fuse_loops import fuse_loops
from multimesh.passes.reading.inline_calls import inline_calls
from multimesh.passes.reading.separate_sums import separate_sums

import multimesh as mm
from multimesh import ir

MESHES = tuple(Mesh(np.array([d]), ("data",)) for d in jax.devices()[:3])


def on(mesh: int, fn: Callable[..., Any], name: str | None = None) -> Callable[..., Any]:
    """``fn`` as a task on one device; named a, b, c after the submesh unless told."""
    return mm.task(fn, name or "abc"[mesh], mesh=MESHES[mesh])


def ones(*shape: int) -> jax.ShapeDtypeStruct:
    """The type of an argument; nothing is computed here."""
    return jax.ShapeDtypeStruct(shape, np.float32)


def jaxpr(fn: Callable[..., Any], *args: Any) -> Any:
    """Trace as `multimesh.jit` does."""
    with partitioning():
        return jax.make_jaxpr(fn)(*args)


def inlined(fn: Callable[..., Any], *args: Any) -> ir.Program:
    """Trace and inline."""
    return inline_calls(jaxpr(fn, *args), tuple(jax.devices()))


def separated(fn: Callable[..., Any], *args: Any) -> ir.Program:
    """All passes before placement."""
    return separate_sums(fuse_loops(inlined(fn, *args)))


def place_program(fn: Callable[..., Any], *args: Any) -> ir.Program:
    """All passes up to placement."""
    return place_operations(separated(fn, *args))


def pipelined(program: ir.Program, upto: str = "check_states", **options: bool) -> Parts:
    """The passes of a placed program, but those for layouts, up to one of those that cut it and order its loops."""
    traced = PassInputs(None, (), Options(**options), None, (), frozenset(), {}, {})
    parts: Any = program
    names = [*PASSES]
    for name in ("note_routes", *names[names.index("cut_repeats") : names.index(upto) + 1]):
        parts = PASSES[name](parts, traced)
    return parts


def loops(program: ir.Program) -> list[ir.Loop]:
    """Loops of a program."""
    return [item for item in program.items if isinstance(item, ir.Loop)]


def names(ops: Any) -> list[str]:
    """Names of primitives."""
    return [op.prim.name for op in ops]


def text(*dumped: Any) -> str:
    """Dumps with their values renumbered, and names that hold a global counter without it."""
    listing = "\n".join(map(str, dumped))
    numbers: dict[str, str] = {}
    listing = re.sub(r"%\d+", lambda m: numbers.setdefault(m[0], f"%{len(numbers)}"), listing)
    return "\n".join(line.rstrip() for line in listing.splitlines())
