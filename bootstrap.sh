#!/bin/sh
# Makes .venv, fetches and patches third_party/; see `./bootstrap.sh --help`. Safe to interrupt and to run again.
set -eu
case $0 in */*) folder=${0%/*}/. ;; *) folder=. ;; esac
root=$(CDPATH='' cd -- "$folder" && pwd -P)
shim=$(command -v python3 || :) pyenv=${PYENV_ROOT:-${HOME-}/.pyenv} uv=${XDG_DATA_HOME:-${HOME-}/.local/share}/uv fault=
# $PYTHON alone; that of .venv; python3, unless another has a newer JAX; the newest on PATH, of pyenv or of uv.
for minor in 14 13 12 11; do
  for python in "${PYTHON:-$root/.venv/bin/python}" python3 "python3.$minor" "$pyenv/versions/3.$minor."*/bin/python3 \
    "${shim%/shims/python3}/versions/3.$minor."*/bin/python3 "$uv/python/cpython-3.$minor."*/bin/python3; do
    answer=$("$python" -IB "$root/tooling/environment/check_python.py" "$python" "$minor" 2>/dev/null) &&
      exec "$answer" -IB "$root/tooling/environment/install.py" "$@"
    fault=${fault:-$answer}
    if [ -n "${PYTHON-}" ]; then break 2; fi
  done
done
no="${PYTHON-}${PYTHON:+: is not there, or is no Python; install one}"
none="no Python found; install 3.13 (Debian, Ubuntu: apt-get install python3-venv)"
echo "error: ${fault:-${no:-$none}}; or name another with PYTHON=/path/to/python3" >&2
exit 1
