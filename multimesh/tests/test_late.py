"""What waits, in every microbatch, for the gradients of all stages: it runs late, and adds no stage to any schedule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import Split, assert_same, microbatched, submeshes

import multimesh as mm

V_SHAPES, TWICE = ("zb-v", "dualpipe-v"), ("interleaved-zb", "interleaved")
SPLIT = [name for name in mm.schedules.names() if mm.schedules.get(name).splits]
OTHERS = [name for name in mm.schedules.names() if name not in (*SPLIT, "1f1b")]


def way(schedule, count):
    """Submesh of each stage."""
    order = [*range(count)]
    return order + order[::-1] if schedule in V_SHAPES else order * 2 if schedule in TWICE else order


def model(split):
    def loss(weights, x):
        for stage, w in enumerate(weights):
            x = split(stage, lambda w, x: jnp.tanh(x @ w))(w, x)
        return jnp.sum(x**2)

    return loss


def clipped(loss, weights, x):
    grads = jax.grad(loss)(weights, x)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in grads))
    return [g * jnp.minimum(1, 0.1 / norm) for g in grads]


def guarded(loss, weights, x):
    value, grads = jax.value_and_grad(loss)(weights, x)
    norm = sum(jnp.vdot(g, g) for g in grads)
    return value, [jnp.where(jnp.isfinite(norm), g, 0) for g in grads]


def clipped_twice(loss, weights, x):
    grads = clipped(loss, weights, x)
    norm = sum(jnp.vdot(g, g) for g in grads)
    return [g / (1 + norm) for g in grads], norm


def by_optax(loss, weights, x):
    transform = optax.apply_if_finite(optax.clip_by_global_norm(0.1), 2)
    return transform.update(jax.grad(loss)(weights, x), transform.init(weights))[0]


def arguments(stages):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(4, 4)).astype(np.float32) for _ in range(stages)], rng.normal(size=(8, 4)).astype("f")


def jitted(finish, schedule, count):
    """The pipeline, its meaning in plain JAX, and arguments."""
    on = way(schedule, count)
    body = functools.partial(finish, model(Split(submeshes(4, (1,)), placement=tuple(on))))
    loop = mm.microbatch(body, size=2, argnum=1, schedule=schedule)
    return mm.jit(loop), jax.jit(microbatched(body, size=2, argnum=1)), arguments(len(on))


def check(finish, schedule, count):
    f, reference, args = jitted(finish, schedule, count)
    assert_same(f(*args), reference(*args))


@pytest.mark.telling("zb-v", "1f1b", "gpipe", "interleaved", "auto")
@pytest.mark.parametrize(
    "schedule", [*SPLIT, "1f1b", *(pytest.param(name, marks=pytest.mark.longer) for name in (*OTHERS, "auto"))]
)
def test_a_clip_in_each_microbatch(schedule):
    check(clipped, schedule, 2 if schedule in (*V_SHAPES, "interleaved-zb") else 3)


@pytest.mark.telling("by_optax")
@pytest.mark.parametrize("finish", [guarded, clipped_twice, by_optax])
def test_what_else_waits_for_all_gradients(finish):
    check(finish, "zb-h1", 3)


def test_it_runs_when_the_gradients_of_all_stages_are_there(tmp_path):
    """W makes those of the last stage, two microbatches late."""
    f, _, args = jitted(clipped, "zb-h1", 3)
    plan = f.plan(*args)
    runs = [i for i in plan.instructions if i.kind == "RUN" and i.microbatch is not None]
    cells = [[f"{i.phase}{i.microbatch}" for i in runs if i.submesh == submesh] for submesh in range(3)]
    assert list(map(" ".join, cells)) == [
        "F0 F1 F2 B0 F3 B1 L0 B2 L1 B3 L2 L3",
        "F0 F1 B0 F2 B1 W0 F3 L0 B2 W1 B3 L1 W2 W3 L2 L3",
        "B0 B1 B2 W0 L0 B3 W1 W2 L1 W3 L2 L3",
    ]
    simulation = plan.simulate({"F": 1, "B": 1, "W": 1})
    assert simulation.makespan < jitted(clipped, "1f1b", 3)[0].plan(*args).simulate({"F": 1, "B": 1, "W": 1}).makespan
    plan.to_svg(tmp_path / "late.svg", plan.estimate())
    assert "late: waits for all stages" in (tmp_path / "late.svg").read_text(encoding="utf-8")
