"""What cannot be done raises MultiMeshError that names the user's line, before anything runs."""

import inspect
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from models import MLP, mlp_block
from pipelines import Split, assert_same, submeshes

import multimesh as mm
from multimesh import errors

HERE = Path(__file__).name
X = np.ones((8, 4), np.float32)


def line_here():
    """The caller's line."""
    return inspect.currentframe().f_back.f_lineno


def names_line(error, first, last=None):
    """The message has this file's name and a line of the range."""
    message = str(error.value)
    lines = [int(n) for n in re.findall(re.escape(HERE) + r'(?::|", line )(\d+)', message)]
    assert any(first <= n <= (last or first) for n in lines), message
    return True


def devices(*shape):
    return np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)


MESH = submeshes(1, (2, 2))[0]
PLACED = mm.task(jnp.sin, "first", mesh=MESH)

BAD_TASKS = {
    "no submesh": {},
    "mesh and devices": {"mesh": MESH, "devices": devices(2), "device_axes": ("data",)},
    "too few axes": {"devices": devices(2, 2), "device_axes": ("data",)},
    "too many axes": {"devices": devices(2), "device_axes": ("data", "model")},
    "an axis twice": {"devices": devices(2, 2), "device_axes": ("data", "data")},
    "a device twice": {"devices": np.array([jax.devices()[0]] * 2), "device_axes": ("data",)},
    "no devices": {"devices": np.array([], dtype=object), "device_axes": ("data",)},
    "logical axes without axes": {"devices": devices(2), "logical_axes": {"batch": "data"}},
    "a logical axis twice": {"mesh": MESH, "logical_axes": (("batch", "data"), ("batch", None))},
    "logical axes onto no axis of the mesh": {"mesh": MESH, "logical_axes": {"batch": "nowhere"}},
    "device_axes of a mesh": {"mesh": MESH, "device_axes": ("data", "model")},
    "not a mesh": {"mesh": "cpu"},
    "not devices": {"devices": [0, 1], "device_axes": ("data",)},
}


