#!/usr/bin/env bash
# Runs on your machine before the container is made: makes the folders that the container keeps its caches and packages in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $(uname -m) != x86_64 && -z ${DOCKER_DEFAULT_PLATFORM-} ]]; then
  printf 'error: the container is for x86-64; export DOCKER_DEFAULT_PLATFORM=linux/amd64 to emulate it, then open again\n' >&2
  exit 2
fi
if [[ $(stat -c %u .) == 0 && ${MULTIMESH_DEVCONTAINER_USER-} != root ]]; then
  printf 'error: %s belongs to root, and the container has a user of yours: give the folder to that user, or export MULTIMESH_DEVCONTAINER_USER=root, then open again\n' "$PWD" >&2
  exit 2
fi
# The container's own packages take the place of .venv there, so that those of this machine stay as they are.
mkdir -p .venv .venv-container
readonly caches="$HOME/.cache/multimesh-jax"
mkdir -p "$caches"/{bazel-disk,bazelisk,ccache,jax,pip}
# Bazel, ccache and JAX keep their own bounds (devcontainer.json, start.sh).
find "$caches/bazelisk" -type f -atime +90 -delete
if (($(du -sm "$caches/pip" | cut -f 1) > 10240)); then
  find "$caches/pip" -mindepth 1 -delete
fi
printf 'caches of Bazel, ccache, pip and JAX: %s (%s); remove it to start anew\n' "$caches" "$(du -sh "$caches" | cut -f 1)"
if [[ -r ${SSL_CERT_FILE-} ]]; then # a network that signs for others: the container must trust it too
  install -m 644 "$SSL_CERT_FILE" "$caches/ca.pem"
  printf 'certificates of %s are trusted in the container\n' "$SSL_CERT_FILE"
else
  rm -f "$caches/ca.pem"
fi
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  printf 'a GPU is here; the container sees it if Docker has the NVIDIA container toolkit\n'
else
  printf 'no GPU is here; everything runs on the CPU\n'
fi
