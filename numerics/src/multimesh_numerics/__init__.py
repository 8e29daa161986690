"""Linear algebra, Fourier transforms and grids of simulations on the devices of one mesh, over any number of processes.

`multimesh.linalg`, `multimesh.fft` and `multimesh.grids` are the modules of this package.
"""
