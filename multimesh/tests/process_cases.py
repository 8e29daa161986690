"""What each of several processes does in `test_processes`: every case against plain ``jax.jit`` on one device."""

from __future__ import annotations

import concurrent.futures
import contextlib
import faulthandler
import itertools
import os
import pickle
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh.processes.arrays import is_key
from process_arrays import SPLITS, assert_shards, meshes, on

import multimesh as mm
from multimesh import distributed


def meet() -> None:
    from spawning import free_port

    jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{free_port()}")
    mm.distributed.initialize(os.environ["COORDINATOR"], int(os.environ["PROCESSES"]), int(os.environ["PROCESS"]))


def pipeline(split: str, model: str, schedule: str, where: str = "inside") -> None:
    """Loss and gradients of a model over stages, twice, in one layout and schedule."""
    from models import MODELS
    from pipelines import Split, gradient, reference_gradient

    rows, size = 16, 4
    case = next(m for m in MODELS if m.name == model)
    parts = SPLITS[split]()
    kind = mm.schedules.get(schedule)
    stages = len(parts) * kind.usual
    split_ = Split(tuple(parts), placement=kind.placement(len(parts)))
    params, batch = case.init(stages), case.batch(rows, 0)
    owners = case.owners(params)
    placed = jax.tree.map(lambda x, o: on(split_.mesh(o[0]), x), params, owners)
    data = {k: x if is_key(x) else on(split_.mesh(0), x, P("data")) for k, x in batch.items()}
    step = mm.jit(gradient(case, split_, size=size, rows=rows, where=where, schedule=schedule))
    expected = reference_gradient(case, stages, rows, size)
    if (split, model, schedule) == ("halves", "mlp", "1f1b") and where == "inside":
        sends_ahead(step.plan(placed, data))
    for _ in range(2):
        actual = step(placed, data)
        assert_shards(actual, expected)
    for g, o in zip(
        jax.tree.leaves(actual[1]), jax.tree.leaves(owners, is_leaf=lambda o: isinstance(o, tuple)), strict=True
    ):
        assert g.sharding.device_set in [split_.devices(s) for s in o]
    assert sum(len(x.addressable_shards) for x in jax.tree.leaves(actual)) or jax.process_count() > len(parts)


def sends_ahead(plan: Any) -> None:
    """Cotangents leave before the weight gradients, and as many microbatches are alive as 1F1B has."""
    last = len(plan.submeshes) - 1
    assert {r.cell.stage for r in plan.runs if r.cell and r.cell.phase == "W"} == {*range(1, last + 1)}
    kinds = [(i.kind, i.phase, i.microbatch) for i in plan.instructions if i.submesh == last and i.microbatch == 0]
    order = [kinds.index(("RUN", "B", 0)), kinds.index(("SEND", None, 0)), kinds.index(("RUN", "W", 0))]
    assert order == sorted(order)
    alive = [0] * len(plan.submeshes)
    for run in (r for r in plan.runs if r.cell):
        split = any(r.cell.phase == "W" for r in plan.runs if r.cell and r.cell.stage == run.cell.stage)
        begins = run.cell.phase == "F" or (run.cell.phase == "B" and run.cell.stage == last)
        alive[run.submesh] += begins
        assert alive[run.submesh] <= len(plan.submeshes) - run.cell.stage
        alive[run.submesh] -= run.cell.phase == ("W" if split else "B")


