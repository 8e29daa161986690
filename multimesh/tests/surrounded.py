"""Programs of `generated` with other forms of tasks, layouts, transformations around the jit, and meshes in force.

``surrounded(seed)`` draws how the program of a seed is written and called; ``check`` compares it with plain JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import generated
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import plain
from pipelines import microbatched

import multimesh as mm

AROUND = ("jit", "vmap in jit", "vmap", "grad")
AMBIENT = ("none", "none", "all", "all explicit", "submesh", "submesh explicit")


@dataclasses.dataclass(frozen=True)
class Surrounded:
    """A program, and what is around it."""

    program: generated.Program
    form: str  # wrapper or block
    transform: str
    ambient: str
    laid_out: bool  # rows over the devices of the first submesh

    def mesh(self) -> Mesh | None:
        """Return the mesh of the ``jax.set_mesh`` around the call."""
        if self.ambient == "none":
            return None
        kind = AxisType.Explicit if "explicit" in self.ambient else AxisType.Auto
        devices = np.array(jax.devices()) if "all" in self.ambient else self.program.meshes()[0].devices
        return Mesh(devices, ("data",), axis_types=(kind,))


def surrounded(seed: int) -> Surrounded:
    """Draw what is around the program of a seed; blocks have gradients inside where the dtype is smooth."""
    rng = np.random.default_rng(seed + 10**7)
    program = generated.program(seed)
    form = ("wrapper", "block")[int(rng.integers(2))]
    transform = AROUND[int(rng.integers(len(AROUND) if program.gradient == "outside" else len(AROUND) - 1))]
    ambient = AMBIENT[int(rng.integers(len(AMBIENT)))]
    program = dataclasses.replace(program, inner=program.inner or (form == "block" and program.dtype == "float32"))
    moved = transform != "jit"
    if form == "block" and (moved or program.gradient != "none"):  # JAX can't bring meshes of different sizes together
        ambient = "none" if moved else ambient.replace("all", "submesh", 1)
        program = dataclasses.replace(
            program, submeshes=(1 if moved else program.submeshes[0],) * len(program.submeshes)
        )
    if transform == "grad":  # what stands outside of the jit runs eagerly, on the default device
        program = dataclasses.replace(program, extra_task="none", start="argument")
    return Surrounded(program, form, transform, ambient, bool(rng.random() < 0.5))


def check(case: Surrounded) -> None:
    """Run a program both ways, and compare values; in tasks that are calls, places too."""
    program, meshes = case.program, case.program.meshes()
    weights, x, *others = generated.data(program)
    members = case.transform.startswith("vmap")
    x = np.stack([x, x[::-1]]) if members else x

    def place(stage: int, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        mesh = meshes[-1 if name == "apart" else program.submesh(stage)]
        if case.form == "wrapper":
            return mm.task(fn, name=name, mesh=mesh)

        def block(*args: Any) -> Any:
            with mm.task(mesh=mesh, name=name):
                return fn(*args)

        return block

    def over_members(fn: Any) -> Any:
        return jax.vmap(fn, in_axes=(None, 0, None, None, None)) if members else fn

    run = {
        "jit": lambda: mm.jit(generated.step(program, place, mm.microbatch)),
        "vmap in jit": lambda: mm.jit(over_members(generated.step(program, place, mm.microbatch))),
        "vmap": lambda: over_members(mm.jit(generated.step(program, place, mm.microbatch))),
        "grad": lambda: generated.step(program, place, mm.microbatch, mm.jit),
    }[case.transform]()
    layout = NamedSharding(meshes[0], P(None, "data") if members else P("data"))
    rows = jax.device_put(x, layout) if case.laid_out else x
    mesh = case.mesh()
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        actual = run(weights, rows, *others)
    expected = jax.jit(over_members(generated.step(program, plain, microbatched)))
    args = (weights, x, *others)
    generated.assert_as_plain(program, actual, expected(*args), lambda: expected(*generated.double(args)))
    if case.form == "wrapper":
        generated.places(program, actual)
