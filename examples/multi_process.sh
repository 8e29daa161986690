#!/usr/bin/env bash
# Run multi_process.py in two processes of four CPU devices each, and print what each wrote.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export JAX_NUM_CPU_DEVICES=4
num_processes=2
logs=$(mktemp -d)
trap 'rm -r "$logs"' EXIT
pids=()
for ((i = 0; i < num_processes; i++)); do
  "${PYTHON:-python}" multi_process.py "$i" "$num_processes" >"$logs/$i" 2>&1 &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
for ((i = 0; i < num_processes; i++)); do
  echo "=================== process $i output ==================="
  cat "$logs/$i"
  echo
done
exit "$status"
