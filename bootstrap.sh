#!/usr/bin/env bash
# Fetches and patches third_party/ and makes .venv; see `./bootstrap.sh --help`. Safe to interrupt and to run again.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
for python in "${PYTHON:-$root/.venv/bin/python}" python3 python3.14 python3.13 python3.12 python3.11; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    exec "$python" -I "$root/workflows/venv.py" "$@"
  fi
done
echo "error: no Python >= 3.11 found; install one or name it with PYTHON=/path/to/python3" >&2
exit 11