WRONG = {
    **{case: lambda where=where: mm.task(mlp_block, name="block", **where) for case, where in BAD_TASKS.items()},
    "a task of a number": lambda: mm.task(3, name="three", mesh=MESH),
    "a scope's bad regex": lambda: mm.register_task(r"layers_(\d+", mesh=MESH),
    "a scope without a submesh": lambda: mm.register_task(r"layers_(\d+)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_task_is_refused_at_once_in_a_line(case):
    with pytest.raises(mm.MultiMeshError) as error:
        WRONG[case]()
    assert "\n" not in str(error.value).strip()


@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs", "interleaved-zb", "kimi-k2"])
def test_a_schedule_of_two_stages_on_a_submesh_with_one(schedule):
    """It would wait as long as 1f1b or gpipe, which have fewer transfers; at the user's line."""
    split = Split(submeshes(2, (1,)))
    f = mm.microbatch(jax.value_and_grad(lambda p, b: MLP.loss(p, b, split)), size=2, argnum=1, schedule=schedule)
    with pytest.warns(
        UserWarning, match=rf"schedule {schedule} is for 2 stages .* on submeshes 0 1 0 1 in turn"
    ) as all_:
        mm.jit(f).plan(MLP.init(2), MLP.batch(8, 0))
    assert "test_errors" in all_[0].filename
    pipeline = mm.pipeline(lambda p, b: MLP.loss(p, b, lambda _, fn: fn), submeshes(2, (1,)))
    f = mm.microbatch(jax.value_and_grad(pipeline), size=2, argnum=1, schedule=schedule)
    with pytest.warns(UserWarning, match=r"pass the meshes to multimesh.pipeline once for each stage: \[a, b, a, b\]"):
        mm.jit(f).plan(MLP.init(2), MLP.batch(8, 0))


@pytest.mark.parametrize(
    "inside", [lambda f, x: f(x), lambda f, x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0]]
)
def test_a_shard_map_on_the_mesh_of_another_stage(inside):
    """The author of a loss for `pipeline` can't know its stage; JAX says only that devices do not fit."""
    meshes = submeshes(2, (2,))

    def loss(weights, x):
        double = jax.shard_map(lambda x: 2 * x, mesh=meshes[0], in_specs=P("data"), out_specs=P("data"))
        for w in weights:
            x = inside(double, jnp.tanh(x @ w))
        return jnp.mean(x**2)

    f = mm.microbatch(jax.value_and_grad(mm.pipeline(loss, meshes)), size=2, argnum=1)
    with pytest.raises(mm.UsageError, match=r"test_errors.py:\d+: in .* devices of another submesh .* leave mesh= out"):
        mm.jit(f)([X[:4], X[:4]], X)


def on(stage, fn):
    return Split(submeshes(2, (2,)))(stage, fn)


def on_both(x):
    return on(1, jnp.sin)(on(0, jnp.cos)(x))


AROUND_TASKS = {  # each on a line of its own, which the message names
    "branches": lambda x: lax.cond(x.sum() > 0, on(0, jnp.sin), on(1, jnp.cos), x),
    "a while loop": lambda x: lax.while_loop(lambda x: x.sum() > 100, on_both, x),
    "a scan that is no microbatch loop": lambda x: lax.scan(lambda c, _: (on_both(c), None), x, None, length=3)[0],
    "a task": lambda x: on(0, lambda x: on(1, jnp.sin)(x) + 1)(x),
}


@pytest.mark.parametrize("case", AROUND_TASKS)
def test_tasks_of_two_submeshes_inside_of_something(case):
    with pytest.raises(mm.MultiMeshError) as error:
        mm.jit(AROUND_TASKS[case])(X)
    assert names_line(error, AROUND_TASKS[case].__code__.co_firstlineno)


def test_a_task_inside_a_task_of_the_same_submesh_is_part_of_it():
    y = mm.jit(lambda x: on(1, lambda x: on(1, jnp.sin)(x) + 1)(x))(X)
    assert_same(y, jnp.sin(X) + 1)
    assert set(y.devices()) == set(submeshes(2, (2,))[1].devices.flat)


def test_a_failed_trace_is_not_cached():
    """The user's own exception comes out as it is, and the next call traces again."""
    fail = True

    def f(x):
        if fail:
            raise RuntimeError("the user's")
        return on(1, jnp.sin)(on(0, jnp.cos)(x))

    compiled = mm.jit(f)
    with pytest.raises(RuntimeError, match="the user's"):
        compiled(X)
    fail = False
    assert_same(compiled(X), jnp.sin(jnp.cos(X)))


ASKING = {  # for the value of a traced array: in a condition, as an index, as a shape, in NumPy
    "condition": lambda x: x if x.sum() > 0 else -x,
    "index": lambda x: x * [1, 2][x.sum().astype(int)],
    "shape": lambda x: jnp.zeros(x.sum().astype(int)),
    "mask": lambda x: x[x > 0],
    "numpy": lambda x: x * np.asarray(x),
}


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("form", ["task", "block", "microbatch", "jit"])
def test_a_value_that_is_asked_for_in_a_trace_names_the_users_line(asking, form):
    """JAX alone would name the function that wraps the user's."""
    fn = ASKING[asking]

    def block(x):
        with mm.task(mesh=MESH, name="a"):
            return fn(x)

    forms = {
        "task": (mm.task(fn, "a", mesh=MESH), "task 'a'"),
        "block": (block, "block"),
        "microbatch": (mm.microbatch(fn, size=2), "microbatch"),
        "jit": (fn, "<lambda>"),
    }
    call, name = forms[form]
    line = fn.__code__.co_firstlineno
    with pytest.raises(mm.UsageError, match=rf"test_errors.py:{line}: {name} is traced.*jnp.where.*JAX says: ") as info:
        mm.jit(call)(X)
    assert "concrete" in str(info.value.__cause__) or "traced array" in str(info.value.__cause__)


def test_an_export_says_why_there_is_none():
    with pytest.raises(mm.UsageError, match=r"<lambda>: jax\.export writes one program, and this function runs as"):
        jax.export.export(mm.jit(lambda x: PLACED(x)))(X)
    assert mm.jit(PLACED).trace(X).lower().plan.kernels


def test_a_deleted_input():
    params, batch = MLP.init(1), MLP.batch(8, 0)
    f = mm.jit(lambda p, x: on(0, mlp_block)(p, x))
    x = jax.device_put(batch["x"])
    f(params["stages"][0], x)
    x.delete()
    with pytest.raises(Exception, match="delete"):
        f(params["stages"][0], x)
    assert_same(f(params["stages"][0], batch["x"]), mlp_block(params["stages"][0], batch["x"]))


def scoped(x):
    for layer in range(2):
        with jax.named_scope(f"layers_{layer}"):
            x = jnp.tanh(x)
    return x


@pytest.mark.parametrize("pattern", [r"layer(\d+)", r"layers_(\d+)/mlp", r"layrs_(?P<n>[0-9]+)"])
def test_a_registered_pattern_that_matches_no_scope_lists_near_names(pattern):
    with mm.register_task(pattern, mesh=MESH) as context, pytest.raises(mm.UsageError, match="'layers_0'") as error:
        mm.jit(scoped)(X)
    assert names_line(error, line_here() - 2)
    assert repr(context.pattern.pattern) in str(error.value)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (scoped, "its scopes are 'layers_0', 'layers_1'"),
        (jnp.sin, "jax.named_scope in Flax NNX"),
        (lambda x: mm.task(jnp.sin, "s", mesh=MESH)(x), None),
    ],
)
def test_a_registered_pattern_that_is_far_from_every_scope_warns(fn, message):
    """The function may be another than it was registered for; and where there are tasks, that is no surprise."""
    with mm.register_task(r"decoder/block(\d+)", mesh=MESH), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        assert_same(mm.jit(fn)(X), fn(X) if message else jnp.sin(X))
    texts = [str(w.message) for w in record if "register_task" in str(w.message)]
    assert [message in text for text in texts] == ([True] if message else [])


