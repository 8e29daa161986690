"""The text of the files that `jobs.py` makes; ``@name@`` stands for what a description says."""

PYXIS_OR_DOCKER = r"""
launch=(srun --kill-on-bad-exit=1)
inside=/opt/maxtext/@folder@/@chosen@
if [[ -z ${IMAGE:-} ]]; then
  # A checkout with its .venv (./bootstrap.sh --group run --group cuda12) on a file system that all nodes see.
  : "${CHECKOUT:?name an image, or the repository: CHECKOUT=DIR sbatch ...}"
  launch+=("$CHECKOUT/maxtext/@folder@/@chosen@")
elif [[ $(srun --help) == *--container-image* ]]; then
  launch+=(--container-image="$IMAGE" --container-mounts="$(IFS=, && echo "${mounts[*]}")" --no-container-mount-home)
  launch+=(/opt/entrypoint.sh "$inside")
else
  each_node=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1)
  if ! "${each_node[@]}" docker version --format '{{.Server.Version}}' >/dev/null; then
    echo "error: srun has no --container-image (pyxis), and not every node has a Docker that answers; install one" >&2
    exit @lacking@
  fi
  if [[ -n ${IMAGE_ARCHIVE:-} ]]; then
    "${each_node[@]}" docker load --quiet --input "$IMAGE_ARCHIVE"
  fi
  options=(--rm --init --network=host --ipc=host --entrypoint=/opt/entrypoint.sh --workdir=/tmp)
  options+=(--user="$(id -u):$(id -g)" --env=HOME=/tmp "${mounts[@]/#/--volume=}")
  if [[ ${SLURM_GPUS_ON_NODE:-0} -gt 0 ]]; then
    options+=(--gpus=all)
  fi
  for name in @variables@; do
    options+=("--env=$name")
  done
  launch+=(docker run "${options[@]}" "$IMAGE" "$inside")
fi
"""

SHIFTER_OR_MODULES = r"""
unset SLURM_TRES_PER_TASK # sbatch of Slurm 23.11 sets it for --gpus-per-task; srun refuses the two together
launch=(srun --kill-on-bad-exit=1 @launch@)
inside=/opt/maxtext/@folder@/@chosen@
if [[ -z ${IMAGE:-} ]]; then
  # A checkout with its .venv (./bootstrap.sh --group run --group cuda12) on a file system that all nodes see.
  : "${CHECKOUT:?name an image, or the repository: CHECKOUT=DIR sbatch ...}"
  launch+=("$CHECKOUT/maxtext/@folder@/@chosen@")
elif command -v shifter >/dev/null; then
  launch+=(shifter --image="$IMAGE" --module="gpu,nccl-plugin" "${mounts[@]/#/--volume=}" /opt/entrypoint.sh "$inside")
else
  options=(--rm --gpu --nccl --net=host --ipc=host --entrypoint=/opt/entrypoint.sh "${mounts[@]/#/--volume=}")
  for name in @variables@; do
    options+=("--env=$name")
  done
  launch+=(podman-hpc run "${options[@]}" "$IMAGE" "$inside")
fi
"""

MOUNTED = r"""
# A container sees these folders, at their own place: those of flags, the compiled programs, and those of MOUNTS.
mounts=()
mount_folder() {
  if [[ $1 != /* ]]; then
    echo "error: $1 is a path within the container, and ends with it; write the whole path" >&2
    exit 2
  fi
  mkdir -p "$1"
  mounts+=("$1:$1")
}
if [[ -n ${IMAGE:-} ]]; then
  for flag in output checkpoint dump; do
    folder=$(value_of "$flag" "$*")
    if [[ -n $folder ]]; then
      mount_folder "$folder"
    fi
  done
  export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$HOME/.cache}"
  mount_folder "$XDG_CACHE_HOME/multimesh"
  IFS=, read -r -a more <<<"${MOUNTS:-}"
  mounts+=("${more[@]}")
fi
"""

CHECKOUT_ONLY = r"""
: "${CHECKOUT:?name the repository, on a file system that all nodes see: CHECKOUT=DIR sbatch ...}"
launch=(srun --kill-on-bad-exit=1 "$CHECKOUT/maxtext/@folder@/@chosen@")
"""

LACKING = 5
"""Exit code of a batch script on a cluster that cannot start containers; ``run.py`` has no such code."""

PREEMPTED = 18
"""Exit code of a run that saved because a signal ended it; a test compares it with the launcher's own."""

LOST = 17
"""Exit code of a process that ends because another one was lost; a test compares it with the launcher's own."""

