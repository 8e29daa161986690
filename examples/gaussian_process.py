"""Marginal likelihood of a Gaussian process with thousands of points, and its gradient, over eight devices.

    python examples/gaussian_process.py [POINTS]      # or: mpirun -n 2 python ...; srun -n 4 python ...

The kernel matrix is made, factored and differentiated in shards: no device ever holds the whole of it. `cho_solve` and
`slogdet` share one factor.
"""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # with 8 accelerators, delete this line and `jax_num_cpu_devices` below
os.environ.setdefault("NPROC", "64")  # a collective needs a thread for each of its devices, even on two cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # CPU devices share the cores: threads of BLAS would only wait

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import multimesh as mm

job = mm.distributed.initialize(alone=True)  # under srun or mpirun: one of several processes
jax.config.update("jax_num_cpu_devices", 8 // len(job.hosts))
points = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
rng = np.random.default_rng(0)
x = np.sort(rng.uniform(0, 10, points)).astype(np.float32)
y = (np.sin(3 * x) + 0.1 * rng.standard_normal(points)).astype(np.float32)
start = {"length": jnp.float32(0.3), "noise": jnp.float32(0.15)}


def kernel(params):
    """Squared exponential with noise, (points, points)."""
    distance = (x[:, None] - x[None, :]) / params["length"]
    return jnp.exp(-0.5 * distance**2) + params["noise"] ** 2 * jnp.eye(points)


def likelihood(params):
    """Log marginal likelihood over the mesh."""
    k = jax.lax.with_sharding_constraint(kernel(params), NamedSharding(mesh, P("x")))
    factor = mm.linalg.cho_factor(k, mesh=mesh, spec=P("x"))
    fit = y @ mm.linalg.cho_solve(factor, jnp.asarray(y))
    return -0.5 * (fit + mm.linalg.slogdet(factor).logabsdet + points * jnp.log(2 * jnp.pi))


def on_one_device(params):
    """The same with jax.scipy."""
    factor = jax.scipy.linalg.cho_factor(kernel(params), lower=True)
    fit = y @ jax.scipy.linalg.cho_solve(factor, y)
    logdet = 2 * jnp.sum(jnp.log(jnp.diagonal(factor[0])))
    return -0.5 * (fit + logdet + points * jnp.log(2 * jnp.pi))


value, grads = jax.jit(jax.value_and_grad(likelihood))(start)
expected, by_one = jax.jit(jax.value_and_grad(on_one_device))(start)
for name, grad in grads.items():
    np.testing.assert_allclose(grad, by_one[name], rtol=2e-2)
np.testing.assert_allclose(value, expected, rtol=1e-3)
if job.rank == 0:
    print(f"{points} points: log likelihood {value:.3f} on {mesh.size} devices, {expected:.3f} on one")
    for name, grad in grads.items():
        print(f"d / d {name:6} {grad:12.4f} on {mesh.size} devices, {by_one[name]:12.4f} on one")
    print("ok")
