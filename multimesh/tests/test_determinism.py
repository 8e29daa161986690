"""The same function and types give the same plan and the same programs in every process.

Each process has a hash seed and a heap of its own, and traced something else before. Run as a script, this file prints
what it made.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAYOUTS = ((0, 0), (1, 50_000), (2, 7_000), (3, 900))  # of a process: its hash seed, and objects that lie about


def made_in(seed, junk, *names, dump=None):
    """Start a process that makes the plans named ``names``; ``dump`` also compiles them, and keeps what was lowered."""
    environment = os.environ | {"PYTHONHASHSEED": str(seed)} | ({"JAX_DUMP_IR_TO": str(dump)} if dump else {})
    path = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    command = [sys.executable, __file__, str(junk), *names]
    return subprocess.Popen(command, env=environment | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)


def assert_alike(plans):
    first, *others = plans
    assert first
    for other in others:
        assert other.keys() == first.keys()
        for name, value in first.items():
            assert other[name] == value, name


def results(processes):
    return [json.loads(p.communicate(timeout=600)[0].splitlines()[-1]) for p in processes]


@pytest.mark.longer
@pytest.mark.parametrize("layouts", [LAYOUTS[:2], pytest.param(LAYOUTS, marks=pytest.mark.full)], ids=["two", "four"])
def test_plans_of_every_schedule_with_scanned_layers(layouts):
    assert_alike(results([made_in(seed, junk, "all") for seed, junk in layouts]))


def lowered(folders):
    return [sorted(p.read_text() for p in folder.rglob("*.mlir")) for folder in folders]


@pytest.mark.longer
@pytest.mark.parametrize("names", [("zb-h1",), pytest.param(("all",), marks=pytest.mark.full)])
def test_programs_as_they_are_lowered(tmp_path, names):
    folders = [tmp_path / str(seed) for seed, _ in LAYOUTS[:2]]
    runs = [made_in(seed, junk, *names, dump=folder) for (seed, junk), folder in zip(LAYOUTS[:2], folders, strict=True)]
    assert_alike(results(runs))
    first, second = lowered(folders)
    assert len(first) > 5
    assert first == second


def test_a_fingerprint_names_what_a_plan_does():
    """A difference in any part of a plan, its constants or the options shows; its maker does not."""
    import jax
    import numpy as np

    import multimesh as mm

    def plan(fn, *args, **options):
        with mm.context(**options):
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
            return mm.jit(mm.task(fn, "one", mesh=mesh)).plan(*args)

    def add(constant):
        return lambda x: x + constant

    x = np.ones(3, np.float32)
    first = plan(add(np.arange(3)), x).fingerprint()
    assert first == plan(add(np.arange(3)), x).fingerprint()
    assert len(first) == 64
    others = [
        plan(add(np.arange(3) + 1), x),
        plan(add(np.arange(3)), x.astype(np.float16)),
        plan(lambda x: x - np.arange(3), x),
        plan(add(np.arange(3)), x, enable_task_fusion=False),
        dataclasses.replace(plan(add(np.arange(3)), x), donations={0: (0,)}),
    ]
    assert len({first, *(other.fingerprint() for other in others)}) == 6


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"b", "a"}, "{'a', 'b'}"),
        ({"b": 1, "a": frozenset((2, 1))}, "{'a': {1, 2}, 'b': 1}"),
        (made_in, f"{__name__}.made_in"),
        (object(), "<object object at >"),
        (float("nan"), "nan"),
        ((1, (True, None)), "(1, (True, None))"),
    ],
    ids=["set", "mapping", "function", "object", "float", "tuple"],
)
def test_text_without_addresses_and_orders(value, expected):
    from multimesh.core.stable import text

    assert text(value) == expected


def scanned(schedule):
    """Gradients of a pipeline whose stages scan over their layers, and its arguments."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P
    from pipelines import submeshes

    import multimesh as mm

    kind = mm.schedules.get(schedule)
    stages, on = 2 * kind.usual, kind.placement(2)
    meshes = [submeshes(2, (1, 2))[on[s % len(on)]] for s in range(stages)]

    def layer(h, w):
        h = mm.with_sharding_constraint(h, P("data"))
        return h + jnp.tanh(h @ w["a"] + w["bias"]) @ w["b"], jnp.sum(h * h)

    def stage(ws, h):
        h, norms = jax.lax.scan(layer, h, ws)
        return h, jnp.sum(norms)

    def loss(params, x):
        total = 0.0
        for s, ws in enumerate(params):
            x, norm = mm.task(stage, name=f"stage{s}", mesh=meshes[s])(ws, x)
            total = total + 1e-3 * norm
        return total + mm.task(lambda h: jnp.mean(h**2), name="loss", mesh=meshes[-1])(x)

    def normal(*shape):
        return np.ones(shape, np.float32)

    params = [{"a": normal(3, 8, 8), "b": normal(3, 8, 8), "bias": normal(3, 8)} for _ in range(stages)]
    step = mm.jit(mm.microbatch(jax.value_and_grad(loss), argnum=1, size=2, schedule=schedule))
    return step, (params, normal(8, 8))


def main(junk, names):
    rng = random.Random(int(os.environ["PYTHONHASHSEED"]))
    heap = [bytes(rng.randrange(1, 400)) for _ in range(junk)]
    del heap[:: 1 + rng.randrange(3)]
    import multimesh as mm

    if junk:  # what was traced before does not count
        step, args = scanned("gpipe")
        step.plan(args[0], args[1][:4])
    plans = {}
    for name in [*mm.schedules.names(), "auto"] if names == ["all"] else names:
        step, args = scanned(name)
        plan = step.plan(*args)
        plans[name] = [plan.fingerprint(), str(plan), [str(step) for step in plan.instructions]]
        if "JAX_DUMP_IR_TO" in os.environ:
            step.lower(*args).compile()
    print(json.dumps(plans))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
