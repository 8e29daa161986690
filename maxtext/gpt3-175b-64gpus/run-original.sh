#!/usr/bin/env bash
# One process of the job, as srun starts it. See maxtext/jobs.py.
# Flags of run.py given here come last, so they win: run-original.sh --num-steps 100
set -euo pipefail
: "${SLURM_LOCALID:?srun starts this, once per GPU}" "${SLURM_NTASKS:?}"

cores=(
  "0-13,112-125" "14-27,126-139" "28-41,140-153" "42-55,154-167"
  "56-69,168-181" "70-83,182-195" "84-97,196-209" "98-111,210-223"
)
memory=(0 0 0 0 1 1 1 1)
bind=()
if [[ $(nproc --all) -eq 224 ]]; then
  bind=(numactl "--physcpubind=${cores[SLURM_LOCALID]}" "--membind=${memory[SLURM_LOCALID]}")
elif [[ ${SLURM_PROCID:-0} -eq 0 ]]; then
  echo "not a DGX H100 ($(nproc --all) logical cores, not 224): processes are not bound to cores"
fi

exec "${bind[@]}" "$(dirname "${BASH_SOURCE[0]}")/../run.py" --nodes "$SLURM_NTASKS" --gpus 1 --cpus 1 --check \
  --pp 8 --tp 8 --interleave 12 --schedule wavefront --model-name gpt3-175b --num-layers 96 --model-dims 12288 \
  --num-heads 96 --sequence-length 2048 --batch-size 128 --microbatch-size 4 --attention cudnn_flash_te \
  --remat minimal --xla-rs-threshold 51200 --replicate-small-params --fbmem 77 --num-steps 8 "$@"
