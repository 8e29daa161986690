#!/usr/bin/env bash
# Runs at every start of the container: points Bazel at its caches; the remote one only if it answers now.
set -euo pipefail

readonly port="${MULTIMESH_CACHE_PORT:-9090}" remote=/caches/remote.bazelrc
{
  printf 'build --disk_cache=/caches/bazel-disk\nbuild --experimental_disk_cache_gc_max_size=30G\n'
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    printf 'common --remote_cache=http://127.0.0.1:%s\n' "$port"
  fi
} >"$remote.$$"
mv "$remote.$$" "$remote"
grep -q "^try-import $remote" "$HOME/.bazelrc" 2>/dev/null || printf 'try-import %s\n' "$remote" >>"$HOME/.bazelrc"
grep -q remote_cache "$remote" && printf 'Bazel uses the remote cache on port %s\n' "$port" ||
  printf 'no remote Bazel cache answers on port %s; docker/start-cache.sh starts one\n' "$port"