ATTEMPTS = r"""
# With --max-restarts K all processes start again from the newest checkpoint when one was lost, on healthy nodes of the
# allocation, spare ones first. With --fallback they take the next grid when these are too few, until more return.
limit=$(value_of max-restarts "$*") checkpoint=$(value_of checkpoint "$*") output=$(value_of output "$*")
if [[ -n $limit ]]; then
  # A node that is lost never says that its processes ended: srun waits so many seconds for it, and shares its place.
  export SLURM_WAIT="${SLURM_WAIT:-60}" SLURM_OVERLAP=1
fi

healthy() {
  scontrol show node "$SLURM_JOB_NODELIST" --oneliner |
    grep -vE ' State=[^ ]*(DOWN|DRAIN|FAIL|NOT_RESPONDING|\*)' | sed -E 's/^NodeName=([^ ]+).*/\1/'
}
newest() { find "$checkpoint" -maxdepth 1 -regex '.*/[0-9]+' -printf '%f\n' 2>/dev/null | sort -n | tail -n 1; }
each=$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))
grids=("$SLURM_NTASKS")
if [[ " $*" == *" --fallback"* ]]; then
  # Lines of processes and flags; a grid that does not come out is refused here.
  ask=("${launch[0]}" --nodes=1 --ntasks=1 --ntasks-per-node=1 "${launch[@]:1}" "$@" --show-grids)
  found=$("${ask[@]}" | sed -n '/^[0-9]/p')
  mapfile -t grids <<<"$found"
fi
choose() {
  local line needed words
  mapfile -t nodes < <(healthy)
  for line in "${grids[@]}"; do
    read -r -a words <<<"$line"
    needed=$(((words[0] + each - 1) / each))
    if ((needed <= ${#nodes[@]})); then
      processes=${words[0]} grid=("${words[@]:1}") nodes=("${nodes[@]:0:needed}")
      return
    fi
  done
  echo "error: ${#nodes[@]} of $SLURM_JOB_NUM_NODES nodes are healthy, too few for any grid; see sinfo" >&2
  return 1
}
# Wait until a larger grid fits and a checkpoint was written since; then end the step that runs.
grow() {
  local now=$processes begun=""
  while sleep 5 && kill -0 "$1" 2>/dev/null; do
    choose 2>/dev/null || continue
    if ((processes <= now)); then
      begun=""
    elif [[ -z $begun ]]; then
      begun=at-$(newest)
    elif [[ $begun != "at-$(newest)" ]]; then
      echo "$processes processes fit again; all start again"
      kill -USR1 "$1" 2>/dev/null || true
      return
    fi
  done
  return 1
}

more=() restarts=0
if ((${SLURM_RESTART_COUNT:-0})); then
  more=(--resume) # Slurm gave the job another allocation; attempts are counted on
  restarts=$(($(cat "$output/.attempt" 2>/dev/null || echo 0) + 1))
fi
# Some minutes before the end of the allocation Slurm sends USR1. All processes save then, and the job asks for another
# allocation if it may start again. Other signals that end the job let them save too.
step="" warned=0
# srun hands USR1 on to the processes; for TERM it would kill them.
trap 'warned=1; kill -USR1 $step 2>/dev/null || true' USR1
trap 'kill -USR1 $step 2>/dev/null || true' TERM
# Who holds up the others for so many seconds ends the job; the log of process 0 says who.
export MULTIMESH_STALL_TIMEOUT="${MULTIMESH_STALL_TIMEOUT:-1800}"
for ((losses = 0; ; restarts++)); do
  choose || exit @lost@
  if [[ -n $limit ]]; then
    mkdir -p "$output" && echo "$restarts" >"$output/.attempt"
  fi
  # Process 0 is on the first node; its address as Slurm has it.
  address=$(scontrol show node "${nodes[0]}" --oneliner | grep -o 'NodeAddr=[^ ]*')
  # JAX's own choice of a port; another one each time, because what is left of the last attempt may still listen.
  export JAX_COORDINATOR_ADDRESS="${address#*=}:$((61440 + (SLURM_JOB_ID + 97 * restarts) % 4096))"
  export MULTIMESH_MAXTEXT_RESTARTS=$restarts
  place=(--nodes="${#nodes[@]}" --ntasks="$processes" --ntasks-per-node="$each")
  place+=(--nodelist="$(IFS=, && echo "${nodes[*]}")")
  "${launch[0]}" "${place[@]}" "${launch[@]:1}" "$@" "${grid[@]}" "${more[@]}" &
  step=$! code=0 grown=0
  if [[ $processes != "${grids[0]%% *}" ]] && grow "$step"; then
    grown=1
  fi
  while code=0 && { wait "$step" || code=$?; } && kill -0 "$step" 2>/dev/null; do
    : # a signal ended the waiting, not the step
  done
  more=(--resume)
  if ((grown && code)); then
    continue
  fi
  if ((code == @preempted@ && warned)) && [[ -n $limit ]]; then
    echo "the time of this allocation ends; the job waits for another one"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  # @lost@: a process says that another one was lost; above 128: it was killed itself.
  if ((losses++ >= ${limit:-0} || (code != @lost@ && code <= 128))); then
    exit "$code"
  fi
  echo "a process was lost (srun ended with exit code $code); all start again"
done
"""

