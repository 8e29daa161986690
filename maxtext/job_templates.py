"""The text of the files that `jobs.py` makes; ``@name@`` stands for what a description says."""

PYXIS_OR_DOCKER = r"""
launch=(srun --kill-on-bad-exit=1)
inside=/opt/maxtext/@folder@/@script@
if [[ -z ${IMAGE:-} ]]; then
  # A checkout with its .venv (./bootstrap.sh --group run --group cuda12) on a file system that all nodes see.
  : "${CHECKOUT:?name an image, or the repository: CHECKOUT=DIR sbatch ...}"
  launch+=("$CHECKOUT/maxtext/@folder@/@script@")
elif [[ $(srun --help) == *--container-image* ]]; then
  launch+=(--container-image="$IMAGE" --no-container-mount-home /opt/entrypoint.sh "$inside")
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
launch=(srun --kill-on-bad-exit=1 @launch@)
inside=/opt/maxtext/@folder@/@script@
if [[ -z ${IMAGE:-} ]]; then
  # A checkout with its .venv (./bootstrap.sh --group run --group cuda12) on a file system that all nodes see.
  : "${CHECKOUT:?name an image, or the repository: CHECKOUT=DIR sbatch ...}"
  launch+=("$CHECKOUT/maxtext/@folder@/@script@")
elif command -v shifter >/dev/null; then
  launch+=(shifter --image="$IMAGE" --module="gpu,nccl-plugin" /opt/entrypoint.sh "$inside")
else
  options=(--rm --gpu --nccl --net=host --ipc=host --entrypoint=/opt/entrypoint.sh)
  for name in @variables@; do
    options+=("--env=$name")
  done
  launch+=(podman-hpc run "${options[@]}" "$IMAGE" "$inside")
fi
"""

CHECKOUT_ONLY = r"""
: "${CHECKOUT:?name the repository, on a file system that all nodes see: CHECKOUT=DIR sbatch ...}"
launch=(srun --kill-on-bad-exit=1 "$CHECKOUT/maxtext/@folder@/@script@")
"""

LACKING = 5
"""Exit code of a batch script on a cluster that cannot start containers; ``run.py`` has no such code."""

LOST = 17
"""Exit code of a process that ends because another one was lost; a test compares it with the launcher's own."""

ATTEMPTS = r"""
# Process 0 is on the first node; its address as Slurm has it.
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(scontrol show node "$first" --oneliner | grep -o 'NodeAddr=[^ ]*')

# With --max-restarts K all processes start again from the newest checkpoint when one was lost.
limit=$(sed -nE 's/^(.* )?--max-restarts[ =]([0-9]+)( .*)?$/\2/p' <<<"$*")
if [[ -n $limit ]]; then
  # A node that is lost never says that its processes ended: srun waits so many seconds for it, and shares its place.
  export SLURM_WAIT="${SLURM_WAIT:-60}" SLURM_OVERLAP=1
fi
# Only who knows this word joins the job's processes, and can stop them.
export MULTIMESH_JOB_SECRET="${MULTIMESH_JOB_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' ')}"
more=()
for ((restarts = 0; ; restarts++)); do
  # JAX's own choice of a port; another one each time, because what is left of the last attempt may still listen.
  export JAX_COORDINATOR_ADDRESS="${address#*=}:$((61440 + (SLURM_JOB_ID + 97 * restarts) % 4096))"
  export MULTIMESH_MAXTEXT_RESTARTS=$restarts
  code=0
  "${launch[@]}" "$@" "${more[@]}" || code=$?
  # @lost@: a process says that another one was lost; above 128: it was killed itself.
  if ((restarts >= ${limit:-0} || (code != @lost@ && code <= 128))); then
    exit "$code"
  fi
  more=(--resume)
  echo "a process was lost (srun ended with exit code $code); all start again"
done
"""

