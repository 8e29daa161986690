#!/usr/bin/env bash
# Train real MaxText for a few steps on 8 CPU devices, DP=2, TP=2, PP=2, then without the pipeline on the 4 of one stage.
# Exit 0 only if every step ran, the loss fell, and both runs agree.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/run.py" dtype=float32 --cpus 8 --dp 2 --tp 2 --pp 2 \
  --num-layers 2 --model-dims 256 --mlp-dims 256 --batch-size 8 --microbatch-size 2 --sequence-length 128 \
  --num-steps 3 --remat minimal --attention dot_product --verify "$@"
