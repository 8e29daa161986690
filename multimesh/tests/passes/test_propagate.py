"""Layouts carried through operations and plans, against those that XLA gives where it may choose."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MLP, TRANSFORMER
from multimesh.core.specs import axes_of
from multimesh.passes.planning.fix_layouts import Flow, ways
from multimesh.passes.reading.inline_calls import inline_calls
from multimesh.runtime.compile import kernel_function
from pipelines import Split, gradient, submeshes
from programs import jaxpr

import multimesh as mm

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


def propagate(ops, layouts, mesh):
    """Axes of what operations make, and of what was known before."""
    flow, env = Flow(), {}
    for value, axes in layouts.items():
        env[value] = flow.new(value, mesh)
        env[value].decide(enumerate(axes))
    flow.operations(ops, env, mesh)
    flow.fill()
    return {value: array.divided for value, array in env.items()}


def constrained(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH.abstract_mesh, P(*spec)))


def scanned(x, w):
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), y.sum(0)), x, w)


def gated(x, w):
    """A gated product of a layer under sequence parallelism: the weights are smaller than the rows."""
    y = x @ w
    return y, constrained(jax.nn.silu(y.reshape(4, 16, 6)), None, None, "model")


@pytest.mark.parametrize(
    ("fn", "shapes", "specs"),
    [
        (jnp.matmul, [(8, 4), (4, 6)], [P("data"), P(None, "model")]),
        (jnp.matmul, [(8, 4), (4, 6)], [P("data"), P(None, "data")]),  # an axis divides one dimension only
        (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), [(4, 8, 2), (4, 2, 6)], [P("data"), P("data", None, "model")]),
        (lambda x: x.T, [(8, 4)], [P("data")]),
        (lambda x: x.reshape(24, 2, 2), [(8, 3, 4)], [P("data", None, "model")]),
        (lambda x: x.reshape(4, 2, 6), [(8, 6)], [P("data", "model")]),
        (lambda x: x.sum(0), [(8, 4)], [P("data", "model")]),
        (lambda x: jnp.broadcast_to(x, (8, 4)), [(4,)], [P("model")]),
        (lambda x: x[:, None], [(8,)], [P("data")]),
        (lambda x, y: jnp.tanh(x) + y, [(8, 4), (8, 4)], [P(), P("data")]),
        (lambda x: x[:, :3], [(8, 4)], [P("data", None)]),
        (lambda table, i: table[i.astype("int32")], [(16, 4), (8,)], [P(None, "model"), P("data")]),
        (lambda x: jax.checkpoint(jnp.tanh)(x), [(8, 4)], [P("data")]),
        (scanned, [(8, 4), (3, 4, 4)], [P("data"), P()]),
        (lambda x: constrained(x, None, "model"), [(8, 4)], [P("data")]),
        # One axis divides both operands: the larger keeps it, unless a constraint after the product says otherwise.
        (jnp.matmul, [(8, 4), (4, 64)], [P("model"), P(None, "model")]),
        (jnp.matmul, [(64, 4), (4, 8)], [P("model"), P(None, "model")]),
        (jnp.matmul, [(64, 4), (4, 48)], [P(("data", "model")), P(None, "model")]),
        (gated, [(4, 16, 8), (8, 6)], [P(None, "model"), P(None, "model")]),
        (lambda x, i: x - jax.nn.one_hot(i.astype("int32"), 8), [(4, 8), (4,)], [P(None, "model"), P("model")]),
        (lambda x: jnp.cumsum(jnp.concatenate([x, x], 1), 1), [(8, 4)], [P("data")]),
    ],
)
def test_layouts_are_those_that_xla_chooses(fn, shapes, specs):
    args = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(MESH, p))
        for s, p in zip(shapes, specs, strict=True)
    ]
    compiled = jax.jit(fn).lower(*args).compile()
    program = inline_calls(jaxpr(fn, *args), jax.devices())
    names = [tuple(map(axes_of, spec)) for spec in specs]
    layouts = propagate(program.items, dict(zip(program.inputs, names, strict=True)), MESH)
    for out, layout in zip(program.outputs, jax.tree.leaves(compiled.output_shardings), strict=True):
        shape = out.aval.shape
        axes = (*layouts[out], *((),) * (len(shape) - len(layouts[out])))
        shard = tuple(n // ways((names,), MESH) for n, names in zip(shape, axes, strict=True))
        assert shard == layout.shard_shape(shape)


def test_rows_that_are_looked_up_are_divided_as_their_numbers():
    """So that the layers after it gather weights; XLA alone would divide the features, as the table does."""
    program = inline_calls(jaxpr(lambda table, i: table[i], jnp.ones((16, 4)), jnp.ones((8,), "int32")), jax.devices())
    layouts = dict(zip(program.inputs, [((), ("data",)), (("data",),)], strict=True))
    assert propagate(program.items, layouts, MESH)[program.outputs[0]] == (("data",), ())


def convolved(x, w):
    return jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


@pytest.mark.parametrize(("again", "axes"), [(False, ((), ("data",))), (True, (("data",), ()))])
def test_what_a_kernel_gathered_for_one_product_is_gathered_for_another(again, axes):
    """The weight has more bytes than the rows, so that alone it stays divided."""

    def products(x, w):
        y = x @ w if again else jnp.repeat(x, 16, axis=1)
        return y, y @ w.T

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 4), (4, 64))]
    program = inline_calls(jaxpr(products, *args), jax.devices())
    layouts = propagate(program.items, dict.fromkeys(program.inputs, (("data",), ())), MESH)
    assert layouts[program.outputs[1]] == axes


@pytest.mark.parametrize(
    ("fn", "shapes", "specs"),
    [
        (convolved, [(4, 8, 6), (3, 6, 2)], [P("data"), P(None, None, "model")]),
        (lambda x, i: jnp.zeros((8, 4)).at[i.astype("int32")].add(x), [(6, 4), (6,)], [P(None, "model"), P()]),
        (
            lambda x: jax.lax.while_loop(lambda c: c[0].sum() < 3, lambda c: (c[1], c[0]), (x, x))[0],
            [(8, 4)],
            [P("data")],
        ),
        (lambda x, y: jax.lax.cond(x.sum() > 0, lambda: x, lambda: y), [(8, 4), (8, 4)], [P("data"), P("data")]),
        (lambda x: jnp.sort(x, 1), [(8, 4)], [P("data")]),
        (lambda x: jax.lax.top_k(x, 2)[0], [(8, 4)], [P("data")]),
        (jnp.linalg.cholesky, [(8, 4, 4)], [P("data")]),
        (lambda x: jax.lax.scan(lambda c, r: (c + r, c), jnp.zeros((4,)), x)[1], [(8, 4)], [P(None, "model")]),
    ],
    ids=["conv", "scatter", "while", "cond", "sort", "top_k", "cholesky", "carry from zeros"],
)
def test_results_are_divided_at_least_as_xla_divides_them(fn, shapes, specs):
    test_layouts_are_those_that_xla_chooses(fn, shapes, specs)


def fused(name, **params):
    """An operation of cuDNN's name and types, which only GPUs have."""
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *operands, results, **_: [jax.core.ShapedArray(s, jnp.float32) for s in results])
    return lambda *arrays: primitive.bind(*arrays, **params)