def training(split: str) -> None:
    """Donated parameters and moments over several steps, with what is sent also donated by the next call."""
    parts = SPLITS[split]()
    rng = np.random.default_rng(0)
    w = [rng.normal(size=(16, 16)).astype(np.float32) / 4 for _ in parts]
    m = [np.zeros_like(x) for x in w]
    x = rng.normal(size=(16, 16)).astype(np.float32)

    def loss(w: Any, x: Any, tasks: bool) -> Any:
        for s, (weight, mesh) in enumerate(zip(w, parts, strict=True)):
            f = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
            x = (mm.task(f, name=f"s{s}", mesh=mesh) if tasks else f)(weight, x)
        return jnp.mean(x**2)

    def step(w: Any, m: Any, x: Any, tasks: bool) -> Any:
        total, g = jax.value_and_grad(loss)(w, x, tasks)
        norm = jnp.sqrt(sum(jnp.sum(y**2) for y in g))
        m = [0.9 * a + b / jnp.maximum(norm, 1.0) for a, b in zip(m, g, strict=True)]
        shifted = [a - 0.1 * b for a, b in zip(w, m, strict=True)]
        # the last stage's parameter is also added to the first: an argument is sent that the call may overwrite
        shifted[0] = shifted[0] + 0.01 * w[-1]
        return shifted, m, total

    actual = [on(p, a) for p, a in zip(parts, w, strict=True)], [on(p, a) for p, a in zip(parts, m, strict=True)]
    desired = w, m
    jitted = mm.jit(lambda w, m, x: step(w, m, x, True), donate_argnums=(0, 1))
    reference = jax.jit(lambda w, m, x: step(w, m, x, False))
    for _ in range(4):
        *actual, total = jitted(*actual, x)
        *desired, expected = reference(*desired, x)
    assert_shards((actual, total), (desired, expected))
    assert len(jitted.compiled) <= 2


