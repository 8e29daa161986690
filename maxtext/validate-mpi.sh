#!/usr/bin/env bash
# Train real MaxText for a few steps in two processes of mpirun, a stage in each, then without the pipeline in one process.
# Exit 0 only if every step ran, the loss fell, and both runs agree. For Open MPI, MPICH and Intel MPI.
set -euo pipefail
if ! command -v mpirun >/dev/null; then
  echo "error: mpirun cannot be found; install Open MPI (Debian and Ubuntu: apt-get install openmpi-bin)" >&2
  exit 4
fi
# Open MPI 4 alone says where process 0 is: on this machine, from where mpirun starts.
address="$(hostname -I | cut -d' ' -f1):$((61440 + RANDOM % 4096))"
case $(mpirun --version 2>&1) in
  *"Open MPI"*)
    options=(--oversubscribe --bind-to none)
    if ((EUID == 0)); then
      options+=(--allow-run-as-root)
    fi
    if [[ $(mpirun --version) != *"Open MPI) 4."* ]]; then
      options+=(-x "JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-$address}")
    fi
    ;;
  *HYDRA* | *"Intel(R) MPI"*)
    options=(-genv JAX_COORDINATOR_ADDRESS "${JAX_COORDINATOR_ADDRESS:-$address}" -genv I_MPI_PIN off)
    ;;
  *)
    echo "error: mpirun is neither of Open MPI nor of MPICH or Intel MPI: $(mpirun --version 2>&1 | head -1)" >&2
    exit 4
    ;;
esac
exec mpirun "${options[@]}" -n 2 "$(dirname "${BASH_SOURCE[0]}")/run.py" dtype=float32 \
  --nodes 2 --cpus 1 --pp 2 --num-layers 2 --model-dims 256 --mlp-dims 256 --batch-size 4 --microbatch-size 1 \
  --sequence-length 128 --num-steps 3 --remat minimal --attention dot_product --verify "$@"
