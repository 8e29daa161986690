"""What a device holds of a sharded matrix: temporaries of the compiled programs, for 8 devices and for 64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import multimesh as mm

devices, n = int(sys.argv[1]), int(sys.argv[2])
mesh = Mesh(np.array(jax.devices()), ("x",))
shard = lambda spec: jax.ShapeDtypeStruct((n, n), jnp.float32, sharding=NamedSharding(mesh, spec))
logdet = lambda a: mm.linalg.slogdet(a, mesh=mesh, spec=P("x")).logabsdet
solve = lambda a, b: mm.linalg.solve(a, b, mesh=mesh, spec=(P("x"), P(None, "x")))
potrs = lambda a, b: mm.linalg.potrs(a, b, mesh=mesh, matrix_specs=P("x"))
programs = {
    "potrs": (potrs, shard(P("x")), jnp.ones(n, jnp.float32)),
    "slogdet": (jax.grad(logdet), shard(P("x"))),
    "solve": (solve, shard(P("x")), shard(P(None, "x"))),
    "gradient of solve": (jax.grad(lambda a, b: (solve(a, b) ** 2).sum(), (0, 1)), shard(P("x")), shard(P(None, "x"))),
}
for name, (f, *args) in programs.items():
    nbytes = jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
    print(name, nbytes / (4 * n * n / devices), sep=": ")
"""


@pytest.mark.longer
@pytest.mark.parametrize(("devices", "n"), [(8, 1024), pytest.param(64, 4096, marks=pytest.mark.full)])
def test_no_device_holds_more_than_a_few_shards(devices, n):
    """Arguments do not count. A gradient of a solve holds the factor, two solutions and the gradient of ``a``."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    source = str(Path(__file__).parents[1] / "src")
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": source}
    command = [sys.executable, "-c", PROGRAM, str(devices), str(n)]
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    shards_of = {name: float(shards) for name, shards in (line.split(": ") for line in out.splitlines())}
    assert len(shards_of) == 4
    assert all(shards < (4.1 if "gradient" in name else 2.1) for name, shards in shards_of.items()), shards_of