def stacked(split: str) -> None:
    """Layers in one array over all submeshes: a process holds the rows of its stages; saved, restored, made here."""
    parts, depth = SPLITS[split](), 8
    rng = np.random.default_rng(0)
    w = {"k": rng.normal(size=(depth, 16, 16)).astype(np.float32) / 4, "b": np.zeros((depth, 16), np.float32)}
    x = rng.normal(size=(16, 16)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["k"] + w["b"]), None), x, w)[0] ** 2)

    def step(w: Any, m: Any, x: Any, loss: Any, loop: Any) -> Any:
        total, g = loop(jax.value_and_grad(loss))(w, x)
        m = jax.tree.map(lambda a, b: 0.9 * a + b, m, g)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, m), m, total

    cut = mm.pipeline(loss, parts)
    loop = lambda fn: mm.microbatch(fn, size=4, argnum=1, reduce="mean")  # noqa: E731
    jitted = mm.jit(lambda w, m, x: step(w, m, x, cut, loop), donate_argnums=(0, 1))
    reference = jax.jit(lambda w, m, x: step(w, m, x, loss, lambda fn: fn))
    zeros = jax.tree.map(np.zeros_like, w)
    actual, desired = (w, zeros), (w, zeros)
    for _ in range(3):
        *actual, total = jitted(*actual, x)
        *desired, expected = reference(*desired, x)
    assert_shards((actual, total), (desired, expected))
    assert len(jitted.compiled) == 1
    rows = depth // len(parts)
    for shard in actual[0]["k"].addressable_shards:
        assert shard.data.shape[0] == rows
        assert shard.device in parts[shard.index[0].start // rows].devices
    init = lambda: jax.tree.map(lambda a: jnp.sin(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), w)  # noqa: E731
    train, make = mm.parallelize(loop(jax.value_and_grad(cut)), init_params=init, initial_batch=x)
    params = make()
    assert params["k"].sharding.shard_shape((depth, 16, 16))[0] == rows
    assert_shards(train(params, x), jax.jit(jax.value_and_grad(loss))(jax.jit(init)(), x))


def typed(form: str) -> None:
    """Layouts in types: a decoder whose stages lie on both processes, or one on each; saved, and restored."""
    from models import plain
    from multimesh.processes import agree
    from pipelines import Split
    from typed_models import LAYER, SIZE, batch, decoder, init, owners

    kinds = (jax.sharding.AxisType.Explicit,) * 2
    devices = np.array(jax.devices()).reshape(2, -1, 1)
    grids = np.moveaxis(devices, 1, 0) if form == "crossed" else devices
    parts = [Mesh(d, ("data", "model"), axis_types=kinds) for d in grids]
    params, _ = init()
    specs = {"embed": P(), "layers": [LAYER] * len(params["layers"])}
    homes = owners(params)
    placed = jax.tree.map(lambda x, n, s: on(parts[n], x, s), params, homes, specs)
    tokens = on(parts[0], batch(), P("data"))
    cut = mm.pipeline(decoder(plain), parts) if form == "pipeline" else decoder(Split(tuple(parts)))

    def step(loss: Any, loop: Any) -> Any:
        def train(params: Any, tokens: Any) -> Any:
            total, grads = loop(jax.value_and_grad(loss))(params, tokens)
            return jax.tree.map(lambda a, b: a - 0.1 * b, params, grads), total

        return train

    jitted = mm.jit(step(cut, lambda fn: mm.microbatch(fn, size=SIZE, argnum=1, reduce="mean")))
    single = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), ("data", "model"), axis_types=kinds)
    actual, desired = placed, jax.device_put(params, NamedSharding(single, P()))
    rows = jax.device_put(batch(), NamedSharding(single, P()))
    with jax.set_mesh(single):
        reference = jax.jit(step(decoder(plain), lambda fn: fn))
    for _ in range(2):
        actual, total = jitted(actual, tokens)
        with jax.set_mesh(single):
            desired, expected = reference(desired, rows)
    assert_shards((actual, total), jax.device_get((desired, expected)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = agree.first_says("a folder for typed arrays", scratch)
        distributed.save(f"{folder}/{form}", actual)
        assert_shards(distributed.restore(f"{folder}/{form}", placed), jax.device_get(desired))


def retrace(split: str) -> None:
    """A second shape and a second dtype, then the first again."""
    parts = SPLITS[split]()
    f = mm.jit(lambda x: mm.task(lambda y: y * 2, "b", mesh=parts[1])(mm.task(jnp.sin, "a", mesh=parts[0])(x)))
    for shape in ((8, 4), (4, 4), (8, 4)):
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        assert_shards(f(x), 2 * np.sin(x))
    assert len(f.compiled) == 2


DTYPES = ("float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64", "int4", "float8_e4m3fn")


def dtypes(transport: str | None) -> None:
    """Every dtype, scalars, empty arrays and random keys go to the other side and back, whole and cut."""
    parts = meshes()
    with mm.context(transport=transport):
        for spec in (P(), P("data")):
            arrays = {d: jnp.arange(32).reshape(8, 4).astype(d) for d in DTYPES}
            arrays |= {
                "scalar": jnp.float32(3),
                "empty": jnp.zeros((0, 4)),
                "key": jax.random.split(jax.random.key(3), 8),
            }

            def flip_all(tree: Any) -> Any:
                return jax.tree.map(lambda x: x if x.ndim == 0 else mm.with_sharding_constraint(x, spec), tree)

            def keep(tree: Any) -> Any:
                return jax.tree.map(lambda x: x if is_key(x) else jnp.flip(x), tree)

            jitted = mm.jit(
                lambda t: mm.task(keep, "c", mesh=parts[0])(
                    mm.task(lambda t: flip_all(keep(t)), "b", mesh=parts[1])(mm.task(keep, "a", mesh=parts[0])(t))
                )
            )
            assert_shards(jitted(arrays), jax.tree.map(lambda x: x if is_key(x) else jnp.flip(x), arrays))


def arguments(transport: str | None) -> None:
    """Values that all processes have, arrays on other devices, arguments that come back, results laid out anew."""
    parts, x = meshes(), np.arange(64, dtype=np.float32).reshape(8, 8)

    def f(x: Any, y: Any, unused: Any) -> Any:
        a = mm.task(lambda x: x * 2, "a", mesh=parts[0])(x)
        return mm.task(lambda a, y: a + y, "b", mesh=parts[1])(a, y), a, unused, 1.5

    with mm.context(transport=transport):
        g = mm.jit(f)
        expected = (3 * x, 2 * x, x, 1.5)
        for array in (x, jnp.asarray(x), on(parts[1], x), on(parts[0], x, P("data")), on(parts[1], x, P(None, "data"))):
            for _ in range(2):
                a, b, c, d = g(array, array, array)
                assert_shards((a, b), expected[:2])
                assert_shards(c, x)
                assert float(d) == 1.5
        on_host = jax.device_put(on(parts[0], x), NamedSharding(parts[0], P(), memory_kind="pinned_host"))
        assert_shards(g(x, x, on_host)[:2], expected[:2])  # what a task computes with lies on its devices
        out = NamedSharding(parts[1], P("data"))
        h = mm.jit(lambda x: mm.task(lambda x: x * 2, "a", mesh=parts[1])(x), out_shardings=out)
        assert_shards(h(x), 2 * x)


def transports(transport: str) -> None:
    """A pipeline over neighbours with other layouts, with each transport."""
    with mm.context(transport=transport):
        pipeline("halves", "mlp", "1f1b")
        training("halves")


def two_layers() -> Any:
    """A jitted function of two tasks, its like in plain JAX, parameters in their places and as NumPy, and a batch."""
    parts, rng = meshes(), np.random.default_rng(0)

    def fn(w: Any, x: Any, tasks: bool = True) -> Any:
        for s, (weight, mesh) in enumerate(zip(w, parts, strict=True)):
            f = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
            x = (mm.task(f, f"s{s}", mesh=mesh) if tasks else f)(weight, x)
        return jnp.sum(x**2)

    w = [rng.normal(size=(8, 8)).astype(np.float32) for _ in parts]
    placed = [on(mesh, weight) for mesh, weight in zip(parts, w, strict=True)]
    return mm.jit(fn), lambda w, x: fn(w, x, False), placed, w, rng.normal(size=(8, 8)).astype(np.float32)


def transformed() -> None:
    """``jax.value_and_grad`` and ``jax.vmap`` around the jitted function."""
    jitted, reference, placed, w, x = two_layers()
    for _ in range(2):
        assert_shards(jax.value_and_grad(jitted)(placed, x), jax.value_and_grad(reference)(w, x))
    rows, over = np.stack([x, x + 1]), (None, 0)
    assert_shards(jax.vmap(jitted, over)(placed, rows), jax.vmap(reference, over)(w, rows))


def analyses() -> None:
    """A compiled function tells of programs that other processes have."""
    jitted, reference, placed, w, x = two_layers()
    compiled = jitted.lower(placed, x).compile()
    local = [mesh.devices.flat[0].process_index == jax.process_index() for mesh in meshes()]
    assert "of other processes" in compiled.as_text()
    assert [cost["flops"] > 0 for cost in compiled.cost_analysis()] == local
    assert all(m["arguments"] for m in compiled.memory_analysis())
    assert_shards(compiled(placed, x), reference(w, x))


def profiled(split: str, skew: str, transport: str | None = None) -> None:
    """A profile has all that any process did, in order on one clock, also where their clocks differ; alike in all."""
    from multimesh.observe import clocks
    from multimesh.observe.timelines import perfetto, svg

    parts, offset = SPLITS[split](), float(skew) * jax.process_index()
    w = [on(mesh, np.eye(64, dtype=np.float32)) for mesh in parts]

    def loss(w: Any, x: Any) -> Any:
        for s, (weight, mesh) in enumerate(zip(w, parts, strict=True)):
            x = mm.task(lambda w, x: jnp.tanh(x @ w), f"s{s}", mesh=mesh)(weight, x)
        return jnp.sum(x**2)

    def step(w: Any, x: Any) -> Any:
        total, g = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=8)(w, x)
        return [a - b for a, b in zip(w, g, strict=True)], total

    with mm.context(transport=transport), pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks, "now", lambda: time.perf_counter() + offset)
        patch.setattr(clocks, "identity", lambda: str(jax.process_index() if offset else "one"))
        seconds, error = clocks.offset(f"of test {split} {skew}")
        assert abs(seconds + offset) <= error + 1e-6  # the processes of one machine have one clock
        jitted = mm.jit(step, donate_argnums=0)
        profile = jitted.profile(w, np.ones((32, 64), np.float32))
    plan, line = jitted.compiled[0].plan, profile.measured
    assert len(line.spans) == sum(i.kind == "RUN" for i in plan.instructions)
    assert len(line.transfers) == sum(i.kind == "SEND" for i in plan.instructions) > 0
    for hop in line.transfers:
        assert hop.start <= hop.end <= min(line.spans[c].start for c in hop.consumers) + 1e-6
    delays = [line.spans[t.producer].end - t.start for t in line.transfers if t.producer is not None]
    assert statistics.median(delays) <= profile.clocks + 5e-3
    assert max(delays) <= 0.1  # on a busy machine a process may notice late that its program has ended
    for row in range(len(parts)):
        spans = line.row(row)
        assert all(a.end <= b.start + 1e-6 for a, b in itertools.pairwise(spans))
    assert 0 < line.makespan < 5
    assert 0 < profile.call < 5
    assert all(seconds > 0 for seconds in profile.costs.programs)
    assert f"of {jax.process_count()} processes" in line.note
    texts = [repr(profile), str(profile), svg.draw(line), perfetto.trace(line)]
    distributed.agree_on(f"what a profile says: {split} {skew} {transport}", texts)
    assert not any(x.is_deleted() for x in w)


