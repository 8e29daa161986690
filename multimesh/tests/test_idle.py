"""No device is idle by accident: what repeats work, or runs as one program, is told once, with the user's line."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pipelines import submeshes
from spawning import CLEAN

import multimesh as mm

W = np.full((8, 8), 0.1, np.float32)
X = np.ones((8, 8), np.float32)


def two_stages(meshes, constrain=lambda x: x):
    def forward(w, x):
        h = mm.task(lambda w, x: jnp.tanh(constrain(x @ w)), "front", mesh=meshes[0])(w, x)
        return mm.task(lambda w, h: h @ w, "back", mesh=meshes[1])(w, h)

    return forward


def messages_of(fn, *args):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        fn(*args)
    return [f"{w.filename}:{w.lineno}: {w.message}" for w in record if "shards nothing" in str(w.message)]


def test_an_axis_that_shards_nothing_is_told_with_the_line_of_its_work():
    (message,) = messages_of(mm.jit(two_stages(submeshes(2, (2, 2)))).lower, W, X)
    assert "test_idle.py:" in message.partition(": axis 'data' of submesh [data=2 model=2 | devices 0..3]")[0]
    assert "shards nothing, nor do 3 more axes of submeshes: its devices all compute the same" in message


@pytest.mark.parametrize(
    ("constrain", "spec"),
    [
        (lambda x: x, P("data")),
        (lambda x: jax.lax.with_sharding_constraint(x, P("data")), None),
        (jax.shard_map(lambda x: 2 * x, in_specs=P("data"), out_specs=P("data")), None),
    ],
)
def test_an_argument_a_constraint_or_a_shard_map_shares_the_work(constrain, spec):
    meshes = submeshes(2, (2,))
    x = X if spec is None else jax.device_put(X, NamedSharding(meshes[0], spec))
    assert messages_of(mm.jit(two_stages(meshes, constrain)).lower, W, x) == []


def test_without_work_or_with_one_device_there_is_nothing_to_share():
    assert messages_of(mm.jit(mm.task(jnp.tanh, mesh=submeshes(1, (2,))[0])).lower, X) == []
    assert messages_of(mm.jit(two_stages(submeshes(2, (1,)))).lower, W, X) == []


PROGRAM = """
import warnings
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
import multimesh as mm
mm.virtual_devices(2)
front = Mesh(np.array(jax.devices()[1:]), ("data",))
task = mm.task(jnp.tanh, "front", mesh=front)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    # known
    jax.eval_shape(task, jnp.ones(2))
    jax.make_jaxpr(task)(jnp.ones(2))
    with mm.context(ignore_transforms=True):
        jax.jit(lambda x: mm.task(jnp.tanh, "front", mesh=front)(x) + 1)(jnp.ones(2))
    print(len(caught))
    jax.jit(lambda x: task(x) + 2)(jnp.ones(2))  # line 17
    jax.jit(lambda x: task(x) + 3)(jnp.ones(2))
    print(*(f"{w.filename}:{w.lineno}: {w.message}" for w in caught), sep="|")
"""


USED_BEFORE = {
    "nothing": "",
    "multimesh.jit": "mm.jit(task)(jnp.ones(2))",
    "multimesh.jit, of a jit that keeps its trace": "task = jax.jit(task); mm.jit(task)(jnp.ones(2))",
    "a loop of ours": "mm.jit(lambda x: jax.lax.scan(lambda c, r: (task(c), r), x, x)[0])(jnp.ones(2))",
}


@pytest.mark.longer
@pytest.mark.parametrize("before", USED_BEFORE)
def test_a_task_in_one_program_is_told_once(before, tmp_path):
    """Where JAX has kept the trace of the task, the line is that of the first call, or of the next (0.10)."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace("# known", USED_BEFORE[before]))
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, env=CLEAN, check=True)
    told_before, message = process.stdout.split("\n")[:2]
    assert told_before == "0"
    assert message.count("|") == 0
    lines = (11, 12) if "keeps" in before else (17,)
    assert any(f"script.py:{line}: task 'front' is a part of one program here" in message for line in lines)


def constrained(x):
    return jax.lax.with_sharding_constraint(x * 2, P("data"))


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (lambda mesh: jax.jit(mm.task(constrained, "mine", mesh=mesh)), "task 'mine'"),
        (lambda mesh: mm.task(constrained, "mine", mesh=mesh), "task 'mine'"),
        (lambda mesh: jax.jit(mm.pipeline(constrained, None)), "pipeline: constrained"),
        (lambda mesh: mm.jit(mm.pipeline(constrained, None)), "pipeline: constrained"),
    ],
)
def test_a_bare_spec_outside_of_a_mesh_is_an_error_with_its_line(fn, name):
    (mesh,) = submeshes(1, (2,))
    with pytest.raises(mm.UsageError, match=rf"test_idle.py:\d+: {name} has a bare PartitionSpec, and runs without a"):
        fn(mesh)(X)
