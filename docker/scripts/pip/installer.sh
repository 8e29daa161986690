#!/bin/sh
# Make /opt/installer: an environment with pip and the build backend, which later steps mount.
set -eu
# shellcheck source=settings.sh source-path=SCRIPTDIR
. "$(dirname "$0")/settings.sh"
python=$(readlink -f /opt/.venv/bin/python3)
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  apt-get update -qq -o Acquire::Languages=none
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
fi
"$python" -m venv /opt/installer
/opt/installer/bin/python -m pip install -q --require-hashes --only-binary=:all: -r /requirements/tooling.txt