def threads() -> None:
    """Threads that call at once wait for each other, and each call has its own transfers."""
    jitted, reference, placed, w, x = two_layers()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: jitted(placed, x), range(40)))
    for result in results:
        assert_shards(result, reference(w, x))


def parallelized() -> None:
    """Parameters and batches made where they are read, by ``mm.parallelize``."""
    parts = meshes()

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0))
        return [jax.random.normal(key, (8, 8)) for key in keys]

    def fn(params: Any, x: Any) -> Any:
        for n, (w, mesh) in enumerate(zip(params, parts, strict=True)):
            x = mm.task(lambda w, x: jnp.tanh(x @ w), f"s{n}", mesh=mesh)(w, x)
        return x

    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    for batch in (lambda: x, lambda: jnp.asarray(x) * 1):
        jitted, make, load = mm.parallelize(fn, init_params=init, get_input_batch=batch)
        params = make()
        assert_shards(params, init())
        assert [p.sharding.device_set for p in params] == [set(mesh.devices.flat) for mesh in parts]
        w = init()
        assert_shards(jitted(params, load()), jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))


def uneven_compilation(seconds: str) -> None:
    """A process that compiles much longer than the others."""
    from multimesh.runtime import compile as compiling

    compile_plan = compiling.compile_plan

    def slow(*args: Any) -> Any:
        time.sleep(float(seconds) * (jax.process_index() == 1))
        return compile_plan(*args)

    import multimesh.calling.aot

    multimesh.calling.aot.compile_plan = slow
    try:
        retrace("halves")
        if jax.device_count() > 2:
            retrace("crossed")
    finally:
        multimesh.calling.aot.compile_plan = compile_plan


