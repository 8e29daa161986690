"""What the tests share: submeshes, how a model is split over them, plain references, and the comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import Model, Stage, mlp_block, plain
from multimesh.marking.result_reductions import is_float0

import multimesh as mm

SCHEDULES = ("gpipe", "1f1b")
FORMS = ("wrapper", "context", "scope")
RTOL = 1e-5


def submeshes(count: int, shape: Sequence[int] = (2,), axes: Sequence[str] = ("data", "model")) -> tuple[Mesh, ...]:
    """``count`` disjoint submeshes of ``shape`` from the first devices on."""
    size = int(np.prod(shape))
    devices = np.array(jax.devices()[: count * size]).reshape(count, *shape)
    return tuple(Mesh(d, tuple(axes)[: len(shape)]) for d in devices)


@dataclasses.dataclass(frozen=True)
class Split:
    """Puts stage s on submesh ``s % len(meshes)``, or as ``placement`` says; ``form`` is how the code says so."""

    meshes: tuple[Mesh, ...]
    form: str = "wrapper"
    placement: tuple[int, ...] = ()

    def mesh(self, stage: int) -> Mesh:
        on = self.placement or range(len(self.meshes))
        return self.meshes[on[stage % len(on)]]

    def __call__(self, stage: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        name = f"stage{stage}"
        if self.form == "wrapper":
            return mm.task(fn, name=name, mesh=self.mesh(stage))

        def inside(*args: Any) -> Any:
            if self.form == "context":
                with mm.task(mesh=self.mesh(stage), name=name):
                    return fn(*args)
            with jax.named_scope(f"testscope_{stage}"):
                return fn(*args)

        return inside

    def devices(self, stage: int) -> set[jax.Device]:
        return set(self.mesh(stage).devices.flat)

    def place(self, tree: Any, owners: Any) -> Any:
        """Every leaf, replicated over the submesh of the first stage that owns it."""
        return jax.tree.map(
            lambda x, o: jax.device_put(jnp.array(x), NamedSharding(self.mesh(o[0]), P())), tree, owners
        )

    def lay_out(self, batch: Any) -> Any:
        """The batch on the first submesh, its rows over the data-parallel devices."""
        return jax.device_put(batch, NamedSharding(self.mesh(0), P("data")))


@contextlib.contextmanager
def scopes(split: Split, stages: int) -> Iterator[None]:
    """Place the scopes that ``form="scope"`` opens, for as long as the context is open."""
    with contextlib.ExitStack() as stack:
        for s in range(stages) if split.form == "scope" else ():
            stack.enter_context(mm.register_task(rf"testscope_{s}(?!\d)", mesh=split.mesh(s)))
        yield


def microbatched(
    fn: Callable[..., Any],
    *,
    size: int,
    argnum: int = 0,
    schedule: Any = None,
    reduce: Any = "sum",
    carry: int | None = None,
    index: str | None = None,
) -> Callable[..., Any]:
    """The meaning of mm.microbatch in plain JAX, as a loop in Python: microbatch i has rows i, i+m, ..."""

    def call(*args: Any, **options: Any) -> Any:
        full, results, one = [*args], [], jax.jit(fn)  # is traced once
        count = jax.tree.leaves(args[argnum])[0].shape[0] // size
        for k in range(count):
            full[argnum] = jax.tree.map(lambda x: _strided(x, k, count), args[argnum])
            result = one(*full, **options, **({index: jnp.int32(k)} if index else {}))
            if carry is not None:
                full[carry], result = result
            results.append(result)
        output = jax.tree.map(lambda how, *parts: jax.tree.map(functools.partial(_join, how), *parts), reduce, *results)
        return output if carry is None else (full[carry], output)

    return call


def _strided(x: Any, k: int, count: int) -> Any:
    """Every ``count``-th row; where Explicit axes divide the rows, JAX has to be told their layout."""
    spec = jax.typeof(x).sharding.spec
    if not any(spec):
        return x[k::count]
    return x.reshape(x.shape[0] // count, count, *x.shape[1:], out_sharding=P(*spec[:1]))[:, k]


def _join(how: str, *parts: Any) -> Any:
    if is_float0(parts[0]):
        return parts[0]
    if how == "stack":
        return jnp.stack(parts)
    total = functools.reduce(jnp.add, parts)
    return total / len(parts) if how == "mean" else total


def gradient(
    model: Model,
    stage: Stage,
    *,
    size: int,
    rows: int,
    where: str = "inside",
    schedule: str | None = "1f1b",
    wrap: Callable[..., Any] = lambda loss: loss,
) -> Callable[..., Any]:
    """``(params, batch) -> (loss, gradients)``, averaged over microbatches; ``schedule=None`` is plain JAX."""
    count = rows // size
    loop = functools.partial(mm.microbatch, schedule=schedule) if schedule else microbatched
    loss = wrap(functools.partial(_loss, model, stage))

    def inside(params: Any, batch: Any) -> Any:
        total = loop(jax.value_and_grad(loss), size=size, argnum=1)(params, batch)
        return jax.tree.map(lambda x: x / count, total)

    def outside(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda p: loop(loss, size=size, argnum=1)(p, batch) / count)(params)

    return {"inside": inside, "outside": outside}[where]


def _loss(model: Model, stage: Stage, params: Any, batch: Any) -> Any:
    return model.loss(params, batch, stage)


@functools.cache
def reference_gradient(model: Model, stages: int, rows: int, size: int) -> Any:
    """Loss and gradients of plain jit on one device, computed once for all schedules."""
    f = gradient(model, plain, size=size, rows=rows, where="inside", schedule=None)
    return jax.device_get(jax.jit(f)(model.init(stages), model.batch(rows, 0)))


def on_host(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_same(actual: Any, expected: Any, rtol: float = RTOL, least: float = 0.0) -> None:
    """Same tree, shapes and dtypes; floats within ``rtol`` of the array's largest value, everything else equal.

    No array counts as smaller than ``least``: a small one may be the difference of large ones.
    """
    paths, tree = jax.tree.flatten_with_path(actual)
    leaves, want_tree = jax.tree.flatten(expected)
    assert tree == want_tree
    for (path, g), w in zip(paths, leaves, strict=True):
        name = jax.tree_util.keystr(path)
        g, w = jnp.asarray(g) if np.isscalar(g) else g, jnp.asarray(w) if np.isscalar(w) else w
        assert (g.shape, g.dtype) == (w.shape, w.dtype), name
        a, b = on_host(g), on_host(w)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, b, err_msg=name)
            continue
        wide = np.result_type(b.dtype, np.float64) if b.dtype.kind == "c" else np.float64  # ml_dtypes' kind is V
        a, b = a.astype(wide), b.astype(wide)
        assert np.isfinite(b).all(), name
        error, scale = np.abs(a - b).max(initial=0.0), np.abs(b).max(initial=least)
        assert error <= rtol * scale, f"{name}: {error:.3e} > {rtol:g} x {scale:.3e}"


def assert_at_home(split: Split, tree: Any, owners: Any) -> None:
    """Every array lies on the devices of exactly one submesh, and that is one of a stage that owns it."""
    for (path, x), owner in zip(
        jax.tree.flatten_with_path(tree)[0],
        jax.tree.leaves(owners, is_leaf=lambda o: isinstance(o, tuple)),
        strict=True,
    ):
        allowed = [split.devices(s) for s in owner]
        assert set(x.devices()) in allowed, f"{jax.tree_util.keystr(path)} lies on {sorted(d.id for d in x.devices())}"


def check_gradient(
    model: Model,
    split: Split,
    stages: int,
    *,
    where: str = "inside",
    schedule: Any = "1f1b",
    rows: int = 16,
    size: int = 4,
    laid_out: bool = True,
) -> tuple[mm.Jitted, Any]:
    """Loss and gradients are those of plain jit, and lie where parameters do; return the step and its arguments."""
    params, batch = model.init(stages), model.batch(rows, 0)
    owners = model.owners(params)
    step = mm.jit(gradient(model, split, size=size, rows=rows, where=where, schedule=schedule))
    args = split.place(params, owners), split.lay_out(batch) if laid_out else batch
    with scopes(split, stages):
        loss, grads = step(*args)
    assert_same((loss, grads), reference_gradient(model, stages, rows, size))
    assert_at_home(split, grads, owners)
    return step, args


def foreign_inputs(plan: mm.Plan, leaves: Sequence[int]) -> dict[int, list[int]]:
    """Return those of some argument leaves that lie whole on several submeshes, each with these."""
    submeshes: dict[int, list[int]] = {leaf: [] for leaf in leaves}
    for leaf, slot in plan.inputs:
        if leaf in submeshes:
            submeshes[leaf].append(plan.slots[slot].submesh)
    return {leaf: on for leaf, on in submeshes.items() if len(on) > 1}


def two_blocks(stage):
    """A block of each of two stages, one after the other."""

    def f(p, x):
        return stage(1, mlp_block)(p["stages"][1], stage(0, mlp_block)(p["stages"][0], x))

    return f


def split_two():
    return Split(submeshes(2, (2,)))


def both(make, *args, split=None, schedule="1f1b"):
    """Compare ``make(stage, loop)`` on submeshes with the same in plain JAX; return what it gave on submeshes."""
    actual = mm.jit(make(split or split_two(), functools.partial(mm.microbatch, schedule=schedule)))(*args)
    assert_same(actual, jax.jit(make(plain, microbatched))(*args))
    return actual
