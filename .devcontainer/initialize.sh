#!/usr/bin/env bash
# Runs on your machine before the container is made: makes the folder that the container keeps its caches in.
set -euo pipefail

readonly caches="$HOME/.cache/multimesh-jax"
mkdir -p "$caches"/{bazel,bazelisk,ccache,jax,pip}
printf 'caches of Bazel, ccache, pip and JAX: %s (%s); remove it to start anew\n' "$caches" "$(du -sh "$caches" | cut -f 1)"
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  printf 'a GPU is here and will be used\n'
else
  printf 'no GPU is here; everything runs on the CPU\n'
fi
