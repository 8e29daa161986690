#!/usr/bin/env bash
# For work on jax and xla themselves: builds jaxlib from third_party/ and tells clangd how xla's files are compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! -d third_party/jax || ! -d third_party/xla ]]; then
  printf 'error: third_party/jax, third_party/xla: not here; ./bootstrap.sh --group source brings them\n' >&2
  exit 2
fi
readonly jax=$PWD/third_party/jax xla=$PWD/third_party/xla
(cd "$jax" && python3 build/build.py build --wheels=jaxlib --local_xla_path="$xla")
# Where there is no bazel of the right version, jax's program has brought one.
bazel=$(find "$jax" -maxdepth 2 -name 'bazel-*' -type f -executable -print -quit)
bazel=${bazel:-$(command -v bazel || true)}
if [[ -z $bazel ]]; then
  printf 'error: bazel: not on PATH, and none in %s; install bazelisk as bazel, then run this again\n' "$jax" >&2
  exit 11
fi
cd "$xla"
"$bazel" aquery 'mnemonic(CppCompile, //xla/...)' --output=jsonproto | python3 build_tools/lint/generate_compile_commands.py
