#!/usr/bin/env bash
# An hour on a bare machine with GPUs: installs, then measures, most telling first. Each step has a time limit and writes its
# output to a file of its own; a line of JSON and the table are there after each step, so that a machine that goes away after
# eight minutes has told what it knew.
#
#   multimesh/benchmarks/gpu_hour.sh             on all visible GPUs
#   multimesh/benchmarks/gpu_hour.sh --cpu       the same steps on CPU devices, with small sizes: a rehearsal
#   multimesh/benchmarks/gpu_hour.sh STEP...     some of the steps: install check validate gpu one_gpu size_1b plan_memory
#
# FOLDER (build/gpu-hour), CUDA (12, or 13) and MINUTES (a limit for each step in place of its own) come from the environment.
# Exit code: 0 if all steps passed, or else 1.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit
readonly folder=${FOLDER:-build/gpu-hour} python=.venv/bin/python
mkdir -p "$folder"

cpu=
if [[ ${1-} == --cpu ]]; then cpu=--cpu && shift; fi
if [[ $cpu ]]; then
  gpus=2 devices=(--cpus 2) group=run compiled=()
  size=(--num-layers 4 --model-dims 128 --mlp-dims 256 --batch-size 8 --microbatch-size 2 --sequence-length 64 --num-steps 3)
else
  gpus=$(nvidia-smi --list-gpus | grep -c '^GPU') || { echo "error: nvidia-smi lists no GPU; --cpu rehearses" >&2 && exit 4; }
  devices=(--gpus "$gpus") group=cuda${CUDA:-12}
  model=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | grep -oiE 'a100|h100|h200|b200') || model=h100
  compiled=(--compile --device "${model,,}")
  size=(--num-layers 16 --num-heads 16 --model-dims 2048 --mlp-dims 8192 --batch-size 32 --microbatch-size 4 --num-steps 10)
fi
pipeline=(maxtext/run.py "${devices[@]}" --pp "$gpus" "${size[@]}")
if ((gpus == 1)); then pipeline=(maxtext/run.py "${devices[@]}" --backend spmd "${size[@]}"); fi

# step NAME MINUTES COMMAND...: run a command within a time limit, and note how it ended
step() {
  local name=$1 minutes=${MINUTES:-$2} from=$SECONDS code=0
  shift 2
  printf '=== %s, at most %s min: %s\n' "$name" "$minutes" "$*"
  timeout --kill-after=20 "${minutes}m" "$@" >"$folder/$name.log" 2>&1 || code=$?
  printf '{"step": "%s", "code": %d, "seconds": %d, "log": "%s"}\n' "$name" "$code" $((SECONDS - from)) "$folder/$name.log" \
    >>"$folder/steps.jsonl"
  tail -n 15 "$folder/$name.log"
}

install() { step install 15 ./bootstrap.sh --group run --group "$group"; }
check() { step check 5 "$python" -m multimesh check -n "$gpus" --report "$folder/check.json"; }
validate() { if [[ $cpu ]]; then step validate 6 maxtext/validate-cpu.sh; else step validate 6 maxtext/validate-gpu.sh; fi; }
gpu() { step gpu 12 "$python" multimesh/benchmarks/gpu.py $cpu; }
one_gpu() { step one_gpu 5 "$python" multimesh/benchmarks/one_gpu.py $cpu; }
size_1b() {
  step size_1b 8 "${pipeline[@]}"
  step size_1b_spmd 8 maxtext/run.py "${devices[@]}" --backend spmd --fsdp "$gpus" "${size[@]}"
}
plan_memory() { step plan_memory 6 "${pipeline[@]}" --forecast "${compiled[@]}"; }

: >"$folder/steps.jsonl"
trap 'exit 130' INT TERM
if ((! $#)); then set -- install check validate gpu one_gpu size_1b plan_memory; fi
for name in "$@"; do
  case $name in
    install | check | validate | gpu | one_gpu | size_1b | plan_memory) "$name" ;;
    *) echo "error: $name: is no step" >&2 && exit 2 ;;
  esac
done
printf '\n| step | exit code | seconds |\n|---|---|---|\n'
sed -E 's/.*"step": "(.*)", "code": ([0-9]+), "seconds": ([0-9]+).*/| \1 | \2 | \3 |/' "$folder/steps.jsonl" | tee "$folder/steps.md"
! grep -qv '"code": 0,' "$folder/steps.jsonl"
