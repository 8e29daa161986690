"""Programs from seeds: pipelines over microbatches with all that a body may return, and the same in plain JAX.

``program(seed)`` draws one; ``check(program)`` compares its results under `multimesh.jit` with those of `jax.jit` of a
Python loop, and asserts on which submesh each of them lies. Data of all types but float32 and complex64 are small
integers, so that no order of additions changes them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from models import plain
from pipelines import RTOL, assert_same, microbatched

import multimesh as mm

WIDTH = 4
SMOOTH = ("float32", "complex64")
EXACT = ("bfloat16", "float16", "int8", "int16", "int32", "uint8", "uint32", "bool")
GRADIENTS = ("none", "inside", "outside")
ONE_STAGE = ("zb-h1", "zb-h2")
V_SHAPES = ("zb-v", "dualpipe-v")
STARTS = ("argument", "argument", "zeros", "ones", "row")  # of a state
LAYERS = ("product", "shift", "residual", "scan", "choose")
BETWEEN = ("none", "none", "scale", "add weak", "cast", "centre")
RESULTS = ("sum", "rows", "statistic", "literal", "identity", "plus zero", "slice", "split", "outside", "data", "again")
Placed = Callable[[int, Callable[..., Any], str], Callable[..., Any]]  # (stage, function, name) to a task, or itself


@dataclasses.dataclass(frozen=True)
class Result:
    """One result of an iteration: what it is, the stage that gives it, and how iterations are put together."""

    kind: str
    stage: int
    how: str  # sum, mean or stack


@dataclasses.dataclass(frozen=True)
class Program:
    """A pipeline. ``layers`` and ``between`` have an entry for each stage; ``weights`` says whose weight it reads."""

    seed: int
    dtype: str
    submeshes: tuple[int, ...]  # devices of each
    schedule: str
    layers: tuple[str, ...]
    between: tuple[str, ...]
    weights: tuple[int, ...]
    skips: tuple[tuple[int, int], ...]  # from stage to stage, inside tasks
    results: tuple[Result, ...]
    gradient: str
    value: bool
    aux: bool
    checkpoint: str  # none, stage or model
    carry: int | None  # the stage that reads and replaces a state
    reads_state: bool  # whether the state is read
    key: int | None  # the stage that draws random numbers
    inner: bool  # a gradient inside of each task
    count: int
    rows: int
    clip: bool  # the gradients of each microbatch, by their norm
    start: str  # what the state is before the first microbatch: an argument, or made in the function
    extra_task: str  # a task outside of the loop on a submesh of its own: none, first, last
    order: int | None  # the stage that reads the last of the weights, whole numbers: an order of columns

    @property
    def stages(self) -> int:
        """Number of tasks of the pipeline."""
        return len(self.layers)

    def meshes(self) -> list[Mesh]:
        """Disjoint submeshes; the last one is that of the task apart."""
        starts = np.cumsum([0, *self.submeshes, 1])
        return [Mesh(np.array(jax.devices()[a:b]), ("data",)) for a, b in itertools.pairwise(starts)]

    def submesh(self, stage: int) -> int:
        """Number of the submesh of a stage."""
        p = len(self.submeshes)
        return min(stage, 2 * p - 1 - stage) if self.schedule in V_SHAPES else stage % p


def program(seed: int) -> Program:
    """Draw a program."""
    rng = np.random.default_rng(seed)

    def choose(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    def maybe(share: float) -> bool:
        return bool(rng.random() < share)

    schedule = choose((*mm.schedules.names(), "auto", "auto"))
    p = 2 if schedule in V_SHAPES else choose((1, 2, 2, 3))
    rounds = 2 if schedule in V_SHAPES else 1 if schedule in ONE_STAGE else choose((1, 1, 2))
    stages = p * rounds
    dtype = choose(SMOOTH[:1] * 6 + SMOOTH[1:] + EXACT)
    gradient = choose(GRADIENTS) if dtype in (*SMOOTH[:1], "bfloat16", "float16") else "none"
    weights = list(range(stages))
    if stages > 1 and maybe(0.2):
        weights[-1] = 0  # tied
    carry = int(rng.integers(stages)) if gradient != "outside" and maybe(0.3) else None
    kinds = [choose(RESULTS) for _ in range(choose((1, 2, 3)))]
    results = [Result("sum", stages - 1, choose(("sum", "mean", "stack")))]
    results += [Result(kind, int(rng.integers(stages)), choose(("sum", "mean", "stack"))) for kind in kinds]
    skip = stages > 2 and dtype != "bfloat16" and maybe(0.3)
    layers = LAYERS if dtype != "bfloat16" else LAYERS[:2]  # of which whole numbers remain so small that it has them
    checkpoint = choose(("none", "none", "stage", "model"))
    return Program(
        seed,
        dtype,
        tuple(choose((1, 1, 2)) for _ in range(p)),
        schedule,
        tuple(choose(layers) for _ in range(stages)),
        (*(choose(BETWEEN) for _ in range(stages - 1)), "none"),
        tuple(weights),
        ((0, stages - 1),) if skip else (),
        tuple(results),
        gradient,
        maybe(0.5),
        maybe(0.5),
        checkpoint,
        carry,
        maybe(0.7),
        int(rng.integers(stages)) if dtype == "float32" and maybe(0.2) else None,
        dtype == "float32" and maybe(0.15),
        choose((2, 4)) if p < 3 else 4,
        2,
        dtype == "float32" and gradient == "inside" and maybe(0.4),
        choose(STARTS),
        choose(("none", "none", "none", "first", "last")),
        int(rng.integers(stages)) if maybe(0.25) else None,
    )


def data(program: Program) -> tuple[Any, ...]:
    """Weights, rows, a constant, a state and a key."""
    rng = np.random.default_rng(program.seed + 10**6)
    dtype = jnp.dtype(program.dtype)

    def array(*shape: int) -> np.ndarray:
        if program.dtype == "float32":
            return rng.normal(size=shape).astype(dtype)
        if program.dtype == "complex64":
            return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)
        return rng.integers(0, 2, shape).astype(dtype)

    weights = [array(WIDTH, WIDTH) for _ in range(program.stages)]
    if program.order is not None:
        weights.append(np.roll(np.arange(WIDTH, dtype=np.int32), 1))
    return weights, array(program.count * program.rows, WIDTH), array(WIDTH), array(WIDTH), jax.random.key(program.seed)


def _layer(program: Program, stage: int) -> Callable[..., Any]:
    """``(weight, rows, extra arrays) -> rows`` of a stage; keeps integers small."""
    kind, logical = program.layers[stage], program.dtype == "bool"

    def bounded(x: Any) -> Any:
        if logical or program.dtype in SMOOTH:
            return jnp.tanh(x) if program.dtype in SMOOTH else x
        return jnp.where(x > 2, x - 2, x)

    def product(w: Any, x: Any) -> Any:
        return x ^ w[0] if logical else (x @ w).astype(x.dtype)

    def layer(w: Any, x: Any) -> Any:
        if kind == "product":
            return bounded(product(w, x))
        if kind == "shift":
            return bounded(x + w[0]) if not logical else x | w[0]
        if kind == "residual":
            return x + bounded(product(w, x)) if not logical else x & ~w[1]
        if kind == "scan":
            return jax.lax.scan(lambda c, row: (bounded(product(w, c)), row[0]), x, w[:2])[0]
        return jnp.where(w[0] == w[1], x, bounded(product(w, x)))

    def with_inner(w: Any, x: Any) -> Any:
        return layer(w, x) + jax.grad(lambda y: jnp.sum(jnp.sin(y) @ w))(x) if program.inner else layer(w, x)

    return jax.checkpoint(with_inner) if program.checkpoint == "stage" else with_inner


def _between(kind: str, x: Any) -> Any:
    """Return the operations outside of tasks, between two of them."""
    if kind == "none" or x.dtype == bool:
        return x
    if kind == "scale":
        return 2 * x if jnp.issubdtype(x.dtype, jnp.inexact) else x
    if kind == "add weak":
        return x + 1
    if kind == "cast":
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)
    return x - x[:1]


def body(program: Program, placed: Placed) -> Callable[..., Any]:
    """``(weights, rows, constant, state, key, number) -> (last rows, state, results)`` of an iteration.

    Results are a tuple, weights a list: a list of stacks may have the types of the weights, and would be put with them.
    """

    def pipeline(weights: Any, x: Any, c: Any, state: Any, key: Any) -> Any:
        outputs: list[Any] = []
        extra: list[dict[str, Any]] = []
        for stage in range(program.stages):
            kinds = {r.kind for r in program.results if r.stage == stage}
            skip = [outputs[a] for a, b in program.skips if b == stage]

            def run(
                w: Any, x: Any, c: Any, state: Any, key: Any, skip: Any, order: Any, stage=stage, kinds=kinds
            ) -> Any:
                y = _layer(program, stage)(w, x if order is None else x[:, order])
                for other in skip:
                    y = (y ^ other) if y.dtype == bool else y + other
                if program.key == stage:
                    y = y + jax.random.normal(key, y.shape, y.dtype)
                extras: dict[str, Any] = {}
                if "statistic" in kinds:
                    extras["statistic"] = y.any(0) if y.dtype == bool else y.sum(0, dtype=y.dtype)
                if "literal" in kinds:
                    extras["literal"] = 3.0 if y.dtype != bool else True
                if "identity" in kinds:
                    extras["identity"] = c
                if "plus zero" in kinds:
                    extras["plus zero"] = c if y.dtype == bool else jnp.zeros_like(c) + c
                if program.carry == stage:
                    update = y[0] if y.dtype == bool else y.sum(0, dtype=y.dtype)
                    old = state if program.reads_state else jnp.zeros_like(state)
                    extras["state"] = (update ^ old) if y.dtype == bool else (update + old).astype(state.dtype)
                return y, extras

            x, extras = placed(stage, run, f"stage{stage}")(
                weights[program.weights[stage]], x, c, state, key if program.key == stage else None, skip,
                weights[-1] if program.order == stage else None,
            )  # fmt: skip
            outputs.append(x)
            extra.append(extras)
            x = _between(program.between[stage], x)
        return x, extra

    def iteration(weights: Any, x: Any, c: Any, state: Any, key: Any, number: Any) -> Any:
        key = jax.random.fold_in(key, number) if program.key is not None else None
        run = jax.checkpoint(pipeline) if program.checkpoint == "model" else pipeline
        y, extra = run(weights, x, c, state, key)
        results: list[Any] = []
        for r in program.results:
            if r.kind == "sum":
                results.append(y[0] if y.dtype == bool else y.sum(0, dtype=y.dtype))
            elif r.kind in extra[r.stage]:
                results.append(extra[r.stage][r.kind])
            else:
                outside = {
                    "rows": lambda: y,
                    "slice": lambda: c[:1],
                    "split": lambda: jnp.split(c, 2)[1],
                    "outside": lambda: ~c if c.dtype == bool else c + c,
                    "data": lambda: x,
                    "again": lambda: results[-1],
                }
                results.append(outside[r.kind]())
        new = extra[program.carry]["state"] if program.carry is not None else state
        return y, new, tuple(results)

    return iteration


def ways(program: Program) -> list[str]:
    """Return the reductions of the results of iterations, where their type allows them."""
    if program.dtype == "bool":
        return ["stack"] * len(program.results)
    inexact = program.dtype in (*SMOOTH, "bfloat16", "float16")
    return ["sum" if r.how == "mean" and not inexact and r.kind != "literal" else r.how for r in program.results]


def step(program: Program, placed: Placed, loop: Any, jit: Any = lambda fn: fn) -> Callable[..., Any]:
    """Return the whole function, of weights, rows, constant, state and key; ``loop`` is `mm.microbatch` or plain.

    It returns the result of the task apart too. ``jit`` is of what a gradient outside of the loop is taken of.
    """
    run = _pipeline(program, placed, loop, jit)
    extra_task = placed(program.stages, lambda c: c[::-1], "apart")
    starts = {"zeros": jnp.zeros_like, "ones": jnp.ones_like}

    def function(weights: Any, x: Any, c: Any, state: Any, key: Any) -> Any:
        state = x[0] if program.start == "row" else starts.get(program.start, lambda state: state)(state)
        before = extra_task(c) if program.extra_task == "first" else None
        results = run(weights, x, c, state, key)
        return results, extra_task(c) if program.extra_task == "last" else before

    return function


def _pipeline(program: Program, placed: Placed, loop: Any, jit: Any) -> Callable[..., Any]:
    """Return the loop, or its gradient; arguments as those of the whole function."""
    iteration, reductions = body(program, placed), ways(program)
    reduce = tuple(reductions)

    def scalar(y: Any) -> Any:
        part = y.real if y.dtype.kind == "c" else y
        return placed(program.stages - 1, lambda y: jnp.sum(y * y if program.dtype == "float32" else y), "loss")(part)

    def loss(weights: Any, x: Any, c: Any, state: Any, key: Any, number: Any) -> Any:
        y, state, results = iteration(weights, x, c, state, key, number)
        return scalar(y), (state, results)

    def wrap_in_loop(fn: Any, reduce: Any) -> Any:
        carry = 3 if program.carry is not None else None
        options = {"schedule": program.schedule, "index": "number", "carry": carry, "reduce": reduce}
        return loop(fn, size=program.rows, argnum=1, **options)

    def results_of(weights: Any, x: Any, c: Any, state: Any, key: Any, number: Any) -> Any:
        _, state, results = iteration(weights, x, c, state, key, number)
        return (state, results) if program.carry is not None else results

    def gradients_of(weights: Any, x: Any, c: Any, state: Any, key: Any, number: Any) -> Any:
        grads, (state, results) = jax.grad(loss, has_aux=True, allow_int=True)(weights, x, c, state, key, number)
        if program.clip:
            floats = grads[: program.stages]
            norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in floats))
            grads = [g / jnp.maximum(norm, 1) for g in floats] + grads[program.stages :]
        return (state, (grads, results)) if program.carry is not None else (grads, results)

    if program.gradient == "none":
        return wrap_in_loop(results_of, reduce)
    if program.gradient == "inside":
        return wrap_in_loop(gradients_of, ("sum", reduce))

    @jit
    def total(weights: Any, x: Any, c: Any, state: Any, key: Any) -> Any:
        def one(*args: Any, number: Any) -> Any:
            value, (_, results) = loss(*args, number)
            return value, results

        return wrap_in_loop(one, ("sum", reduce))(weights, x, c, state, key)

    def outside(*args: Any) -> Any:
        if not program.aux:
            return jax.grad(lambda *args: total(*args)[0], allow_int=True)(*args), total(*args)[1]
        if not program.value:
            return jax.grad(total, has_aux=True, allow_int=True)(*args)
        (_, results), grads = jax.value_and_grad(total, has_aux=True, allow_int=True)(*args)
        return grads, results

    return outside


def places(program: Program, result: Any) -> None:
    """Assert on which submesh each result lies: that of the task that gives it, and of the task that reads a weight.

    What is outside of tasks lies on any one. So does what a task passes through or makes of nothing where a gradient is
    taken: JAX takes that out of the task.
    """
    device_sets = [set(mesh.devices.flat) for mesh in program.meshes()]

    def on(x: Any, stages: Sequence[int], name: str) -> None:
        allowed = [device_sets[program.submesh(stage)] for stage in stages]
        assert x.devices() in allowed, f"{name} lies on {x.devices()}, not on {allowed}"

    result, extra = result
    if extra is not None:
        assert extra.devices() == device_sets[-1], f"the result of the task apart lies on {extra.devices()}"
    state, result = result if program.carry is not None else (None, result)
    if state is not None:
        on(state, [program.carry], "state")  # type: ignore[list-item]
    grads, results = result if program.gradient != "none" else ([], result)
    for k, g in enumerate(grads):
        readers = [stage for stage, weight in enumerate(program.weights) if weight == k]
        if readers:
            on(g, readers, f"gradient of weight {k}")
    for n, (r, x) in enumerate(zip(program.results, results, strict=True)):
        if r.kind == "sum":
            on(x, [program.stages - 1], f"result {n}, {r.kind}")
        elif r.kind in ("statistic", "plus zero") or (program.gradient == "none" and r.kind in ("literal", "identity")):
            on(x, [r.stage], f"result {n}, {r.kind}")
        else:
            assert x.devices() in device_sets, f"result {n}, {r.kind} lies on {x.devices()}"


def largest(tree: Any) -> float:
    """Return the largest number of all results: layers that centre make some gradients differences of larger ones."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return max((float(jnp.abs(x).max(initial=0)) for x in floats), default=0.0)


