#!/usr/bin/env bash
# Train real MaxText for a few steps in two processes of mpirun, a stage in each, then without the pipeline in one process.
# Exit 0 only if every step ran, the loss fell, and both runs agree.
set -euo pipefail
if ! command -v mpirun >/dev/null; then
  echo "error: mpirun cannot be found; install Open MPI (Debian and Ubuntu: apt-get install openmpi-bin)" >&2
  exit 4
fi
root=()
if ((EUID == 0)); then
  root=(--allow-run-as-root)
fi
exec mpirun "${root[@]}" --oversubscribe --bind-to none -n 2 "$(dirname "${BASH_SOURCE[0]}")/run.py" dtype=float32 \
  --nodes 2 --cpus 1 --pp 2 --num-layers 2 --model-dims 256 --mlp-dims 256 --batch-size 4 --microbatch-size 1 \
  --sequence-length 128 --num-steps 3 --remat minimal --attention dot_product --verify "$@"
