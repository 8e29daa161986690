#!/bin/sh
# Fetches and patches third_party/ and makes .venv; see `./bootstrap.sh --help`. Safe to interrupt and to run again.
set -eu
case $0 in */*) here=${0%/*}/. ;; *) here=. ;; esac
# With nothing to do this is all. A Python without its site-packages starts in half the time.
quick='import sys; sys.path.insert(0, sys.argv.pop(1)); from workflows.sources import quick; quick.answer(sys.argv[1:])
sys.exit(1)'
"$here/.venv/bin/python" -ISE -c "$quick" "$here" bootstrap "$@" 2>/dev/null && exit
root=$(CDPATH='' cd -- "$here" && pwd -P)
for python in "${PYTHON:-$root/.venv/bin/python}" python3 python3.14 python3.13 python3.12 python3.11; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    exec "$python" -I "$root/workflows/venv.py" "$@"
  fi
done
echo "error: no Python >= 3.11 found; install one or name it with PYTHON=/path/to/python3" >&2
exit 11
