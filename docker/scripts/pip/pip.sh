#!/bin/sh
# pip.sh ARGUMENTS...: install into /opt/.venv with the mounted installer. Compiled files hold no time, and are made in one order: the same
# packages give the same bytes.
set -eu
# shellcheck source=settings.sh source-path=SCRIPTDIR
. "$(dirname "$0")/settings.sh"
before=$(mktemp)
/opt/installer/bin/python -m pip --python /opt/.venv/bin/python install --no-compile "$@"
find /opt/.venv/lib -name '*.py' -newer "$before" | sort |
  /opt/.venv/bin/python -m compileall -qq --invalidation-mode unchecked-hash -i - || : # some are templates
rm "$before"
