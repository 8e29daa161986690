"""The marks that users put around code: tasks, microbatches, contexts."""