def two_stages(params, x):
    return on(1, lambda w, h: (h @ w).sum())(params[1], on(0, lambda w, x: jnp.tanh(x @ w))(params[0], x))


W = np.random.default_rng(0).normal(size=(2, 4, 4)).astype(np.float32)


def placed_weights():
    return [jax.device_put(w, mesh.devices.flat[0]) for w, mesh in zip(W, submeshes(2, (2,)), strict=True)]


@pytest.mark.parametrize(
    "call",
    [
        two_stages,
        jax.grad(two_stages),
        mm.microbatch(two_stages, size=2, argnum=1),
        lambda p, x: jax.grad(mm.microbatch(two_stages, size=2, argnum=1))(p, x),
    ],
)
def test_tasks_outside_a_jit_on_arrays_of_several_submeshes(call):
    """JAX's "incompatible devices" with the remedy, which works."""
    with pytest.raises(mm.UsageError, match=r"(task 'stage1'|microbatch) outside multimesh.jit.*grad\(multimesh.jit"):
        call(placed_weights(), X)
    assert_same(jax.grad(mm.jit(two_stages))(placed_weights(), X), jax.jit(jax.grad(two_stages))(list(W), X))


def comes_back(params, x):
    h = on(1, jnp.matmul)(on(0, jnp.matmul)(x, params[0]), params[1])
    return on(0, lambda h: jnp.sum(jnp.sin(h)))(h)


def test_zb_h1_names_the_operation_that_makes_a_stage_more():
    lines, first = inspect.getsourcelines(comes_back)
    with pytest.raises(mm.UsageError, match=r"a stage more by this \w+ of task 'stage0'") as error:
        mm.jit(mm.microbatch(jax.grad(comes_back), size=2, argnum=1, schedule="zb-h1"))(list(W), X)
    assert names_line(error, first, first + len(lines))


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: mm.microbatch(f, size=2)])
def test_the_result_of_a_task_that_nobody_uses(wrap):
    def f(x):
        on(1, jnp.sin)(x)
        return x * 2

    assert_same(mm.jit(wrap(f))(X), jax.jit(wrap(f))(X))
    assert mm.jit(wrap(f)).plan(X).submeshes == submeshes(2, (2,))[1:]


