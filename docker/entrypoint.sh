#!/bin/sh
# Run a command in the image's environment; without one, show what run.py can do.
set -eu
PATH=/opt/.venv/bin:$PATH
if [ ! -w "${HOME:-/nonexistent}" ]; then # --user gives ids that have no home here
  HOME=$(mktemp -d)
fi
export PATH HOME
[ $# -gt 0 ] || set -- /opt/maxtext/run.py --help
exec "$@"
