"""Matrix products of `multimesh.linalg` ask for full precision: NVIDIA GPUs compute float32 ones in TF32 otherwise."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from multimesh.core import _compat

import multimesh as mm

ROWS = {"spec": P("x")}
PAIR = {"spec": (P("x"), P())}


def scalar(tree):
    """A real number of all entries."""
    return sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(tree))


WORKS = {
    "cho_solve": lambda a, b, m: mm.linalg.cho_solve(mm.linalg.cho_factor(a, mesh=m, **ROWS), b),
    "eigh": lambda a, b, m: mm.linalg.eigh(a, mesh=m, **ROWS),
    "inv": lambda a, b, m: mm.linalg.inv(a, mesh=m, **ROWS),
    "least_squares": lambda a, b, m: mm.linalg.least_squares(a[:, :4], b, mesh=m, **ROWS),
    "lu_solve": lambda a, b, m: mm.linalg.lu_solve(mm.linalg.lu_factor(a, mesh=m, **ROWS), b),
    "polar": lambda a, b, m: mm.linalg.polar(a, mesh=m, **ROWS),
    "potrs": lambda a, b, m: mm.linalg.potrs(a, b, mesh=m, matrix_specs=P("x")),
    "qr": lambda a, b, m: mm.linalg.qr(a[:, :4], mesh=m, **ROWS),
    "slogdet": lambda a, b, m: mm.linalg.slogdet(a, mesh=m, **ROWS)[1],
    "solve": lambda a, b, m: mm.linalg.solve(a, b, mesh=m, **PAIR),
    "solve_triangular": lambda a, b, m: mm.linalg.solve_triangular(a, b, mesh=m, **ROWS),
    "svd": lambda a, b, m: mm.linalg.svd(a, mesh=m, **ROWS),
}


def products(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """Every product in a program, also inside of others."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in _compat.subjaxprs(eqn.params):
            yield from products(inner)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", WORKS)
def test_products_have_full_precision(name, devices):
    """Those of derivatives have it too, and JAX's own functions, which take their place on one device."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    a, b = np.eye(16, dtype=np.float32) * 4 + 1, np.ones((16, 2), np.float32)
    program = jax.make_jaxpr(jax.value_and_grad(lambda a: scalar(WORKS[name](a, b, mesh))))(a)
    eqns = list(products(program.jaxpr))
    assert eqns
    full = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    assert [eqn for eqn in eqns if eqn.params["precision"] != full] == []
