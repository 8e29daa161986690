#!/bin/sh
# Fetches and patches third_party/ and makes .venv; see `./bootstrap.sh --help`. Safe to interrupt and to run again.
set -eu
case $0 in */*) here=${0%/*}/. ;; *) here=. ;; esac
root=$(CDPATH='' cd -- "$here" && pwd -P)
# Any Python from 3.6 on can look for the one to take.
for python in python3 python3.14 python3.13 python3.12 python3.11 "${PYTHON:-python}" "$root/.venv/bin/python" \
  "${PYENV_ROOT:-${HOME-}/.pyenv}/versions"/3.*/bin/python3 "${HOME-}"/.local/share/uv/python/*/bin/python3; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
    exec "$python" -IB "$root/tooling/environment/find_python.py" "$@"
  fi
done
echo "error: no Python found; install 3.13 (Debian, Ubuntu: apt-get install python3-venv) or name it with PYTHON=/path/to/python3" >&2
exit 1
