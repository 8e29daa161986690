"""Basics of every room: checks, submeshes, specs, text, JAX's internals."""
