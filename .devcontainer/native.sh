#!/usr/bin/env bash
# For work on jax and xla themselves: builds jaxlib from third_party/ and tells clangd how xla's files are compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v bazel >/dev/null; then
  printf 'error: bazel: not found; open this folder in the devcontainer, which has it\n' >&2
  exit 11
fi
(cd third_party/jax && python3 build/build.py build --wheels=jaxlib --bazel_options=--override_repository=xla="$PWD/../xla")
cd third_party/xla
bazel aquery 'mnemonic(CppCompile, //xla/...)' --output=jsonproto | python3 build_tools/lint/generate_compile_commands.py
