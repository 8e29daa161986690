"""`jit`: arguments, signature, cache, trace, lowering, transformations."""
