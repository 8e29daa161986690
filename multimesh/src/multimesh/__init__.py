"""MultiMesh for JAX: parts of one jitted function on different submeshes, on the JAX that everyone has."""
