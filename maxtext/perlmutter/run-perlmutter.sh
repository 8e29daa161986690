#!/usr/bin/env bash
# One process of the job, as srun starts it. See maxtext/jobs.py.
# Flags of run.py given here come last, so they win: run-perlmutter.sh --num-steps 100
set -euo pipefail
: "${SLURM_LOCALID:?srun starts this, once per GPU}" "${SLURM_NTASKS:?}"

exec "$(dirname "${BASH_SOURCE[0]}")/../run.py" --nodes "$SLURM_NTASKS" --gpus 1 --cpus 1 --check \
  --dp 2 --pp 2 --tp 4 --interleave 8 --schedule prefetch-wavefront --only-fuse-loop-tasks \
  --model-name llama3-8b --num-layers 32 --sequence-length 4096 --batch-size 32 --microbatch-size 2 \
  --attention cudnn_flash_te --remat minimal --xla-rs-threshold 51200 --replicate-small-params --num-steps 20 "$@"