@pytest.mark.parametrize(
    ("layout", "shape", "axes"),
    [(0, (4, 16, 8, 2), ("data", None, "model", None)), (1, (4, 8, 16, 2), ("data", "model", None, None))],
    ids=["tokens first", "heads first"],
)
def test_sums_of_fused_attention_lie_as_the_heads_of_its_queries(layout, shape, axes):
    sums = (4, 8, 16)
    forward = fused("dot_product_attention_fwd_wrapper", layout=layout, results=(shape, sums))
    backward = fused("dot_product_attention_bwd_wrapper", layout=layout, results=(shape,) * 3)

    def both(q, k, v):
        out, residuals = forward(q, k, v)
        return out, residuals, backward(q, k, v, residuals, out)

    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(3)]
    program = inline_calls(jaxpr(both, *types), jax.devices())
    names = tuple((name,) if name else () for name in axes)
    layouts = propagate(program.items, dict.fromkeys(program.inputs, names), MESH)
    assert [layouts[v] for v in program.outputs] == [names, (("data",), ("model",), ()), *[names] * 3]


@pytest.mark.telling("1f1b-mlp", "zb-h1-transformer")
@pytest.mark.parametrize("model", [MLP, pytest.param(TRANSFORMER, marks=pytest.mark.longer)], ids=lambda m: m.name)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_slot_of_a_plan_is_divided_less_than_xla_would(model, schedule):
    """Rows over one axis, the columns of weights over the other; each program compiled again, free to choose."""
    split = Split(submeshes(2, (2, 2)))
    params, batch = model.init(2), model.batch(8, 0)

    def tensor_parallel(x):
        by = P(*[None] * (x.ndim - 1), "model") if x.ndim > 1 and x.shape[-1] % 2 == 0 else P()
        return jax.device_put(x, NamedSharding(x.sharding.mesh, by))

    placed = jax.tree.map(tensor_parallel, split.place(params, model.owners(params)))
    plan = mm.jit(gradient(model, split, size=4, rows=8, schedule=schedule)).plan(placed, split.lay_out(batch))
    steps = {s.kernel: s for s in reversed(plan.instructions) if s.kernel is not None and s.ins}
    divided = 0
    for number, step in steps.items():
        args = [
            jax.ShapeDtypeStruct(plan.slots[s].shape, plan.slots[s].dtype, sharding=plan.layouts[s]) for s in step.ins
        ]
        free = jax.jit(kernel_function(plan.kernels[number], plan), keep_unused=True).lower(*args).compile()
        for slot, sharding in zip(step.outs, free.output_shardings, strict=True):
            shape = plan.slots[slot].shape
            if slot in step.ins or slot in plan.like:
                continue  # a sum or a gradient lies as its parameter
            assert np.prod(plan.layouts[slot].shard_shape(shape)) <= np.prod(sharding.shard_shape(shape)), step
            divided += plan.layouts[slot].shard_shape(shape) != shape
    assert divided > 4
