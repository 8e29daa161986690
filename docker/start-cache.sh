#!/bin/sh
# Starts the Bazel cache that builds on this machine share; `./start-cache.sh --help`. Safe to run again.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
fits='import sys; from tooling.environment.check_python import OLDEST; sys.exit(sys.version_info < OLDEST)'
for python in "$root/.venv/bin/python" python3 python3.14 python3.13 python3.12 python3.11; do
  if PYTHONPATH=$root "$python" -PBc "$fits" 2>/dev/null; then
    [ "$python" = "$root/.venv/bin/python" ] || export PYTHONDONTWRITEBYTECODE=1
    # -P: the tools of this clone, not of one that the user stands in.
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -P -m tooling cache "$@"
  fi
done
echo "error: no Python is new enough; run $root/bootstrap.sh --group image" >&2
exit 1