def double(args: Any) -> Any:
    """Return arguments with floats of 64 bits."""
    return jax.tree.map(lambda x: np.float64(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, args)


def distance(actual: Any, expected: Any) -> float:
    """Return by how much arrays differ at most, relative to the largest number."""
    pairs = zip(jax.tree.leaves(jax.device_get(actual)), jax.tree.leaves(jax.device_get(expected)), strict=True)
    floats = [(np.float64(x), y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.inexact)]
    return max(float(np.abs(x - y).max(initial=0)) for x, y in floats) / largest(expected)


def assert_near(actual: Any, expected: Any, exactly: Callable[[], Any] | None, least: float = 0.0) -> None:
    """Compare with plain ``jit``; where rounding shows, by how far each is from the same in 64 bits, if that is given.

    Some draws are ill-conditioned, and some make whole numbers that float16 has not: plain ``jit`` is then as far from
    what it computes in 64 bits.
    """
    try:
        assert_same(actual, expected, least=least)
    except AssertionError:
        assert_same(actual, expected, rtol=100 * RTOL, least=least)
        if exactly is None:
            raise
        with jax.enable_x64(True):
            exact = exactly()
        if distance(actual, exact) > 4 * distance(expected, exact):
            raise


def assert_as_plain(program: Program, actual: Any, expected: Any, exactly: Callable[[], Any]) -> None:
    """Compare a program's results with those of plain ``jit``; keys and other types than floats have no 64 bits."""
    wide = jnp.issubdtype(program.dtype, jnp.floating) and program.key is None
    assert_near(actual, expected, exactly if wide else None, largest(expected))


def check(program: Program) -> None:
    """Run a program both ways, and compare values and places."""
    meshes = program.meshes()
    args = data(program)

    def place(stage: int, fn: Callable[..., Any], name: str) -> Callable[..., Any]:
        return mm.task(fn, name=name, mesh=meshes[-1 if name == "apart" else program.submesh(stage)])

    jitted = mm.jit(step(program, place, mm.microbatch))
    actual = jitted(*args)
    assert all(need.total for need in jitted.compiled[0].lowered.memory_estimate())
    expected = jax.jit(step(program, plain, microbatched))(*args)
    assert_as_plain(program, actual, expected, lambda: jax.jit(step(program, plain, microbatched))(*double(args)))
    types = jax.eval_shape(step(program, plain, mm.microbatch), *args)
    assert jax.tree.map(lambda x: x.weak_type, actual) == jax.tree.map(lambda x: x.weak_type, types)
    places(program, actual)
