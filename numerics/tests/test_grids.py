"""`multimesh.grids` beside NumPy on one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from multimesh_numerics import grids

import multimesh as mm

pytestmark = [pytest.mark.longer, pytest.mark.usefixtures("double")]


def mesh_of(*shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("x", "y")[: len(shape)])


SLABS, PENCILS = (mesh_of(4), P("x")), (mesh_of(4, 2), P("x", "y"))
LAYOUTS = {"slabs": SLABS, "pencils": PENCILS, "turned": (mesh_of(2, 2), P(("y", "x")))}


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def on(layout, x):
    mesh, spec = LAYOUTS[layout]
    return jax.device_put(x, NamedSharding(mesh, spec))


def blocks(f, layout, out=None):
    mesh, spec = LAYOUTS[layout]
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec if out is None else out))


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize(("layout", "axes"), [("slabs", ("x", None)), ("pencils", ("x", "y"))])
def test_a_halo_holds_the_cells_of_neighbours(layout, axes, periodic):
    x, widths = random(16, 6), (2, 1)
    padded = np.pad(x, ((2, 2), (1, 1)), "wrap" if periodic else "constant")
    actual = np.asarray(blocks(lambda x: grids.halo_exchange(x, widths, axes, periodic), layout)(on(layout, x)))
    columns = LAYOUTS[layout][0].shape.get("y", 1)
    rows, cols = 16 // 4, 6 // columns
    for i in range(4):
        for j in range(columns):
            block = actual[i * (rows + 4) : (i + 1) * (rows + 4), j * (cols + 2) : (j + 1) * (cols + 2)]
            np.testing.assert_array_equal(block, padded[i * rows : i * rows + rows + 4, j * cols : j * cols + cols + 2])


@pytest.mark.parametrize("periodic", [True, False])
def test_adding_a_halo_is_the_transpose_and_the_derivative_of_exchanging_it(periodic):
    exchange = blocks(lambda x: grids.halo_exchange(x, (3, 2), ("x", "y"), periodic), "pencils")
    add = blocks(lambda x: grids.halo_add(x, (3, 2), ("x", "y"), periodic), "pencils")
    x = on("pencils", random(16, 8))
    y = on("pencils", random(*exchange(x).shape, seed=1))
    np.testing.assert_allclose(jnp.vdot(exchange(x), y), jnp.vdot(x, add(y)))
    np.testing.assert_allclose(jax.vjp(exchange, x)[1](y)[0], add(y))


def test_one_device_wraps_around():
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    x = random(6)
    f = jax.shard_map(lambda x: grids.halo_exchange(x, 2, ("x",)), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(f(x), np.pad(x, 2, "wrap"))


def paint_with_numpy(positions, mass, shape):
    """Cloud in cell, particle by particle."""
    grid = np.zeros(shape)
    for x, m in zip(
        positions.reshape(-1, len(shape)), np.broadcast_to(mass, positions.shape[:-1]).reshape(-1), strict=True
    ):
        corner = np.floor(x).astype(int)
        for step in np.ndindex(*(2,) * len(shape)):
            weight = np.prod(np.where(step, x - corner, 1 - (x - corner)))
            grid[tuple((corner + step) % shape)] += m * weight
    return grid


def lattice(shape):
    return np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)


@pytest.mark.telling("shape0-turned", "shape0-slabs", "shape1-pencils")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(16, 8, 5), (16, 8)])
def test_painting_and_reading(layout, shape):
    mesh, spec = LAYOUTS[layout]
    positions = lattice(shape) + np.clip(random(*shape, len(shape)), -2.9, 1.9)
    mass = np.abs(random(*shape, seed=1))
    density = grids.paint(on(layout, positions), mass, shape=shape, mesh=mesh, spec=spec, halo=3)
    np.testing.assert_allclose(density.mass, paint_with_numpy(positions, mass, shape), atol=1e-12)
    assert density.lost == 0
    values = on(layout, random(*shape, seed=2))
    actual = grids.read(values, positions, halo=3)
    np.testing.assert_allclose(jnp.vdot(actual, mass), jnp.vdot(density.mass, values))
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape))


def test_a_list_of_particles_and_those_that_are_too_far_away():
    mesh, spec = SLABS
    positions = lattice((16, 4)).reshape(-1, 2).astype(float)
    positions[3, 0] += 7.5
    density = grids.paint(positions, shape=(16, 4), mesh=mesh, spec=spec, halo=2)
    assert (density.lost, density.mass.sum()) == (1, 63)
    actual = grids.read(on("slabs", np.ones((16, 4))), positions, halo=2)
    assert np.flatnonzero(np.isnan(actual)).tolist() == [3]


def waves(shape, box):
    x, y, *z = (np.arange(n).reshape([-1 if d == a else 1 for a in range(len(shape))]) * box / n * 2 * np.pi / box
                for d, n in enumerate(shape))  # fmt: skip
    z = z[0] if z else 0
    f = np.sin(x) * np.cos(2 * y) + np.cos(x + z)
    k = 2 * np.pi / box
    slopes = (np.cos(x) * np.cos(2 * y) - np.sin(x + z), -2 * np.sin(x) * np.sin(2 * y), -np.sin(x + z))
    laplacian = -5 * np.sin(x) * np.cos(2 * y) - (len(shape) - 1) * np.cos(x + z)
    flat = np.zeros(shape)
    return f + flat, [k * slope + flat for slope in slopes], k**2 * laplacian + flat


@pytest.mark.telling("slabs-shape0", "pencils-shape3")
@pytest.mark.parametrize(("layout", "shape"), [("slabs", (8, 12, 10)), ("pencils", (8, 12, 10)), ("slabs", (12, 7)),
                                               ("pencils", (8, 10, 7))])  # fmt: skip
def test_derivatives_and_poissons_equation_of_waves(layout, shape):
    box = 3.0
    f, slopes, laplacian = waves(shape, box)
    field = on(layout, f)
    for actual, expected in zip(grids.gradient(field, box=box), slopes, strict=False):
        np.testing.assert_allclose(actual, expected, atol=1e-12)
        assert actual.sharding.is_equivalent_to(field.sharding, f.ndim)
    np.testing.assert_allclose(grids.poisson(on(layout, laplacian), box=box), f - f.mean(), atol=1e-12)


@pytest.mark.parametrize(("layout", "shape"), [("slabs", (8, 12, 10)), ("pencils", (8, 12, 9)), ("slabs", (12, 7))])
def test_the_power_spectrum_is_numpys(layout, shape):
    x, box, bins = random(*shape), 5.0, 5
    spectrum = grids.power_spectrum(on(layout, x), bins, box=box)
    k = np.sqrt(sum(np.meshgrid(*((2 * np.pi * np.fft.fftfreq(n, box / n)) ** 2 for n in shape), indexing="ij")))
    power = np.abs(np.fft.fftn(x)) ** 2 * box ** len(shape) / x.size**2
    edges = np.linspace(0, np.pi * max(shape) / box, bins + 1)
    edges[-1] += 1e-3  # the last bin holds its end
    for b in range(bins):
        inside = (k > 0) & (k >= edges[b]) & (k < edges[b + 1])
        assert spectrum.modes[b] == inside.sum()
        np.testing.assert_allclose((spectrum.k[b], spectrum.power[b]), (k[inside].mean(), power[inside].mean()))


@pytest.mark.longer
def test_a_gradient_goes_through_forces_and_painting():
    mesh, spec = SLABS
    shape, start = (8, 8, 4), lattice((8, 8, 4)).astype(float)

    def energy(positions):
        density, _ = grids.paint(positions, shape=shape, mesh=mesh, spec=spec, halo=2)
        potential = grids.poisson(density - 1, mesh=mesh, spec=spec)
        force = jnp.stack([grids.read(f, positions, mesh=mesh, spec=spec, halo=2)
                           for f in grids.gradient(potential, mesh=mesh, spec=spec)], -1)  # fmt: skip
        return jnp.sum(force**2)

    positions = start + 0.3 * random(*start.shape)
    slope = jax.jit(jax.grad(energy))(on("slabs", positions))
    direction = random(*start.shape, seed=1)
    step = 1e-6 * direction
    change = (energy(positions + step) - energy(positions - step)) / 2e-6
    np.testing.assert_allclose(jnp.vdot(slope, direction), change, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: blocks(lambda x: grids.halo_exchange(x, 5, ("x",)), "slabs")(np.ones(16)), "dimension 0 has 4 on a"),
        (lambda m: blocks(lambda x: grids.halo_exchange(x, (1, -1), ("x", None)), "slabs")(np.ones((16, 2))),
         "widths is a number of cells"),
        (lambda m: grids.paint(np.ones((4, 2)), shape=(8, 8, 8), mesh=m, spec=P("x")), "shape (..., 3)"),
        (lambda m: grids.paint(np.ones((4, 3)), shape=(9, 8, 8), mesh=m, spec=P("x")), "9 rows in dimension 0"),
        (lambda m: grids.paint(np.ones((4, 3)), 1.0, shape=(8, 8, 8), mesh=m, spec=P("x"), halo=0), "halo is a number"),
        (lambda m: grids.gradient(jnp.ones((8, 8), complex), mesh=m, spec=P("x")), "it must be real"),
        (lambda m: grids.poisson(jnp.ones((8, 8)), mesh=m, spec=P("x"), box=(1, 2, 3)), "box is a length"),
        (lambda m: grids.power_spectrum(jnp.ones((8, 8)), 0, mesh=m, spec=P("x")), "bins is a number"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, message):
    with pytest.raises(mm.UsageError, match=re.escape(message)):
        call(mesh_of(4))
