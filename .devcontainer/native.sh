#!/usr/bin/env bash
# For work on jax and xla themselves, in third_party/.
#
# native.sh                    tell clangd how xla's files are compiled: minutes, nothing is built; headers that are generated come with a build
# native.sh build              build jaxlib: an hour without a cache
# native.sh test-xla TARGET... Bazel's tests, such as //xla/hlo/ir/...
# native.sh test-jax FILE...   jax's tests, such as tests/lax_test.py, with the jaxlib of .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ ! -d third_party/jax || ! -d third_party/xla ]]; then
  printf 'error: third_party/jax, third_party/xla: not here; ./bootstrap.sh --group source brings them\n' >&2
  exit 2
fi
readonly jax=$PWD/third_party/jax xla=$PWD/third_party/xla python=$PWD/.venv/bin/python
readonly action=${1:-commands}
(($#)) && shift

# jax's own program; where there is no Bazel of the right version, it brings one.
jax_build() {
  (cd "$jax" && python3 build/build.py build --wheels=jaxlib --local_xla_path="$xla" "$@")
}

bazel() {
  local program
  program=$(find "$jax" -maxdepth 2 -name 'bazel-*' -type f -executable -print -quit)
  program=${program:-$(type -P bazel || true)}
  if [[ -z $program ]]; then
    printf 'error: bazel: not on PATH, and none in %s; install bazelisk as bazel, then run this again\n' "$jax" >&2
    exit 1
  fi
  cd "$xla"
  [[ -e xla_configure.bazelrc ]] || python3 configure.py --backend=CPU
  "$program" "$@"
}

case $action in
  commands)
    jax_build --configure_only
    bazel aquery 'mnemonic(CppCompile, //xla/...)' --output=jsonproto >"$xla/.aquery.json"
    python3 "$xla/build_tools/lint/generate_compile_commands.py" <"$xla/.aquery.json"
    rm "$xla/.aquery.json"
    ;;
  build) jax_build ;;
  test-xla) bazel test --test_output=errors "${@:?name targets, such as //xla/hlo/ir/...}" ;;
  test-jax) cd "$jax" && "$python" -m pytest -n auto "${@:?name files, such as tests/lax_test.py}" ;;
  *)
    printf 'error: %s: is none of commands build test-xla test-jax\n' "$action" >&2
    exit 2
    ;;
esac
