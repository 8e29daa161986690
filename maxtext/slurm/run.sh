#!/usr/bin/env bash
# One process of a job, as srun starts it. Its links run-*.sh take the flags of the job.sbatch beside them, run-original.sh
# the original's. Flags given here come last, so they win: run-dgx-h100.sh --num-steps 100
set -euo pipefail
: "${SLURM_LOCALID:?srun starts this, once per GPU}" "${SLURM_NTASKS:?}"
folder=$(dirname "${BASH_SOURCE[0]}") flags=() bind=()
case ${0##*/} in
  run.sh) ;; # job.sh gives it all flags
  run-original.sh) read -r -d '' -a flags < <(sed -n 's/^#ORIGINAL //p' "$folder/job.sbatch") || true ;;
  *) read -r -d '' -a flags < <(sed -n 's/^#FLAGS //p' "$folder/job.sbatch") || true ;;
esac
if [[ " ${flags[*]} $* " =~ \ --(nodes|gpus[=\ ]+([2-9]|1[0-9]))[=\ 0-9] ]]; then
  if [[ ${SLURM_PROCID:-0} -ne 0 ]]; then
    sleep 5 # the first one says it
  else
    echo "error: leave out --nodes and --gpus: sbatch's --nodes, --ntasks-per-node and --gpus-per-node say them here" >&2
  fi
  exit 2
fi
if [[ $(nproc --all) -eq 224 && -e /dev/nvidia7 ]]; then
  first=$((14 * SLURM_LOCALID)) # of the cores beside a GPU, and of their second threads
  cores=$first-$((first + 13)),$((first + 112))-$((first + 125))
  bind=(numactl "--physcpubind=$cores" "--membind=$((SLURM_LOCALID / 4))")
elif [[ ${SLURM_PROCID:-0} -eq 0 ]]; then
  echo "not a DGX H100 ($(nproc --all) logical cores): processes are not bound to cores"
fi
exec "${bind[@]}" "$folder/../run.py" --nodes "$SLURM_NTASKS" --gpus 1 --cpus 1 --check "${flags[@]}" "$@"