@pytest.mark.parametrize(("flag", "value", "kind"), [(jax.debug_nans, -X, "nan"), (jax.debug_infs, 0 * X, "inf")])
@pytest.mark.parametrize("form", ["straight", "microbatch", "donated", "outside tasks", "finite", "explicit"])
def test_debug_nans(flag, value, kind, form):
    """FloatingPointError, as JAX's own, with the task and the user's line."""
    split = Split(submeshes(2, (2,)))
    if form == "explicit":
        split = Split(tuple(Mesh(m.devices, m.axis_names, axis_types=(AxisType.Explicit,)) for m in split.meshes))
        value = split.lay_out(value)
    line = line_here() + 3

    def f(x):
        h = split(0, lambda x: jnp.log(x) if form != "outside tasks" else x)(x)
        return split(1, jnp.cos)(jnp.log(h) if form == "outside tasks" else h)

    fn = mm.microbatch(f, size=2) if form == "microbatch" else f
    jitted = mm.jit(fn, donate_argnums=0 if form == "donated" else ())
    with flag(True):
        if form == "finite":
            assert_same(jitted(X + 1), jax.jit(f)(X + 1))
            return
        subject = "outside tasks" if form == "outside tasks" else "task 'stage0'"
        message = rf"{subject}.*invalid value \({kind}\) encountered in log"
        if form == "donated":
            message += "|run without donate_argnums"
        with pytest.raises(FloatingPointError, match=message) as error:
            jitted(value + 0)
    assert form == "donated" or names_line(error, line, line + 1)


@pytest.mark.parametrize("wrap", [jax.value_and_grad, jax.jit])
@pytest.mark.parametrize("loop", [True, False])
def test_disable_jit_runs_operation_by_operation(wrap, loop):
    """So that prints and breakpoints in the function see values, also on arguments of several submeshes."""
    arrays = []

    def loss(params, x):
        y = on(0, lambda w, x: arrays.append(x) or jnp.tanh(x @ w))(params[0], x)
        return on(1, lambda w, h: arrays.append(h) or (h @ w).sum())(params[1], y)

    f = mm.microbatch(wrap(loss), size=2, argnum=1) if loop else wrap(loss)
    expected = jax.jit(jax.value_and_grad(two_stages) if wrap is jax.value_and_grad else two_stages)(list(W), X)
    jitted = mm.jit(f)
    with jax.disable_jit():
        actual = jitted(placed_weights(), X)
        runs = len(arrays)
        assert jitted.plan(list(W), X).submeshes == submeshes(2, (2,))  # a plan can be had all the same
    assert_same(actual, expected)
    assert runs == (8 if loop else 2)
    assert wrap is jax.value_and_grad or not any(isinstance(x, jax.core.Tracer) for x in arrays[:runs])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (mm.task(lambda x: "text", "bad", mesh=MESH), r"test_errors.py:\d+: task 'bad' must return a pytree of arrays"),
        (mm.microbatch(lambda x: object(), size=2), r"test_errors.py:\d+: microbatch must return a pytree of arrays"),
        (lambda x: (PLACED(x), MESH), r"test_errors.py:\d+: <lambda> must .*; it returned a value of type"),
        (mm.task(lambda x: mm.with_sharding_constraint(x, P(3)), "a", mesh=MESH), "task 'a': .*must be a str, got 3"),
    ],
)
def test_results_and_specs_that_are_none_are_told_of_the_users_function(fn, message):
    with pytest.raises(mm.UsageError, match=message):
        mm.jit(fn)(X)