VARIABLES = (
    "{JAX_COORDINATOR_ADDRESS,XDG_CACHE_HOME,MULTIMESH_{STALL_TIMEOUT,MAXTEXT_RESTARTS},"
    "SLURM_{JOB_ID,STEP_NODELIST,NTASKS,PROCID,LOCALID}}"
)

BATCH = r"""#!/usr/bin/env bash
# @title@, one process per GPU. Made by maxtext/jobs.py; see README.md.
#   @submit@ sbatch [options of sbatch] job.sbatch [flags of run.py]
@options@
set -euo pipefail
# The value of a flag among those of run.py.
value_of() { sed -nE "s/^(.* )?--$1[ =]([^ ]+)( .*)?$/\2/p" <<<"${*:2}"; }
@mounted@@containers@@attempts@"""

PROCESS = r"""#!/usr/bin/env bash
# One process of the job, as srun starts it. Made by maxtext/jobs.py.
# Flags of run.py given here come last, so they win: @script@ --num-steps 100
set -euo pipefail
: "${SLURM_LOCALID:?srun starts this, once per GPU}" "${SLURM_NTASKS:?}"
@start@
exec @bind@"$(dirname "${BASH_SOURCE[0]}")/../run.py" --nodes "$SLURM_NTASKS" --gpus 1 --cpus 1 \
  @flags@"$@"
"""

DGX = r"""
cores=(
  "0-13,112-125" "14-27,126-139" "28-41,140-153" "42-55,154-167"
  "56-69,168-181" "70-83,182-195" "84-97,196-209" "98-111,210-223"
)
memory=(0 0 0 0 1 1 1 1)
bind=()
if [[ $(nproc --all) -eq 224 ]]; then
  bind=(numactl "--physcpubind=${cores[SLURM_LOCALID]}" "--membind=${memory[SLURM_LOCALID]}")
elif [[ ${SLURM_PROCID:-0} -eq 0 ]]; then
  echo "not a DGX H100 ($(nproc --all) logical cores, not 224): processes are not bound to cores"
fi
"""

JOBSET = """# @title@, as a JobSet of Kubernetes: a process per node. Made by maxtext/jobs.py; see README.md.
# Never applied to a cluster. Put your own in place of IMAGE and of CLAIM, a volume claim that all pods can write to:
#   sed 's|: IMAGE|: REPO:TAG|; s|: CLAIM|: NAME|' jobset.yaml | kubectl apply -f -
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: @folder@
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true
  failurePolicy:
    maxRestarts: 3
    rules:
      # An error that is no lost process would come again.
      - name: only-lost-processes
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          parallelism: @count@
          completions: @count@
          backoffLimit: 0
          # With --fallback GRIDS in args, because the pod of a lost node may wait for ever (Kubernetes 1.33):
          # successPolicy: {rules: [{succeededCount: 1}]}
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  operator: NotIn
                  values: [@lost@, @preempted@, 137, 143]
          template:
            spec:
              restartPolicy: Never
              containers:
                - name: maxtext
                  image: IMAGE
                  command: [/opt/entrypoint.sh, /opt/maxtext/run.py]
                  args: [
                    --nodes, "@count@", --gpus, "@gpus@", --max-restarts, "3", --resume,
                    --checkpoint, /srv/@folder@/checkpoints, --output, /srv/@folder@/output,
                    @words@
                  ]
                  env:
                    - name: JAX_COORDINATOR_ADDRESS
                      value: @folder@-node-0-0.@folder@:61440
                    - name: MULTIMESH_STALL_TIMEOUT
                      value: "1800"
                    - name: MULTIMESH_MAXTEXT_SIZE
                      value: "@count@"
                    - name: MULTIMESH_MAXTEXT_LOCAL_RANK
                      value: "0"
                    - name: MULTIMESH_MAXTEXT_RANK
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
                    # With --fallback GRIDS: where other pods reach this one; they count who has come.
                    - name: MULTIMESH_MAXTEXT_ADDRESS
                      value: @folder@-node-0-$(MULTIMESH_MAXTEXT_RANK).@folder@:61440
                    - name: MULTIMESH_MAXTEXT_RESTARTS
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['jobset.sigs.k8s.io/restart-attempt']
                  resources:
                    limits:
                      nvidia.com/gpu: @gpus@
                  volumeMounts:
                    - name: shared
                      mountPath: /srv
                    - name: memory
                      mountPath: /dev/shm
              volumes:
                - name: shared
                  persistentVolumeClaim:
                    claimName: CLAIM
                - name: memory
                  emptyDir:
                    medium: Memory
"""

