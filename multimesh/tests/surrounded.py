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
    around: str
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
    given = generated.program(seed)
    form = ("wrapper", "block")[int(rng.integers(2))]
    around = AROUND[int(rng.integers(len(AROUND) if given.gradient == "outside" else len(AROUND) - 1))]
    ambient = AMBIENT[int(rng.integers(len(AMBIENT)))]
    given = dataclasses.replace(given, inner=given.inner or (form == "block" and given.dtype == "float32"))
    moved = around != "jit"
    if form == "block" and (moved or given.gradient != "none"):  # JAX can't bring meshes of different sizes together
        ambient = "none" if moved else ambient.replace("all", "submesh", 1)
        given = dataclasses.replace(given, submeshes=(1 if moved else given.submeshes[0],) * len(given.submeshes))
    if around == "grad":  # what stands outside of the jit runs eagerly, on the default device
        given = dataclasses.replace(given, apart="none", start="argument")
    return Surrounded(given, form, around, ambient, bool(rng.random() < 0.5))


def check(drawn: Surrounded) -> None:
    """Run a program both ways, and compare values; in tasks that are calls, places too."""
    given, meshes = drawn.program, drawn.program.meshes()
    weights, x, *others = generated.data(given)
    members = drawn.around.startswith("vmap")
    x = np.stack([x, x[::-1]]) if members else x

    def placed(stage: int, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        mesh = meshes[-1 if name == "apart" else given.submesh(stage)]
        if drawn.form == "wrapper":
            return mm.task(fn, name=name, mesh=mesh)

        def block(*args: Any) -> Any:
            with mm.task(mesh=mesh, name=name):
                return fn(*args)

        return block

    def over_members(fn: Any) -> Any:
        return jax.vmap(fn, in_axes=(None, 0, None, None, None)) if members else fn

    run = {
        "jit": lambda: mm.jit(generated.step(given, placed, mm.microbatch)),
        "vmap in jit": lambda: mm.jit(over_members(generated.step(given, placed, mm.microbatch))),
        "vmap": lambda: over_members(mm.jit(generated.step(given, placed, mm.microbatch))),
        "grad": lambda: generated.step(given, placed, mm.microbatch, mm.jit),
    }[drawn.around]()
    layout = NamedSharding(meshes[0], P(None, "data") if members else P("data"))
    rows = jax.device_put(x, layout) if drawn.laid_out else x
    mesh = drawn.mesh()
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        got = run(weights, rows, *others)
    wanted = jax.jit(over_members(generated.step(given, plain, microbatched)))
    args = (weights, x, *others)
    generated.assert_as_plain(given, got, wanted(*args), lambda: wanted(*generated.double(args)))
    if drawn.form == "wrapper":
        generated.places(given, got)
