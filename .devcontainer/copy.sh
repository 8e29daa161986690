#!/usr/bin/env bash
# copy.sh FOLDER: a second clone of this workspace, with a branch, an environment and a container of its own.
set -euo pipefail

if (($# != 1)) || [[ -e $1 ]]; then
  printf 'usage: %s FOLDER\nFOLDER must not exist yet.\n' "$0" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
git clone --quiet "$root" "$1"
if url=$(git -C "$root" remote get-url origin 2>/dev/null); then git -C "$1" remote set-url origin "$url"; fi
printf 'cloned into %s; open its multimesh-jax.code-workspace, or: npx @devcontainers/cli up --workspace-folder %q\n' "$1" "$1"
