"""What every room uses: checks, submeshes, specs, text, JAX's internals."""