VARIABLES = (
    "{JAX_COORDINATOR_ADDRESS,MULTIMESH_{JOB_SECRET,MAXTEXT_RESTARTS},"
    "SLURM_{JOB_ID,STEP_NODELIST,NTASKS,PROCID,LOCALID}}"
)

BATCH = r"""#!/usr/bin/env bash
# @title@, one process per GPU. Made by maxtext/jobs.py; see README.md.
#   @submit@ sbatch [options of sbatch] job.sbatch [flags of run.py]
@options@
set -euo pipefail
@containers@@attempts@"""

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
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  operator: NotIn
                  values: [@lost@, 137, 143]
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
                    - name: MULTIMESH_JOB_SECRET
                      valueFrom:
                        secretKeyRef:
                          name: multimesh-job
                          key: secret
                          optional: true
                    - name: MULTIMESH_MAXTEXT_SIZE
                      value: "@count@"
                    - name: MULTIMESH_MAXTEXT_LOCAL_RANK
                      value: "0"
                    - name: MULTIMESH_MAXTEXT_RANK
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
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
@jobset@
@about@

With `--max-restarts K --checkpoint DIR --output DIR`, folders that all nodes see, all processes start again within the
job when one is lost: see [checkpoints](../README.md#checkpoints).

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

`docker/build.py --validate large` submits this job with the image that it built, shows its output, and judges it by its
exit state and its last loss: see [docker/README.md](../../docker/README.md#the-large-check)."""


_PLANNED = """## What the planner would choose

{found}

All of this is [forecast](../../docs/forecasts.md), with a band of 10 %; nothing was measured.
[Which configuration](../../docs/suggesting.md) says how the search goes:

```
maxtext/run.py --suggest --device h100 {flags}
```

"""

PLANNED_175B = _PLANNED.format(
    found="""\
tp 8, pp 8, interleave 6, microbatch 4 with `--schedule interleaved-zb --sequence-parallel`: 8.35 s a step, 52.7 %
MFU. The flags of this folder take 8.52 s, 2 % more: as good as it gets. Without a pipeline the best takes 12.7 s,
because of the network.""",
    flags="--gpus 8 --nodes 8 --model-name gpt3-175b --sequence-length 2048 --batch-size 128 --fbmem 77",
)

PLANNED_70B = _PLANNED.format(
    found="""\
dp 2, tp 8, pp 4, interleave 5, microbatch 4 with `--schedule interleaved-zb --sequence-parallel`, and stages of 4
layers but the first (5) and the last (3): 7.24 s a step, 49.6 % MFU. The flags of this folder take 8.53 s, 18 % more:
their 16 stages wait a quarter of the step. Without a pipeline the best takes 8.60 s, because of the network.""",
    flags="--gpus 8 --nodes 8 --model-name llama3-70b --sequence-length 4096 --batch-size 128 --fbmem 78",
)

PLANNED_8B = _PLANNED.format(
    found="""\
No pipeline: dp 2, fsdp 4, tp 2, microbatch 4 with `--sequence-parallel` takes 0.90 s a step, 44.6 % MFU. The best
pipeline (dp 4, tp 2, pp 2, interleave 2 with `--schedule zb-v`) takes 0.92 s, and the flags of this folder 1.03 s, 14 %
more.""",
    flags="--gpus 8 --nodes 2 --model-name llama3-8b --sequence-length 4096 --batch-size 32 --fbmem 78",
)

MEMORY_70B = """## Memory

By the forecast these flags need 54.5 GiB (58.5e9 bytes) on each GPU of stage 0, which holds 94 forwards of one
layer at its peak: 30.2 GiB. Parameters, their moments and gradients are 20 GiB. One forward of one layer keeps
0.32 GiB for its backward (8,192 tokens of 21,000 numbers in bfloat16: what comes in, queries, keys, values and two
products of the feed-forward block, by `--remat minimal`). The original's test suite asks of this job that it stay
below 72e9 bytes and 8.9 s a step; the forecast is 8.6 s.

"""
