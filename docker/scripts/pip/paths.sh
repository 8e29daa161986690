#!/bin/sh
# Register MultiMesh (as an installed distribution) and MaxText (as a path), before their files are there: a change
# of a file then needs no installation.
set -eu
mkdir -p /opt/multimesh/src/multimesh
cp /multimesh/pyproject.toml /opt/multimesh/
touch /opt/multimesh/README.md
PYTHONPATH=$(echo /opt/installer/lib/python3*/site-packages) \
  "$(dirname "$0")/pip.sh" --no-index --no-deps --no-build-isolation --editable /opt/multimesh
rm -r /opt/multimesh
site=$(/opt/.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo /opt/third_party/maxtext/src >"$site/multimesh-third-party.pth"
