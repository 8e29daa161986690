"""``python -m multimesh check``: whether these processes and devices can run pipelines, and why not."""
