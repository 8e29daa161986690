"""What users put around their code: tasks, microbatches, contexts."""