README = """# @title@

@nodes@@grid@.

```
@submit@ sbatch --account=ACCOUNT @asked@maxtext/@folder@/job.sbatch@example@
@submit@ sbatch @asked@maxtext/@folder@/job.sbatch@example@ --num-steps 100
```

Options of sbatch come before the script, flags of [`run.py`](../README.md) after it: they come last, so they win. The
job's output ends with `ok: N steps, loss A -> B`, or with an error and its exit code.

| file | what it is |
|---|---|
| `job.sbatch` | the batch script: where process 0 is, and how processes are started |
| `@script@` | what every process runs: it starts `run.py` |
@original@@jobset@
@about@

With `--max-restarts K --checkpoint DIR --output DIR`, folders that all nodes see, all processes start again within the
job when one is lost: see [checkpoints](../README.md#checkpoints). Five minutes before its time ends the job saves and
asks Slurm for another allocation, in which it goes on; without `--max-restarts` it saves and ends with exit code
@preempted@.

## Settings

| variable | |
|---|---|
@settings@

@note@## What was tried

`maxtext/jobs.py` makes this folder from one description; tests compare the two, and try the flags with `--dry-run`.
@tried@
"""

JOBSET_ROW = (
    "| `jobset.yaml` | the same job for Kubernetes with JobSet, one process per node; never applied to a cluster |\n"
)

UNTRIED = "No run on such a machine has been recorded."

TRIED = """No run on 16 GPUs, on a DGX
or with pyxis has been recorded. What was run: this batch script on a Slurm of two nodes on one machine, in Docker
containers, with a small llama3 on CPU devices.

## As the check of an image

Push the image without its tags, give it to this job, and move the tags when the job passed: see
[docker/README.md](../../docker/README.md#a-check-on-a-cluster)."""


_PLANNED = """## What the planner would choose

{found}

All of this is [forecast](../../docs/forecasts.md), within 20 %; nothing was measured.
[Which configuration](../../docs/suggesting.md) says how the search goes:

```
maxtext/run.py --suggest --device h100 {flags}
```

"""

PLANNED_175B = _PLANNED.format(
    found="""\
`zb-v` with two stages on each submesh takes 8.33 s, these flags 8.34: stages of equal layers, `interleaved-zb`,
activations split along the sequence between the products of tensor parallelism. Without a pipeline the best takes
11.2 s, because of the network.""",
    flags="""--gpus 8 --nodes 8 --model-name gpt3-175b \\
  --sequence-length 2048 --batch-size 128 --fbmem 77""",
)

PLANNED_70B = _PLANNED.format(
    found="""\
The fastest takes 7.17 s: dp 2, fsdp 2, tp 4, pp 4, interleave 2, microbatch 2 with `zb-v`. These flags take 7.35 s: dp
2, tp 8, pp 4 and `interleaved-zb`, with stages of 4 layers but the first (5) and the last (3), which also have the
embedding and the logits. Without a pipeline fsdp 32 and tp 2 take 7.53 s, in 78 GB of each GPU. The original's 16
stages wait a quarter of the step.""",
    flags="""--gpus 8 --nodes 8 --model-name llama3-70b \\
  --sequence-length 4096 --batch-size 128 --fbmem 78""",
)

PLANNED_8B = _PLANNED.format(
    found="""\
No pipeline: dp 2, fsdp 8, microbatch 2 takes 0.84 s a step, 47.6 % MFU. The best pipeline (dp 4, tp 2, pp 2,
interleave 2, microbatch 2 with `--schedule zb-v`) takes 0.87 s, and the flags of this folder 0.99 s, 18 % more.""",
    flags="""--gpus 8 --nodes 2 --model-name llama3-8b \\
  --sequence-length 4096 --batch-size 32 --fbmem 78""",
)

LIMITS = """## Forecast

| flags | seconds of a step | bytes of the fullest GPU |
|---|---|---|
| these, what the planner finds | {planned[0]:.2f} | {planned[1]:.1f}e9 |
| the original's own line, `SCRIPT=run-original.sh` | {theirs[0]:.2f} | {theirs[1]:.1f}e9 |
| what the original's test suite allows | {limits[0]} | {limits[1]}e9 |

"""

ORIGINAL_ROW = (
    "| `run-original.sh` | the same with the original's own line of flags: `SCRIPT=run-original.sh sbatch ...` |\n"
)
