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
from models import MLP, mlp_block
from pipelines import Split, assert_same, submeshes

import multimesh as mm
from multimesh import errors

HERE = Path(__file__).name
X = np.ones((8, 4), np.float32)


def here():
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


@pytest.mark.parametrize("case", BAD_TASKS)
def test_bad_task(case):
    with pytest.raises(mm.MultiMeshError) as error:
        mm.task(mlp_block, name="block", **BAD_TASKS[case])
    assert "\n" not in str(error.value).strip()


def test_a_task_of_something_that_cannot_be_called():
    with pytest.raises(mm.MultiMeshError):
        mm.task(3, name="three", mesh=MESH)


def total(x):
    return x.sum()


BAD_LOOPS = {
    "size does not divide the rows": ({"size": 3}, (X,)),
    "size is larger than the rows": ({"size": 16}, (X,)),
    "leaves of different rows": ({"size": 2}, ((X, X[:4]),)),
    "a scalar in the batch": ({"size": 2}, ((X, np.float32(1)),)),
    "dim beyond the rank": ({"size": 2, "dim": 2}, (X,)),
    "argnum beyond the arguments": ({"size": 2, "argnum": 1}, (X,)),
    "an empty batch": ({"size": 2}, ({},)),
}


@pytest.mark.parametrize("case", BAD_LOOPS)
def test_bad_microbatch(case):
    options, args = BAD_LOOPS[case]
    with pytest.raises(mm.MultiMeshError):
        mm.jit(mm.microbatch(lambda x: jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, x)), **options))(*args)


@pytest.mark.parametrize("options", [{"size": 0}, {"size": -2}, {"size": 2, "schedule": "2f2b"}, {"size": 2.5}])
def test_bad_microbatch_options(options):
    with pytest.raises(mm.MultiMeshError):
        mm.jit(mm.microbatch(total, **options))(X)


def test_an_unknown_schedule_lists_the_known_ones():
    with pytest.raises(mm.MultiMeshError, match="1f1b"):
        mm.jit(mm.microbatch(total, size=2, schedule="2f2b"))(X)


def test_zb_h1_needs_as_many_submeshes_as_stages():
    """Two stages a submesh need a schedule with chunks; the message says which to take."""
    split = Split(submeshes(2, (1,)))
    f = mm.microbatch(jax.value_and_grad(lambda p, b: MLP.loss(p, b, split)), size=2, argnum=1, schedule="zb-h1")
    with pytest.raises(mm.MultiMeshError, match=r"test_errors.*py:\d+: .*use interleaved, gpipe"):
        mm.jit(f)(MLP.init(4), MLP.batch(8, 0))


def test_a_stack_prefix_that_does_not_fit():
    f = mm.microbatch(lambda x: (x.sum(), x), size=2, stack={"x": True})
    with pytest.raises(mm.MultiMeshError):
        mm.jit(f)(X)


def on(stage, fn):
    return Split(submeshes(2, (2,)))(stage, fn)


def test_tasks_of_two_submeshes_in_the_branches_of_a_cond():
    line = here() + 3

    def f(x):
        return lax.cond(x.sum() > 0, on(0, jnp.sin), on(1, jnp.cos), x)

    with pytest.raises(mm.MultiMeshError) as error:
        mm.jit(f)(X)
    assert names_line(error, line)


def test_tasks_in_a_while_loop():
    line = here() + 6

    def f(x):
        def body(x):
            return on(1, jnp.sin)(on(0, jnp.cos)(x))

        return lax.while_loop(lambda x: x.sum() > 100, body, x)

    with pytest.raises(mm.MultiMeshError) as error:
        mm.jit(f)(X)
    assert names_line(error, line)


def test_tasks_in_a_scan_that_is_no_microbatch_loop():
    """The remedy is named: microbatch, or a Python loop."""
    line = here() + 6

    def f(x):
        def body(c, _):
            return on(1, jnp.sin)(on(0, jnp.cos)(c)), None

        return lax.scan(body, x, None, length=3)[0]

    with pytest.raises(mm.MultiMeshError) as error:
        mm.jit(f)(X)
    assert names_line(error, line)


def test_a_task_inside_a_task_of_another_submesh():
    line = here() + 3

    def f(x):
        return on(0, lambda x: on(1, jnp.sin)(x) + 1)(x)

    with pytest.raises(mm.MultiMeshError) as error:
        mm.jit(f)(X)
    assert names_line(error, line)


def test_a_task_inside_a_task_of_the_same_submesh_is_part_of_it():
    y = mm.jit(lambda x: on(1, lambda x: on(1, jnp.sin)(x) + 1)(x))(X)
    assert_same(y, jnp.sin(X) + 1)
    assert set(y.devices()) == set(submeshes(2, (2,))[1].devices.flat)


