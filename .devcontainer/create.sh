#!/usr/bin/env bash
# Runs in the new container: sources, the environment with multimesh and MaxText editable, and a check of all of it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -r /caches/ca.pem ]]; then
  export SSL_CERT_FILE=/caches/ca.pem PIP_CERT=/caches/ca.pem REQUESTS_CA_BUNDLE=/caches/ca.pem GIT_SSL_CAINFO=/caches/ca.pem
fi
groups=(--group run --group dev)
if nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU'; then
  groups+=(--group cuda12)
fi
./bootstrap.sh "${groups[@]}"
if [[ -d third_party/jax && -d third_party/xla ]]; then
  .devcontainer/native.sh || printf 'clangd does not know xla yet: see above, then run .devcontainer/native.sh\n'
else
  printf 'jax and xla are not here: ./bootstrap.sh --group source, then .devcontainer/native.sh, to work on them\n'
fi
.venv/bin/python -m tooling status
.venv/bin/python examples/pipeline.py
printf 'ready: .venv/bin/pytest, maxtext/validate-cpu.sh\n'
