#!/bin/sh
# Register MultiMesh and its launcher (as installed distributions) and MaxText (as a path), before their files are
# there: a change of a file then needs no installation.
set -eu
for project in multimesh:multimesh planner:multimesh_planner numerics:multimesh_numerics maxtext:multimesh_maxtext; do
  folder=/opt/${project%:*}
  mkdir -p "$folder/src/${project#*:}"
  cp "/projects/${project%:*}/"* "$folder/"
  touch "$folder/README.md"
  PYTHONPATH=$(echo /opt/installer/lib/python3*/site-packages) \
    "$(dirname "$0")/pip.sh" --no-index --no-deps --no-build-isolation --editable "$folder"
  rm -r "$folder"
done
site=$(/opt/.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo /opt/third_party/maxtext/src >"$site/multimesh-third-party.pth"
