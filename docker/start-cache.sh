#!/bin/sh
# Starts the Bazel cache that builds on this machine share; `./start-cache.sh --help`. Safe to run again.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
if [ ! -x "$root/.venv/bin/python" ]; then
  echo "error: $root/.venv is not there; run: $root/bootstrap.sh --group dev" >&2
  exit 11
fi
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$root/.venv/bin/python" -m workflows cache "$@"
