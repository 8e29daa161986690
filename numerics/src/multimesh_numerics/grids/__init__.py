"""Halos, particles and spectral derivatives on large grids.

A grid has two or three dimensions. The first is sharded over mesh axes (slabs), or the first two (pencils), as for
`multimesh.fft`. Everything works under ``jit``, ``grad`` and ``vmap``, over any number of processes. Lengths are in
cells, unless ``box`` says how long the grid is.
"""

from multimesh_numerics.grids.derivatives import PowerSpectrum, gradient, poisson, power_spectrum, wavenumbers
from multimesh_numerics.grids.halos import halo_add, halo_exchange
from multimesh_numerics.grids.particles import MassGrid, paint, read

__all__ = [
    "MassGrid",
    "PowerSpectrum",
    "gradient",
    "halo_add",
    "halo_exchange",
    "paint",
    "poisson",
    "power_spectrum",
    "read",
    "wavenumbers",
]
