"""Spare a placed program work: repeated operations, reductions in each microbatch, values that cost little."""
