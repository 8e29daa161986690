#!/usr/bin/env bash
# Runs at every start of the container: points Bazel at its caches; the remote one is that of docker/start-cache.sh, if it runs.
set -euo pipefail

# start-cache.sh writes it with the cache's password, and takes it away when it stops the cache. It only reads.
readonly reading=/caches/bazel/reading.bazelrc remote=/caches/remote.bazelrc
printf 'build --disk_cache=/caches/bazel-disk\nbuild --experimental_disk_cache_gc_max_size=30G\ntry-import %s\n' "$reading" >"$remote.$$"
mv "$remote.$$" "$remote"
grep -q "^try-import $remote" "$HOME/.bazelrc" 2>/dev/null || printf 'try-import %s\n' "$remote" >>"$HOME/.bazelrc"
if [[ -r $reading ]]; then
  printf 'Bazel reads the remote cache that docker/start-cache.sh started\n'
else
  printf 'no remote Bazel cache; docker/start-cache.sh starts one\n'
fi
