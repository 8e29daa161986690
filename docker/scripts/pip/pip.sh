#!/bin/sh
# pip.sh ARGUMENTS...: install into /opt/.venv with the mounted installer.
set -eu
# shellcheck source=settings.sh source-path=SCRIPTDIR
. "$(dirname "$0")/settings.sh"
/opt/installer/bin/python -m pip --python /opt/.venv/bin/python install "$@"
