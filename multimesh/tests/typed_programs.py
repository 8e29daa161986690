"""Typed programs from seeds: layouts, submeshes, bodies, schedules and gradients that a pipeline may have.

``typed_program(seed)`` draws one; ``check_typed(program)`` compares it with the same code under plain ``jax.jit`` on
one mesh: values, and the layouts in the types of gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from generated import assert_near, double
from jax import lax
from jax.sharding import NamedSharding, auto_axes, reshard
from jax.sharding import PartitionSpec as P
from models import plain
from multimesh.marking.result_reductions import is_float0
from pipelines import Split
from typed_models import ROWS, SIZE, WIDTH, batch, block, decoder, init, looped, owners, place, typed_meshes

import multimesh as mm

SHAPES = ((2, 2), (4, 1), (1, 4), (2, 1), (1, 2), (1, 1))
ROWS_SPEC = P("data", None)


def _scan(w: Any, x: Any) -> Any:
    def one(x: Any, scale: Any) -> Any:
        return block(jax.tree.map(lambda a: scale * a, w), x), x.mean()

    return lax.scan(one, x, jnp.array([1.0, 0.5]))[0]


def _sharded(w: Any, x: Any) -> Any:
    def local(up: Any, down: Any, x: Any) -> Any:
        return x + lax.psum(jnp.sin(x @ up) @ down, "model")

    specs = (P(None, "model"), P("model", None), ROWS_SPEC)
    return jax.shard_map(local, in_specs=specs, out_specs=ROWS_SPEC)(w["up"], w["down"], x)


def _auto(w: Any, x: Any) -> Any:
    return auto_axes(lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"], out_sharding=ROWS_SPEC)(w, x)


def _gathered(w: Any, x: Any) -> Any:
    """All-gathers weights before their products, as in FSDP."""
    up, down = reshard(w["up"], P()), reshard(w["down"], P())
    return x + jnp.tanh(x @ up) @ down


def _stacked(w: Any, x: Any) -> Any:
    """Two layers whose weights are rows of arrays."""
    rows = jax.tree.map(lambda a: jnp.stack([a, -0.5 * a]), w)
    return lax.scan(lambda x, w: (block(w, x), None), x, rows)[0]


def _referenced(w: Any, x: Any) -> Any:
    ref = jax.new_ref(x)

    def one(number: Any, scale: Any) -> Any:
        ref[...] = block(jax.tree.map(lambda a: scale * a, w), ref[...])
        return number, None

    lax.scan(one, 0, jnp.array([1.0, 0.5]))
    return ref[...]


def _sorted(w: Any, x: Any) -> Any:
    places = jnp.searchsorted(jnp.arange(-1.0, 1.0, 0.25), lax.stop_gradient(reshard(w["up"], P())[0]))
    return block(w, x) * (1 + places.sum())


def _ordered(w: Any, x: Any) -> Any:
    """Reads columns in an order that is a parameter: its gradient has the type float0."""
    columns = x.at[:, w["order"]].get(out_sharding=ROWS_SPEC)
    return block({"up": w["up"], "down": w["down"]}, columns)


BODIES: dict[str, Callable[[Any, Any], Any]] = {
    "block": block,
    "checkpoint": jax.checkpoint(block),
    "scan": _scan,
    "shard_map": _sharded,
    "auto_axes": _auto,
    "gathered": _gathered,
    "stacked": _stacked,
    "reference": _referenced,
    "sorted": _sorted,
    "ordered": _ordered,
    "cond": lambda w, x: lax.cond(x.sum() > 0, lambda x: block(w, x), lambda x: jnp.sin(x), x),
}
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "wavefront", "eager-1f1b")
GRADIENTS = ("none", "inside", "outside", "no loop")


@dataclasses.dataclass(frozen=True)
class TypedProgram:
    """A decoder of four layers on two submeshes."""

    seed: int
    shapes: tuple[tuple[int, int], ...]
    bodies: tuple[str, ...]  # of each layer
    schedule: str
    gradient: str
    form: str
    reduced: bool
    ambient: int | None  # the submesh of an enclosing jax.set_mesh


def typed_program(seed: int) -> TypedProgram:
    """Draw a program."""
    rng = np.random.default_rng(seed)

    def choose(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    first = choose(SHAPES)
    shapes = (first, first if rng.random() < 0.6 else choose(SHAPES))
    form = choose(("task", "pipeline"))
    equal = shapes[0] == shapes[1]  # on meshes of other sizes JAX does not transpose a shard_map
    any_body = form == "task" or equal  # else bodies of scans keep the mesh that shapes have in common
    bodies = [
        n
        for n in BODIES
        if (n != "shard_map" or equal) and (n not in ("scan", "stacked", "reference", "cond") or any_body)
    ]
    if form == "pipeline":  # which may cut a layer between two uses of its reference, and then refuses
        bodies = [n for n in bodies if n != "reference"]
    reduced = bool(rng.random() < 0.2)  # JAX does not divide terms: the mean over microbatches is ours alone
    return TypedProgram(
        seed,
        shapes,
        tuple(choose(bodies) for _ in range(4)),
        choose(SCHEDULES),
        "no loop" if reduced else choose(GRADIENTS),
        form,
        reduced,
        choose((None, None, 0, 1)),
    )


def check_typed(program: TypedProgram) -> None:
    """Run a program both ways, and compare values and types."""
    meshes = typed_meshes(program.shapes)
    params, specs = init()
    if program.reduced:
        specs = specs | {"embed": P(reduced={"data"})}
    for layer, spec, name in zip(params["layers"], specs["layers"], program.bodies, strict=True):
        if name == "ordered":
            layer["order"], spec["order"] = np.roll(np.arange(WIDTH, dtype=np.int32), 1), P()
    rows = batch()
    assert len(rows) == ROWS

    def make(stage: Any, loop: Any, cut: Any = lambda loss: loss) -> Callable[..., Any]:
        bodies = iter(program.bodies * 8)

        def body(w: Any, x: Any) -> Any:
            return BODIES[next(bodies)](w, x)

        def loss(params: Any, tokens: Any) -> Any:
            nonlocal bodies
            bodies = iter(program.bodies)
            return decoder(stage, body)(params, tokens)

        run = cut(loss)

        def join(g: Any, p: Any) -> Any:
            return g if is_float0(g) else reshard(g, jax.typeof(p).sharding.spec.update(reduced=frozenset()))

        if program.gradient == "none":
            return loop(run)
        if program.gradient == "outside":
            grad = jax.value_and_grad(lambda p, t: loop(run)(p, t), allow_int=True)
        else:
            grad = jax.value_and_grad(run, allow_int=True)
            grad = grad if program.gradient == "no loop" else loop(grad)

        def step(p: Any, t: Any) -> Any:
            value, grads = grad(p, t)
            return value, jax.tree.map(join, grads, p)

        return step

    where = owners(params)
    args = place(params, specs, where, meshes), jax.device_put(rows, NamedSharding(meshes[0], P("data")))
    zeros = jax.tree.map(lambda _: 0, where)
    plain_args = place(params, specs, zeros, meshes), args[1]
    loop = functools.partial(mm.microbatch, size=SIZE, argnum=1, reduce="mean", schedule=program.schedule)
    if program.form == "task":
        jitted = mm.jit(make(Split(meshes), loop))
    else:
        jitted = mm.jit(make(plain, loop, lambda loss: mm.pipeline(loss, meshes)))
    with jax.set_mesh(meshes[0]):
        on_mesh = jax.jit(make(plain, looped))(*plain_args)
    if program.ambient is None:
        actual = jitted(*args)
    else:
        with jax.set_mesh(meshes[program.ambient]):
            actual = jitted(*args)
    expected = jax.device_get(on_mesh)

    def exactly() -> Any:
        with jax.set_mesh(meshes[0]):
            return jax.jit(make(plain, looped))(place(double(params), specs, zeros, meshes), plain_args[1])

    assert_near(actual, expected, exactly)
    if meshes[0].abstract_mesh == meshes[1].abstract_mesh:
        types = [jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree) for tree in (actual, on_mesh)]
        assert types[0] == types[1]
