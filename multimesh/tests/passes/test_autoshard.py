"""Which dimensions go together, and how far a constraint reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from multimesh.passes.placing.derive_layouts import derive_layouts
from programs import ones, place_program

import multimesh as mm

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
OTHER = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), ("data", "other"))


def derived(fn, *args, meshes=(MESH,)):
    """Spec of each argument on the submesh of the first task that reads it; None where nothing was derived."""
    program = place_program(fn, *args)
    layouts = derive_layouts(program, [None] * len(program.inputs)).specs
    return [next((layouts[v, m] for m in meshes if (v, m) in layouts), None) for v in program.inputs]


def result_is(spec, fn):
    """``fn`` as a task whose result is constrained."""
    return mm.task(lambda *args: mm.with_sharding_constraint(fn(*args), spec), "a", mesh=MESH)


@pytest.mark.parametrize(
    ("fn", "shapes", "result", "specs"),
    [
        (jnp.sin, [(4, 6)], P("data", "model"), [P("data", "model")]),
        (jnp.add, [(4, 6), (6,)], P("data", "model"), [P("data", "model"), P("model")]),
        (lambda x: x.T, [(4, 6)], P("data"), [P(None, "data")]),
        (lambda x: x[:, None], [(4, 6)], P("data", None, "model"), [P("data", "model")]),
        (lambda x: x.reshape(4, 3, 2), [(12, 2)], P("data", None, "model"), [P("data", "model")]),
        (lambda x: x.reshape(12, 2), [(4, 3, 2)], P("data", "model"), [P("data", None, "model")]),
        (lambda x: x.sum(1), [(4, 6, 2)], P("data", "model"), [P("data", None, "model")]),
        (jnp.matmul, [(4, 6), (6, 8)], P("data", "model"), [P("data", None), P(None, "model")]),
        (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(2, 4, 6), (2, 6, 8)], P("data"), [P("data"), P("data")]),
        (lambda x, y: jnp.concatenate([x, y]), [(4, 6), (2, 6)], P(None, "model"), [P(None, "model")] * 2),
        (lambda x: x[:2], [(4, 6)], P(None, "model"), [P(None, "model")]),
        (jax.nn.softmax, [(4, 6)], P("data"), [P("data")]),
    ],
)
def test_links_of_operations(fn, shapes, result, specs):
    layouts = derived(result_is(result, fn), *(ones(*s) for s in shapes))
    assert [tuple(s) for s in layouts] == [
        tuple(s) + (None,) * (len(f) - len(s)) for s, f in zip(specs, layouts, strict=True)
    ]


def test_an_embedding_is_laid_out_by_its_width_and_its_tokens_by_the_batch():
    tokens = jax.ShapeDtypeStruct((4, 8), np.int32)
    table, indices = derived(result_is(P("data", None, "model"), lambda e, x: e[x]), ones(10, 6), tokens)
    assert (table, indices) == (P(None, "model"), P("data", None))


def test_labels_are_laid_out_as_the_logits_that_they_pick_from():
    def pick(logits, labels):
        logits = mm.with_sharding_constraint(logits, P("data", None))
        return jnp.take_along_axis(logits, labels[:, None], 1).sum()

    labels = jax.ShapeDtypeStruct((4,), np.int32)
    assert derived(mm.task(pick, "a", mesh=MESH), ones(4, 8), labels) == [P("data", None), P("data")]


def test_the_nearest_constraint_wins_and_one_that_replicates_stops_others():
    assert derived(_in_task, ones(4, 6)) == [P(None, "model")]


def _in_task(x):
    with mm.task(mesh=MESH, name="a"):
        x = mm.with_sharding_constraint(jnp.cos(x), P(None, "model"))
        return mm.with_sharding_constraint(jnp.sin(x), P("data", None))


def test_an_axis_is_used_once_a_value():
    """Both dimensions reach the same constraint."""
    layouts = derived(result_is(P("data"), lambda x: x.sum(0) + x.sum(1)), ones(4, 4))
    assert sorted(map(str, layouts[0])) == ["None", "data"]


def test_through_a_microbatch_loop_to_the_batch_and_the_parameter():
    def f(w, x):
        return mm.microbatch(lambda w, x: result_is(P("data", "model"), jnp.matmul)(w, x).sum(), size=2, argnum=0)(w, x)

    assert derived(f, ones(6, 4), ones(4, 8)) == [P("data", None), P(None, "model")]


def test_an_axis_does_not_reach_a_submesh_that_lacks_it():
    def f(x, y):
        h = result_is(P("data", "model"), jnp.sin)(x)
        return mm.task(jnp.add, "b", mesh=OTHER)(h, y)

    assert derived(f, ones(4, 6), ones(4, 6), meshes=(MESH, OTHER)) == [P("data", "model"), P("data", None)]


def test_without_constraints_nothing_is_derived():
    assert derived(mm.task(jnp.sin, "a", mesh=MESH), ones(4)) == [None]