def nans(split: str) -> None:
    """Every process of a submesh is told the task in which a value turned invalid, with Auto and Explicit axes."""
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        front, back = (Mesh(m.devices, m.axis_names, axis_types=(kind,) * m.devices.ndim) for m in SPLITS[split]())

        def f(x: Any, front: Mesh = front, back: Mesh = back) -> Any:
            return mm.task(jnp.cos, "back", mesh=back)(mm.task(jnp.log, "front", mesh=front)(x))

        with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"'front': invalid value .nan. .* in log"):
            mm.jit(f)(on(front, np.full((4, 4), -1, np.float32), P("data")))


def not_in_it() -> None:
    """A plan on the devices of process 0 only; the others get arrays without shards, and the same profile.

    They can't read a value: JAX says so in words that docs/processes.md has, and `gather` brings it.
    """
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    x = np.ones((4, 4), np.float32)
    jitted = mm.jit(lambda x: mm.task(lambda x: x + 1, "a", mesh=mesh)(x))
    y = jitted(x)
    assert [span.name for span in jitted.profile(x, repeats=1).measured.spans] == ["a"]
    assert len(y.addressable_shards) == (jax.process_index() == 0)
    assert_shards(y, x + 1)
    loss = mm.jit(lambda x: mm.task(jnp.sum, "loss", mesh=mesh)(x))(x)
    for read in (float, np.asarray, jax.device_get, pickle.dumps, lambda x: x.item()):
        refusal = pytest.raises(RuntimeError, match="spans non-addressable")
        with contextlib.nullcontext() if jax.process_index() == 0 else refusal:
            read(loss)
    assert "float32" in repr(loss)
    assert mm.distributed.gather(loss) == 16
    if jax.process_index() == 0:  # alone: all devices and arguments are its own
        devices = jax.local_devices()
        for place in (devices[0], devices[-1]):
            assert_shards(jitted(jax.device_put(x, place)), x + 1)


