#!/usr/bin/env bash
# Train real MaxText for 20 steps on the visible GPUs, tensor-parallel over all of them. Refuses without a GPU.
set -euo pipefail
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
  IFS=, read -ra chosen <<<"$CUDA_VISIBLE_DEVICES"
  gpus=$((${#chosen[@]} < gpus ? ${#chosen[@]} : gpus))
fi
if ((gpus == 0)); then
  echo "error: no GPU can be seen here (nvidia-smi lists none); use maxtext/validate-cpu.sh" >&2
  exit 4
fi
sequence=()
if ((gpus > 1)); then
  sequence=(--sequence-parallel)
fi
exec "$(dirname "${BASH_SOURCE[0]}")/run.py" --gpus "$gpus" --tp "$gpus" "${sequence[@]}" \
  --num-layers 4 --num-heads $((2 * gpus)) --model-dims $((128 * gpus)) --mlp-dims $((256 * gpus)) \
  --batch-size 4 --microbatch-size 2 --sequence-length 256 --num-steps 20 --remat minimal \
  "$@" vocab_size=$((512 * gpus))
