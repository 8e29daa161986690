"""Tasks, microbatches and compiler contexts: the marks that users put around their code."""
