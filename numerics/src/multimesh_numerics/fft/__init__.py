"""Fourier transforms over two or three dimensions of an array, sharded over a mesh.

The functions have the names and results of ``jax.numpy.fft`` and work under ``jit``, ``grad``, ``vmap``,
``jax.checkpoint`` and inside a task, with Auto and Explicit mesh axes, over any number of processes. Each sharded
dimension costs one all-to-all; nothing is ever gathered. See `fftn` for layouts and sizes.
"""

from multimesh_numerics.fft.fourier import fftfreq, fftn, ifftn, irfftn, rfftfreq, rfftn, unpad

__all__ = ["fftfreq", "fftn", "ifftn", "irfftn", "rfftfreq", "rfftn", "unpad"]
