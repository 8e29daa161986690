# What every job.sbatch does, after its own settings. See README.md of this folder.
# shellcheck shell=bash
: "${folder:?a job.sbatch says where it lies}"
# The words of a kind in the settings.
words_of() { sed -n "s/^#$1 //p" "$folder/job.sbatch"; }
set -euo pipefail
# Some minutes before the end of the allocation Slurm sends USR1: all processes save and end. So they do if the job is
# told to end. srun hands USR1 on to them; for TERM it would kill them.
step="" warned=0 ended=0
trap 'warned=1; [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null || true' USR1
trap 'ended=1; [[ -z $step ]] || kill -USR1 "$step" 2>/dev/null || true' TERM

# A container sees these folders, at their own place: those that flags name, the compiled programs, and those of MOUNTS.
mounts=() checkpoint=""
mount_folder() { # of these words
  if [[ $1 != /* ]]; then
    echo "error: ${2:-$1} is a path within the container, and ends with it; write the whole path" >&2
    exit 2
  fi
  mkdir -p "$1"
  # an engine refuses one place twice, and MOUNTS may say how the folder is mounted
  if [[ ",${MOUNTS:-}," != *:"$1"[,:]* && " ${mounts[*]:-} " != *" $1:$1 "* ]]; then mounts+=("$1:$1"); fi
}
note_value() { # of a flag
  [[ $1 != --checkpoint ]] || checkpoint=$2
  if [[ -n ${IMAGE:-} ]]; then
    case $1 in
      --output | --checkpoint | --dump | --export) mount_folder "$2" "$*" ;;
      --metrics-file | --prometheus | --text | --maxtext-config | --custom-schedule-path)
        mount_folder "$(dirname "$2")" "$*"
        ;;
    esac
  fi
}
# The settings' flags, and those given to sbatch.
kind=FLAGS
case ${SCRIPT:-run.sh} in
  run.sh | run-dgx-h100.sh | run-perlmutter.sh) ;;
  run-original.sh) kind=ORIGINAL ;;
  *)
    echo "error: SCRIPT=$SCRIPT is not known; put its flags into lines '#FLAGS' of $folder/job.sbatch" >&2
    exit 2
    ;;
esac
read -r -d '' -a flags < <(words_of "$kind") || true
if [[ $kind == ORIGINAL && ${#flags[@]} -eq 0 ]]; then
  echo "error: SCRIPT=$SCRIPT: $folder/job.sbatch has no lines '#ORIGINAL'; leave SCRIPT out" >&2
  exit 2
fi
flags+=("$@")
flag=""
for word in "${flags[@]}"; do
  case $word in
    --verify) export SLURM_WAIT="${SLURM_WAIT:-0}" ;; # process 0 trains once more when the others have ended
    --*=*) note_value "${word%%=*}" "${word#*=}" ;;
    --*) flag=$word ;;
    *=*) ;;
    *) note_value "$flag" "$word" ;;
  esac
done

read -r -d '' -a srun_options < <(words_of SRUN) || true
launch=(srun --kill-on-bad-exit=1 "${srun_options[@]}")
unset SLURM_TRES_PER_TASK # sbatch of Slurm 23.11 sets it for --gpus-per-task; srun refuses the two together
entry=(/opt/entrypoint.sh "/opt/maxtext/slurm/run.sh")
if [[ -z ${IMAGE:-} ]]; then
  # A checkout with its .venv (./bootstrap.sh --group run --group cuda12) on a file system that all nodes see.
  : "${CHECKOUT:?name an image, or the repository: CHECKOUT=DIR sbatch ...}"
  launch+=("$CHECKOUT/maxtext/slurm/run.sh")
else
  export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}"
  mount_folder "$XDG_CACHE_HOME/multimesh"
  IFS=, read -r -a more <<<"${MOUNTS:-}"
  mounts+=("${more[@]}")
  volumes=("${mounts[@]/#/--volume=}") variables=()
  for name in {JAX_COORDINATOR_ADDRESS,XDG_CACHE_HOME,SLURMD_NODENAME,MULTIMESH_STALL_TIMEOUT,SLURM_{JOB_ID,STEP_NODELIST,NTASKS,PROCID,LOCALID}}; do
    variables+=("--env=$name")
  done
  each_node=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
  if [[ $(srun --help) == *--container-image* ]]; then
    launch+=(--container-image="$IMAGE" --container-mounts="$(IFS=, && echo "${mounts[*]}")" --no-container-mount-home)
    launch+=("${entry[@]}")
  elif command -v shifter >/dev/null; then
    launch+=(shifter --image="$IMAGE" --module="gpu,nccl-plugin" "${volumes[@]}" "${entry[@]}")
  elif command -v podman-hpc >/dev/null; then
    launch+=(podman-hpc run --rm --gpu --nccl --net=host --ipc=host "${volumes[@]}" "${variables[@]}")
    launch+=(--entrypoint="${entry[0]}" "$IMAGE" "${entry[1]}")
  elif "${each_node[@]}" docker version --format '{{.Server.Version}}' >/dev/null; then
    [[ -z ${IMAGE_ARCHIVE:-} ]] || "${each_node[@]}" docker load --quiet --input "$IMAGE_ARCHIVE"
    launch+=(docker run --rm --init --network=host --ipc=host --workdir=/tmp --user="$(id -u):$(id -g)" --env=HOME=/tmp)
    [[ ${SLURM_GPUS_ON_NODE:-0} -eq 0 ]] || launch+=(--gpus=all)
    launch+=("${volumes[@]}" "${variables[@]}" --entrypoint="${entry[0]}" "$IMAGE" "${entry[1]}")
  else
    echo "error: srun has no --container-image (pyxis), and not every node has a Docker that answers; install one" >&2
    exit 5
  fi
fi

# Starting again is Slurm's: a node that fails requeues the job, and so does this script, when the time of the allocation
# ends or a process was lost, if there is a checkpoint to go on from. A job that was told to end does not come back.
if ((${SLURM_RESTART_COUNT:-0})); then
  start=--overwrite # without a checkpoint it begins anew, over its own files
  if [[ -n $checkpoint ]]; then
    start=--resume
    for number in "${!flags[@]}"; do
      [[ ${flags[number]} != --overwrite ]] || unset "flags[number]"
    done
  fi
  flags+=("$start")
fi
# Process 0 is on the first node; its address as Slurm has it. JAX's own choice of a port, another one each time.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) || true
if [[ -z $first ]]; then
  echo "error: scontrol shows no node of $SLURM_JOB_NODELIST, so nothing says where process 0 is; let jobs call it" >&2
  exit 5
fi
address=$(scontrol show node "$first" --oneliner | grep -o 'NodeAddr=[^ ]*') || address=$first
export JAX_COORDINATOR_ADDRESS="${address#NodeAddr=}:$((61440 + (SLURM_JOB_ID + 97 * ${SLURM_RESTART_COUNT:-0}) % 4096))"
# Who holds up the others for so many seconds ends the job; the log of process 0 says who.
export MULTIMESH_STALL_TIMEOUT="${MULTIMESH_STALL_TIMEOUT:-1800}"
# A node that is lost never says that its processes ended: srun waits so many seconds for it.
export SLURM_WAIT="${SLURM_WAIT:-60}"
code=130
if ((warned + ended == 0)); then
  "${launch[@]}" "${flags[@]}" &
  step=$!
  while code=0 && { wait "$step" || code=$?; } && kill -0 "$step" 2>/dev/null; do
    : # a signal ended the waiting, not the step
  done
fi
# 18: it saved; 130: it was told to end before its first step; 17: a process says that another one was lost; above 128:
# it was killed itself. Anything else would come again.
if [[ -n $checkpoint ]] && ((ended == 0)); then
  if ((warned && (code == 17 || code == 18 || code > 128))); then
    echo "the time of this allocation ends; the job waits for another one"
    scontrol requeue "$SLURM_JOB_ID"
  elif ((code == 17 || code > 128)) && ((${SLURM_RESTART_COUNT:-0} < ${REQUEUES:-3})); then
    echo "a process was lost (srun ended with exit code $code); the job waits for another allocation"
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
