#!/usr/bin/env bash
# nightly-issue.sh FOLDER: one issue, labelled nightly, about the logs in a folder: opened, rewritten, or closed where there are none.
set -euo pipefail

shopt -s nullglob
logs=("$1"/*.log)
open=$(gh issue list --label nightly --state open --json number --jq '.[0].number // empty')
if ((${#logs[@]} == 0)); then
  if [[ -n $open ]]; then gh issue close "$open" --comment 'All that is tested at night passes again.'; fi
  exit
fi
names=()
body=$(mktemp)
for log in "${logs[@]}"; do
  name=$(basename "$log" .log)
  names+=("$name")
  printf '### %s\n\n' "$name"
  # An error as `pytest --tb=short` prints it; without the file that an ImportError names, which differs with the machine.
  errors=$(grep -E '^E +(Attribute|Import|ModuleNotFound|Type)Error: .*\b(jax|jaxlib|jnp|lax)\b' "$log" |
    sed -E 's|^E +||; s| \([^()]*/[^()]*\)$||' | cut -c 1-200 | sort | uniq -c | sort -rn | head -n 15 || true)
  if [[ -n $errors ]]; then printf 'What of JAX moved, and how many errors say so:\n\n~~~text\n%s\n~~~\n\n' "$errors"; fi
  printf '.ci/run %s ended with\n\n~~~text\n' "$name"
  tail -n 60 "$log" | cut -c 1-200 | sed 's/^~/ ~/' # GitHub takes no more than 65,536 characters
  printf '~~~\n\n'
done >"$body"
title="Nightly: $(printf '%s, ' "${names[@]}" | sed 's/, $//') breaks our tests"
if [[ -n $open ]]; then
  gh issue edit "$open" --title "$title" --body-file "$body"
else
  gh label create nightly --force --description 'what breaks at night'
  gh issue create --title "$title" --body-file "$body" --label nightly
fi