def test_register_task_with_a_bad_regex():
    with pytest.raises(mm.MultiMeshError):
        mm.register_task(r"layers_(\d+", mesh=MESH)


def test_register_task_without_a_submesh():
    with pytest.raises(mm.MultiMeshError):
        mm.register_task(r"layers_(\d+)")


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
    call, who = forms[form]
    line = fn.__code__.co_firstlineno
    with pytest.raises(mm.UsageError, match=rf"test_errors.py:{line}: {who} is traced.*jnp.where.*JAX says: ") as told:
        mm.jit(call)(X)
    assert "concrete" in str(told.value.__cause__) or "traced array" in str(told.value.__cause__)


def test_an_export_says_why_there_is_none():
    with pytest.raises(mm.UsageError, match=r"<lambda>: jax\.export writes one program, and this function runs as"):
        jax.export.export(mm.jit(lambda x: PLACED(x)))(X)
    with pytest.raises(mm.UsageError, match=r"jax\.export writes one program, and this function runs as several"):
        mm.jit(PLACED).lower(X).export()
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
    with mm.register_task(pattern, mesh=MESH) as made, pytest.raises(mm.UsageError, match="'layers_0'") as error:
        mm.jit(scoped)(X)
    assert names_line(error, here() - 2)
    assert repr(made.pattern.pattern) in str(error.value)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (scoped, "its scopes are 'layers_0', 'layers_1'"),
        (jnp.sin, "scope_nnx"),
        (lambda x: mm.task(jnp.sin, "s", mesh=MESH)(x), None),
    ],
)
def test_a_registered_pattern_that_is_far_from_every_scope_warns(fn, said):
    """The function may be another than it was registered for; and where there are tasks, that is no surprise."""
    with mm.register_task(r"decoder/block(\d+)", mesh=MESH), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_same(mm.jit(fn)(X), fn(X) if said else jnp.sin(X))
    told = [str(w.message) for w in seen if "register_task" in str(w.message)]
    assert [said in text for text in told] == ([True] if said else [])


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
@pytest.mark.parametrize("form", ["straight", "microbatch", "donated", "outside tasks", "finite"])
def test_debug_nans(flag, value, kind, form):
    """FloatingPointError, as JAX's own, with the task and the user's line."""
    line = here() + 3

    def f(x):
        h = on(0, lambda x: jnp.log(x) if form != "outside tasks" else x)(x)
        return on(1, jnp.cos)(jnp.log(h) if form == "outside tasks" else h)

    wrapped = mm.microbatch(f, size=2) if form == "microbatch" else f
    jitted = mm.jit(wrapped, donate_argnums=0 if form == "donated" else ())
    with flag(True):
        if form == "finite":
            assert_same(jitted(X + 1), jax.jit(f)(X + 1))
            return
        who = "outside tasks" if form == "outside tasks" else "task 'stage0'"
        said = rf"{who}.*invalid value \({kind}\) encountered in log"
        if form == "donated":
            said += "|run without donate_argnums"
        with pytest.raises(FloatingPointError, match=said) as error:
            jitted(jnp.array(value))
    assert form == "donated" or names_line(error, line, line + 1)


def test_debug_nans_with_explicit_axes():
    front, back = (
        jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,))
        for mesh in submeshes(2, (2,))
    )
    x = jax.device_put(-X, jax.sharding.NamedSharding(front, jax.sharding.PartitionSpec(front.axis_names)))

    def f(x):
        return mm.task(jnp.cos, "back", mesh=back)(mm.task(jnp.log, "front", mesh=front)(x))

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"'front': invalid value \(nan\) .* in log"):
        mm.jit(f)(x)


@pytest.mark.parametrize("wrap", [jax.value_and_grad, jax.jit])
@pytest.mark.parametrize("loop", [True, False])
def test_disable_jit_runs_operation_by_operation(wrap, loop):
    """So that prints and breakpoints in the function see values, also on arguments of several submeshes."""
    seen = []

    def loss(params, x):
        y = on(0, lambda w, x: seen.append(x) or jnp.tanh(x @ w))(params[0], x)
        return on(1, lambda w, h: seen.append(h) or (h @ w).sum())(params[1], y)

    f = mm.microbatch(wrap(loss), size=2, argnum=1) if loop else wrap(loss)
    want = jax.jit(jax.value_and_grad(two_stages) if wrap is jax.value_and_grad else two_stages)(list(W), X)
    jitted = mm.jit(f)
    with jax.disable_jit():
        got = jitted(placed_weights(), X)
        runs = len(seen)
        assert jitted.plan(list(W), X).submeshes == submeshes(2, (2,))  # a plan can be had all the same
    assert_same(got, want)
    assert runs == (8 if loop else 2)
    assert wrap is jax.value_and_grad or not any(isinstance(x, jax.core.Tracer) for x in seen[:runs])


SMALL = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


