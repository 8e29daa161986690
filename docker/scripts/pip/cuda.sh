#!/bin/sh
# cuda.sh [PACKAGE...]: install these packages of requirements/cuda12.txt, or all that are not there yet. Several steps make several
# layers, none so large that a slow upload has to begin again.
set -eu
packages=/requirements/cuda12.txt
if [ $# -gt 0 ]; then
  packages=$(mktemp)
  for package in "$@"; do # its line, and those with its hashes
    awk -v package="$package==" 'index($0, package) == 1, !/\\$/' /requirements/cuda12.txt | grep . >>"$packages" || {
      echo "error: requirements/cuda12.txt: has no $package" >&2
      exit 4
    }
  done
fi
"$(dirname "$0")/pip.sh" --require-hashes --only-binary=:all: --no-deps -r "$packages"