def test_a_released_package_links_its_errors_to_their_page(monkeypatch):
    monkeypatch.setattr(errors, "_page", lambda: "https://site.example/docs/troubleshooting.html")
    for call, anchor in (
        (lambda: mm.microbatch(len, size=0), "core-checks"),
        (lambda: mm.microbatch(len, size=1, schedule="lifo"), "schedules"),
        (lambda: mm.linalg.solve(np.eye(4), np.ones(4)), "core-specs"),
    ):
        with pytest.raises(mm.MultiMeshError) as error:
            call()
        assert error.value.__notes__ == [f"https://site.example/docs/troubleshooting.html#{anchor}"]


OF_WRONG_TYPE = (2.5, "nonsense", None, [1.5], {"a": 1}, (None,), object(), MESH, np.ones(3), True)
TASK, CALLBACK, LOOP = {"fn": jnp.sin, "name": "a"}, {"regex": "(a)", "callback": max}, {"fn": jnp.sin, "size": 2}
JIT, LAYOUT = {"fn": jnp.sin}, {"x": X}
TRAIN = {"fn": jnp.dot, "init_params": lambda: X.T, "initial_batch": X}

PARAMETERS = {  # function, its other arguments, parameter: which of the wrong values are right
    (mm.task, "fn"): (TASK | {"mesh": MESH}, {2}),
    (mm.task, "name"): (TASK | {"mesh": MESH}, {1, 2}),
    (mm.task, "mesh"): (TASK, {7}),
    (mm.task, "devices"): (TASK, ()),
    (mm.task, "device_axes"): (TASK | {"devices": devices(2, 2)}, {2}),
    (mm.task, "logical_axes"): (TASK | {"mesh": MESH}, {2}),
    (mm.register_task, "regex"): ({"mesh": MESH}, {1}),
    (mm.register_task, "mesh"): ({"regex": "a"}, {7}),
    (mm.register_task, "devices"): ({"regex": "a"}, ()),
    (mm.register_task, "callback"): ({"regex": "(a)"}, {7}),  # a mesh can be called
    (mm.register_task, "dims"): (CALLBACK, {2}),
    (mm.register_task, "device_axes"): (CALLBACK, {2, 4}),
    (mm.register_task, "logical_axes"): (CALLBACK | {"device_axes": ("x",)}, {2, 4}),
    (mm.microbatch, "fn"): (LOOP, {7}),
    (mm.microbatch, "size"): (LOOP, {2}),  # None: rows that are cut already
    (mm.microbatch, "dim"): (LOOP, ()),
    (mm.microbatch, "argnum"): (LOOP, ()),
    (mm.microbatch, "schedule"): (LOOP, ()),
    (mm.jit, "fn"): (JIT, {2, 7}),
    (mm.jit, "donate_argnums"): (JIT, {2}),
    (mm.jit, "static_argnums"): (JIT, {2}),
    (mm.jit, "devices"): (JIT, {2}),
    (mm.with_sharding_constraint, "spec"): (LAYOUT, ()),
    (mm.parallelize, "fn"): (TRAIN, {7}),
    (mm.parallelize, "init_params"): (TRAIN, ()),
    (mm.parallelize, "devices"): (TRAIN, {2}),
    (mm.schedules.get, "schedule"): ({}, ()),
    (mm.schedules.custom, "rows"): ({}, ()),
    (mm.schedules.load, "path"): ({}, ()),
    (mm.schedules.validate, "table"): ({"submeshes": 2, "chunks": 1, "microbatches": 2}, ()),
}


@pytest.mark.parametrize(("call", "parameter"), PARAMETERS, ids=lambda x: getattr(x, "__name__", x))
def test_every_parameter_of_a_wrong_type(call, parameter):
    """At once, in one line that names the parameter or what it is."""
    others, right = PARAMETERS[call, parameter]
    for i, value in enumerate(OF_WRONG_TYPE):
        if i in right:
            continue
        with pytest.raises(mm.UsageError) as error:
            call(**(others | {parameter: value}))
        message = str(error.value)
        words = (parameter, "callable", "first argument", "expression", "schedule", "device", "PartitionSpec")
        assert any(word in message for word in words), (value, message)
        assert "\n" not in message, (value, message)