@pytest.mark.parametrize("name", SMALL)
def test_small_types_between_submeshes_and_as_arguments(name):
    dtype = getattr(jnp, name)
    x = jnp.linspace(0.25 if "8m0" in name else 0 if name[0] == "u" else -2, 1, 32).reshape(8, 4)

    def f(x, y):
        small = on(0, lambda x: x.astype(dtype))(x)
        return on(1, lambda h, y: h.astype(jnp.float32) + y.astype(jnp.float32))(small, y), small

    y = np.asarray(x.astype(dtype))
    wants = jax.jit(f)(x, y)
    assert_same([np.asarray(r, np.float32) for r in mm.jit(f)(x, y)], [np.asarray(r, np.float32) for r in wants])
    assert_same(mm.jit(mm.microbatch(lambda x: f(x, x)[0], size=2))(x), mm.microbatch(lambda x: f(x, x)[0], size=2)(x))


@pytest.mark.parametrize(
    "answer",
    [None, 3, "ab", (0, "n"), ((0, 1),), ((0, 1, 2), "n"), ((0, 0.5), "n"), ((0, 1), 3), ((1, 0), "n"), ((0, 99), "n")],
)
def test_a_callback_that_returns_something_else(answer):
    with (
        mm.register_task(r"layers_(\d+)", callback=lambda name, backprop: answer),
        pytest.raises(mm.UsageError, match=r"register_task\('layers_.*callback .*'0'"),
    ):
        mm.jit(scoped)(X)


def test_a_callback_that_takes_other_arguments_is_refused_at_once():
    with pytest.raises(mm.UsageError, match=r"callback= is called with \(name, backprop\), which it does not"):
        mm.register_task(r"layers_(\d+)", callback=lambda name: ((0, 1), name))
    for callback in (lambda *args: ((0, 1), "a"), lambda name, backprop, extra=0: ((0, 1), "a"), divmod):
        mm.register_task(r"layers_(\d+)", callback=callback).remove()


@pytest.mark.parametrize("options", [3, "fast", [1], {"no_such_option": 1}])
def test_wrong_arguments_of_what_was_compiled(options):
    lowered = mm.jit(PLACED).lower(X)
    if not isinstance(options, dict):
        with pytest.raises(mm.UsageError, match="compiler_options must be a mapping"):
            lowered.compile(options)
        return
    compiled = lowered.compile()
    for wrong in (2.5, "nonsense", X[:2], X.astype(np.int32), object()):
        with pytest.raises(mm.UsageError, match=r"argument|compiled for \w+ of type float32\[8, 4\]"):
            compiled(wrong)
    for repeats in (0, 2.5, None):
        with pytest.raises(mm.UsageError, match="profile: repeats must be"):
            compiled.profile(X, repeats=repeats)
    for path in (3, None, [1]):
        for write in (compiled.plan.to_svg, compiled.plan.to_html, compiled.plan.to_perfetto):
            with pytest.raises(mm.UsageError, match="path must be a path"):
                write(path)
    for costs, wanted in (
        (3, "costs must be a mapping"),
        (None, "costs must be a mapping"),
        ("F", "device: there is no"),
    ):
        with pytest.raises(mm.UsageError, match=wanted):
            compiled.plan.forecast(costs)


@pytest.mark.parametrize(
    ("fn", "who"),
    [
        (mm.task(lambda x: "text", "bad", mesh=MESH), "task 'bad'"),
        (mm.microbatch(lambda x: object(), size=2), "microbatch"),
        (lambda x: (PLACED(x), MESH), "<lambda>"),
    ],
)
def test_a_result_that_is_no_array_is_told_of_the_users_function(fn, who):
    who = rf"test_errors.py:\d+: {who} must return a pytree of arrays; it returned a value of type"
    with pytest.raises(mm.UsageError, match=who):
        mm.jit(fn)(X)


def test_axes_of_a_spec_that_are_no_names():
    with pytest.raises(mm.UsageError, match=r"task 'a': .*an axis must be a str, got 3"):
        mm.jit(mm.task(lambda x: mm.with_sharding_constraint(x, jax.sharding.PartitionSpec(3)), "a", mesh=MESH))(X)


def test_a_released_package_links_its_errors_to_their_page(monkeypatch):
    monkeypatch.setattr(errors, "_page", lambda: "https://site.example/docs/errors.html")
    for call, anchor in (
        (lambda: mm.microbatch(len, size=0), "core-checks"),
        (lambda: mm.microbatch(len, size=1, schedule="lifo"), "schedules"),
        (lambda: mm.linalg.solve(np.eye(4), np.ones(4)), "core-specs"),
    ):
        with pytest.raises(mm.MultiMeshError) as raised:
            call()
        assert raised.value.__notes__ == [f"https://site.example/docs/errors.html#{anchor}"]