def disagreement() -> None:
    """Another constant, another place of an argument, and other rows of the host are errors in all processes."""
    parts = meshes()
    number = 1.0 + jax.process_index()
    f = mm.jit(lambda x: mm.task(lambda y: y * number, "b", mesh=parts[1])(mm.task(jnp.sin, "a", mesh=parts[0])(x)))
    with pytest.raises(mm.MultiMeshError, match="plan"):
        f(np.ones((4, 4), np.float32))
    g = mm.jit(lambda x: mm.task(lambda y: y * 2, "b", mesh=parts[1])(mm.task(jnp.sin, "a", mesh=parts[0])(x)))
    with pytest.raises(mm.MultiMeshError, match="arguments"):
        g(jax.device_put(np.ones((4, 4), np.float32), jax.local_devices()[0]))
    h = mm.jit(lambda x: mm.task(lambda y: y * 3, "b", mesh=parts[1])(mm.task(jnp.sin, "a", mesh=parts[0])(x)))
    with pytest.raises(mm.UsageError, match=r"arguments of plan \d+, 0: .*'x of the host, with values of checksum"):
        h(np.full((4, 4), number, np.float32))


def graphs(first: str, count: str) -> None:
    """Random graphs of operations over random submeshes."""
    import graphs as random_graphs

    for seed in range(int(first), int(first) + int(count)):
        graph = random_graphs.graph(seed, jax.device_count())
        args = random_graphs.inputs()

        def loss(*a: Any, graph: Any = graph, tasks: bool = True) -> Any:
            return sum(jnp.square(y).mean() for y in graph.run(a, tasks))

        if seed % 2:
            jitted = mm.jit(lambda *a, graph=graph: graph.run(a, True))
            reference = jax.jit(lambda *a, graph=graph: graph.run(a, False))
        else:
            jitted = mm.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            reference = jax.jit(jax.value_and_grad(lambda *a, loss=loss: loss(*a, tasks=False), argnums=(0, 1, 2)))
        try:
            assert_shards(jitted(*args), reference(*args))
        except AssertionError as error:
            raise AssertionError(f"graph {seed}: {graph}") from error


def main(cases: dict[str, Any]) -> None:
    """Do what the command line says: functions of ``cases`` with their arguments."""
    faulthandler.dump_traceback_later(float(os.environ["PATIENCE"]), exit=True)
    meet()
    for n, text in enumerate(sys.argv[1:]):
        name, *args = text.split(":")
        start = time.monotonic()
        cases[name](*(None if a == "None" else a for a in args))
        distributed.barrier(f"test {n}")
        print(f"done {text} {time.monotonic() - start:.1f}", flush=True)


if __name__ == "__main__":
    main(globals())
