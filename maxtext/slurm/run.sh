#!/usr/bin/env bash
# One process of the job, as srun starts it. See maxtext/jobs.py.
# Flags of run.py given here come last, so they win: run.sh --num-steps 100
set -euo pipefail
: "${SLURM_LOCALID:?srun starts this, once per GPU}" "${SLURM_NTASKS:?}"

exec "$(dirname "${BASH_SOURCE[0]}")/../run.py" --nodes "$SLURM_NTASKS" --gpus 1 --cpus 1 --check \
  "$@"
