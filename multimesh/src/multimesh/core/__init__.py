"""What everything leans on: checks of arguments, submeshes, partition specs, text, and JAX's internals."""
