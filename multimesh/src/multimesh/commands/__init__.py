"""What ``multimesh`` and ``multimesh-demo`` run."""
