"""JAX's private parts: one file uses them, and everything works without."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import step
from multimesh.core import _compat
from multimesh.core._compat import executables, versions
from pipelines import submeshes

import multimesh

SOURCES = Path(multimesh.__file__).parent
STEP = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
import multimesh as mm
from multimesh.core import _compat

assert _compat.DeviceList is None and _compat.copy_shards is None
grid = np.array(jax.devices()).reshape(2, 2, 2)
kinds = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
meshes = [Mesh(g, ("data", "model"), axis_types=(kind,) * 2) for g, kind in zip(grid, kinds)]

def loss(w, x):
    h = mm.task(lambda w, x: jnp.tanh(x @ w), "a", mesh=meshes[0])(w[0], x)
    return jnp.mean(mm.task(lambda w, h: jnp.cos(h @ w), "b", mesh=meshes[1])(w[1], h))

def step(w, x):
    total = mm.microbatch(jax.value_and_grad(loss), argnum=1, size=4, schedule="1f1b")(w, x)
    return jax.tree.map(lambda g: g / 4, total)

w = [np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)] * 2
x = np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)
jitted = mm.jit(step)
assert jitted(w, x)[1][0].sharding.mesh == meshes[0]
result = jitted(w, x)
jax.tree.map(np.testing.assert_array_equal, result, jitted(w, x))
assert len(jitted.compiled) == 1
with jax.default_matmul_precision("highest"):
    jitted(w, x)
assert len(jitted.compiled) == 2
expected = jax.jit(jax.value_and_grad(loss))(w, x)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), result, expected)
try:
    mm.jit(lambda x: jax.lax.fori_loop(0, 2, lambda i, x: loss(w, x) + x, x))(x)
except mm.MultiMeshError as error:
    print(error)
"""


def test_only_one_file_names_private_parts_of_jax():
    rooms = {
        path.relative_to(SOURCES).parts[:2]
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"))
        or (isinstance(node, ast.Import) and any(name.name.startswith("jax._src") for name in node.names))
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("jax._src."))
        or (isinstance(node, ast.Attribute) and node.attr == "_src")
    }
    assert rooms <= {("core", "_compat")}


def test_a_step_without_private_parts():
    env = os.environ | {"MULTIMESH_PUBLIC_JAX": "1"}
    process = subprocess.run([sys.executable, "-c", STEP], env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert re.match(r"<string>:\d+: this (while|scan) has tasks on 2 submeshes", process.stdout)


def test_a_jax_that_was_tried_has_all_parts():
    assert versions.NEWER or _compat.DeviceList is not None


def test_a_jax_that_was_never_tried_is_named_when_it_does_not_work(monkeypatch):
    monkeypatch.setattr(versions, "NEWER", True)
    refusal = pytest.raises(multimesh.MultiMeshError, match=rf"does not work with jax {jax.__version__} .* never tried")
    with refusal, _compat.check_version():
        raise AttributeError("module 'jax' has no attribute 'x'")


@pytest.mark.parametrize(
    ("version", "message", "private"),
    [
        ((0, 9, 2), "MultiMesh needs jax>=0.10", ""),
        ((0, versions.NEWEST_TRIED[1] + 1, 0), "is newer than this MultiMesh", "False"),
    ],
)
def test_the_range_of_versions(version, message, private):
    """One that is too old is refused; one that was never tried is named once, and used by its public interface."""
    ask = "from multimesh.core import _compat; print(_compat.DeviceList is not None)"
    code = f"import jax; jax.__version_info__ = {version}; {ask}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stderr.count(message) == 1, process.stderr
    assert process.stdout.strip() == private


@pytest.mark.longer
def test_a_private_part_that_moved_is_named_once_and_done_without():
    """JAX itself took what it needs of it when it was imported."""
    (line,) = (line for line in STEP.splitlines() if line.startswith("assert _compat.DeviceList"))
    code = "import jax, jax.extend; del jax._src.config.trace_context" + STEP.replace(line, "assert _compat.DeviceList")
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    message = f"jax {jax.__version__} has no jax._src.config.trace_context: public functions take their place"
    assert process.stderr.count(message) == 1


def test_what_moved_within_an_object_of_jax_is_named_once():
    (mesh,) = submeshes(1, (2,))
    with pytest.warns(UserWarning, match="_lowering.*public functions take its place") as record:
        assert [executables.program_of(object(), mesh) for _ in range(2)] == [None, None]
    assert len(record) == 1


@pytest.mark.full
@pytest.mark.longer
@pytest.mark.telling("calls")
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(("test_jit", "test_explicit", "test_contexts", "test_resharding", "test_submeshes"), id="calls"),
        pytest.param(
            ("test_transforms", "test_schedules", "test_optimizers", "passes/test_weights", "passes/test_primitives"),
            id="programs",
        ),
    ],
)
def test_other_tests_hold_without_private_parts(files):
    """They reach for private parts: programs that are shared, laid out anew or carried over, and transfers."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *(f"multimesh/tests/{name}.py" for name in files)]
    env = os.environ | {"MULTIMESH_PUBLIC_JAX": "1", "PYTEST_ADDOPTS": ""}  # those name a report, which is this run's
    process = subprocess.run(command, cwd=SOURCES.parents[2], env=env, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:]


@pytest.mark.parametrize(("ratios", "slower"), [((0.8, 0.7, 1.4), False), ((1.0, 0.9, 0.6), True)])
def test_the_median_of_the_rows_says_whether_a_newer_jax_is_slower(ratios, slower):
    old = {"jax": "0.12", "tables": {step.STEPS: [{"ratio": ratio} for ratio in (0.8, 0.7, 0.7)]}}
    worse, text = step.compare(old, [{"ratio": ratio} for ratio in ratios], "0.13")
    assert (worse, text.startswith("error: on jax 0.13")) == (slower, slower)
