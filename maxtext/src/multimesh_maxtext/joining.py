"""``python -m multimesh_maxtext.joining CONFIG KEY=VALUE...``: MaxText's trainer as one of several processes.

JAX finds the others by the variables of srun or mpirun, and the first of them by JAX_COORDINATOR_ADDRESS
where that is set.
"""

import runpy

import jax

from multimesh_maxtext.translate import TRAINER

if __name__ == "__main__":
    jax.distributed.initialize()
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)
