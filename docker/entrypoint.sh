#!/bin/sh
# Run a command in the image's environment; without one, show what run.py can do. With MULTIMESH_HARDWARE=1 it first prints to
# standard error what the container finds of GPUs, NCCL and InfiniBand, as /opt/hardware.py does.
set -eu
PATH=/opt/.venv/bin:$PATH
if [ ! -w "${HOME:-/nonexistent}" ]; then # --user gives ids that have no home here
  HOME=$(mktemp -d)
fi
export PATH HOME
if [ "${MULTIMESH_HARDWARE:-0}" != 0 ]; then /opt/hardware.py >&2; fi
[ $# -gt 0 ] || set -- /opt/maxtext/run.py --help
exec "$@"
