"""Jaxpr to operations: calls vanish, marks become tasks."""

import jax
import jax.numpy as jnp
import pytest
from programs import MESHES, inlined, names, on, ones

import multimesh as mm


def tasks(program):
    return [(op.prim.name, op.task.name if op.task else None) for op in program.items]


def _triple(fn):
    fn_vjp = jax.custom_vjp(fn)
    fn_vjp.defvjp(lambda x: (fn(x), x), lambda x, g: (g * jnp.cos(x),))
    return fn_vjp


HIDING = {  # around a task, where its operations stay inside of another
    "scan": lambda fn: lambda x: jax.lax.scan(lambda c, row: (c, fn(row)), 0.0, x)[1],
    "cond": lambda fn: lambda x: jax.lax.cond(x[0, 0] > 0, fn, jnp.cos, x),
    "fori_loop": lambda fn: lambda x: jax.lax.fori_loop(0, 2, lambda i, x: fn(x), x),
    "while_loop": lambda fn: lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 2, lambda c: fn(c) + 1, x),
    "map": lambda fn: lambda x: jax.lax.map(fn, x),
    "vmap": lambda fn: jax.vmap(fn),
    "custom_vjp": _triple,
    "checkpoint": jax.checkpoint,
    "microbatch": lambda fn: mm.microbatch(fn, size=2),
    "a scan in a cond": lambda fn: lambda x: jax.lax.cond(x[0, 0] > 0, HIDING["scan"](fn), jnp.cos, x),
    "a block in a map": lambda fn: lambda x: jax.lax.map(_block, x),
}


def _block(x):
    with mm.task(name="b", mesh=MESHES[1]):
        return jnp.cos(x)


@pytest.mark.parametrize(
    ("hiding", "transform"),
    [(h, t) for t in ("forward", "grad") for h in HIDING if (h, t) != ("while_loop", "grad")],  # JAX has none
)
def test_a_task_of_another_submesh_is_found_wherever_it_hides_in_a_task(hiding, transform):
    outer = on(0, HIDING[hiding](on(1, jnp.cos)))
    transform = {"forward": lambda fn: fn, "grad": jax.grad}[transform]
    with pytest.raises(mm.UsageError, match=r"test_inline.py:\d+: task 'b' is inside task 'a'"):
        inlined(transform(lambda x: jnp.sum(outer(x))), ones(4, 2))


def _scoped(x):
    with jax.named_scope("inner"):
        return jnp.cos(x)


@pytest.mark.parametrize("transform", [lambda fn: fn, jax.grad], ids=["forward", "grad"])
@pytest.mark.parametrize(
    "hiding", [lambda fn: fn, *map(HIDING.get, ("scan", "cond", "map", "checkpoint", "custom_vjp"))]
)
def test_a_registered_scope_of_another_submesh_is_found_wherever_it_hides_in_a_task(hiding, transform):
    outer = on(0, hiding(_scoped))
    with (
        mm.register_task("inner", mesh=MESHES[1]),
        pytest.raises(mm.UsageError, match=r"test_inline.py:\d+: task 'inner' is inside task 'a'"),
    ):
        inlined(transform(lambda x: jnp.sum(outer(x))), ones(4, 2))


def test_a_registered_scope_beside_the_context_of_a_task():
    def f(x):
        with mm.task(mesh=MESHES[0], name="a"):
            return _scoped(jnp.sin(x))

    with mm.register_task("inner", mesh=MESHES[0]):
        assert tasks(inlined(f, ones(2))) == [("sin", "a"), ("cos", "a")]
    with (
        mm.register_task("inner", mesh=MESHES[1]),
        pytest.raises(mm.UsageError, match=r"test_inline.py:\d+: task 'inner' is inside task 'a'"),
    ):
        inlined(f, ones(2))


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint, jax.jit])
def test_of_registered_scopes_inside_each_other_the_newest_registration_counts(wrap):
    def f(x):
        with jax.named_scope("whole"):
            return wrap(lambda x: jnp.sin(_scoped(x)))(x)

    with mm.register_task("whole", mesh=MESHES[0]), mm.register_task("inner", mesh=MESHES[1]):
        assert tasks(inlined(f, ones(2))) == [("cos", "inner"), ("sin", "whole")]
        with pytest.raises(mm.MultiMeshError, match="this scan has tasks on 2 submeshes inside"):
            inlined(HIDING["scan"](f), ones(4, 2))
    with mm.register_task("inner", mesh=MESHES[1]), mm.register_task("whole", mesh=MESHES[0]):
        assert tasks(inlined(f, ones(2))) == [("cos", "whole"), ("sin", "whole")]


def test_recomputation_is_tied_to_the_cotangent():
    """Without the barrier XLA would merge it with the forward pass, and remat would save nothing."""
    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    program = inlined(jax.grad(lambda x: jnp.sum(on(0, f)(x))), ones(2))
    kinds = names(program.items)
    assert kinds.count("optimization_barrier") == 1
    barrier = next(op for op in program.items if op.prim.name == "optimization_barrier")
    recomputed = [op for op in program.items if op.prim.name == "sin" and op.backward]
    assert recomputed
    assert any(set(op.reads) & set(barrier.outs) for op in recomputed)


def test_a_loop_inside_a_loop():
    inner = mm.microbatch(on(0, jnp.sum), size=1)
    with pytest.raises(mm.MultiMeshError, match="a microbatch loop inside another; use one loop"):
        inlined(mm.microbatch(lambda x: inner(x), size=2), ones(4))
