"""From a jaxpr to a `Program`: calls inlined, loops fused and separated, slices moved out."""
