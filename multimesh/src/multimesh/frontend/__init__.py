"""`jit` and what it makes: arguments, signatures, caches, stages, transformations."""
