"""Functions that the patched MaxText calls in its trainer: the step as a pipeline, placement, data, checkpoints."""
