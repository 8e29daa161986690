#!/usr/bin/env python3
"""The jobs beside this file, for Slurm and Kubernetes: ``maxtext/jobs.py --write`` makes a folder of each description.

Change a description or a template here, never the folders: a test compares them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

SHARED = "--attention cudnn_flash_te --remat minimal --xla-rs-threshold 51200 --replicate-small-params"
"""Flags that the original gives to all of its large jobs, in so far as they mean something here."""


@dataclass(frozen=True)
class Machine:
    """Where a job runs.

    Attributes
    ----------
    title, script
        Its name, and that of the script that every process runs.
    gpus
        GPUs of a node, each with a process.
    options
        Further lines of the batch script for sbatch.
    launch
        What srun is told besides.
    start
        How a process finds its cores, and begins.
    containers
        How the batch script starts them.
    settings
        Rows of the README's table of variables.
    about
        What the README says of the machine.
    kubernetes
        Whether it is also one that Kubernetes may manage.
    """

    title: str
    script: str
    gpus: int
    options: tuple[str, ...]
    launch: str
    start: str
    containers: str
    settings: tuple[tuple[str, str], ...]
    about: str
    kubernetes: bool = False


@dataclass(frozen=True)
class Job:
    """One job: a folder of files.

    Attributes
    ----------
    title, grid
        For people: the model, and how it is cut.
    nodes
        Of its machine; 0 where the user says.
    flags
        For ``run.py``, without the processes and devices.
    note
        What else its README says.
    """

    folder: str
    title: str
    grid: str
    machine: Machine
    nodes: int
    time: str
    flags: str
    note: str = ""

    @property
    def processes(self) -> int:
        """How many there are, each with a GPU."""
        return self.nodes * self.machine.gpus


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
    exit 13
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

VARIABLES = "{JAX_COORDINATOR_ADDRESS,MULTIMESH_MAXTEXT_RESTARTS,SLURM_{JOB_ID,STEP_NODELIST,NTASKS,PROCID,LOCALID}}"

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
                    --checkpoint, /shared/@folder@/checkpoints, --output, /shared/@folder@/output,
                    @words@
                  ]
                  env:
                    - name: JAX_COORDINATOR_ADDRESS
                      value: @folder@-node-0-0.@folder@:61440
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
                      mountPath: /shared
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

DGX_H100 = Machine(
    title="DGX H100",
    script="run-dgx-h100.sh",
    gpus=8,
    options=("--gpus-per-node=8", "--exclusive"),
    launch="",
    start=DGX,
    containers=PYXIS_OR_DOCKER,
    settings=(
        (
            "IMAGE",
            "with pyxis what `srun --container-image` takes (`REGISTRY#REPO:TAG`, or a squashfs file), else for Docker",
        ),
        ("IMAGE_ARCHIVE", "without pyxis: a file of `docker save` that all nodes see, loaded on each of them first"),
        (
            "CHECKOUT",
            "without an image: the repository with its `.venv`, where all nodes see it",
        ),
    ),
    about=(
        "`run-dgx-h100.sh` binds each process to the cores and the memory beside its GPU; on another machine than\n"
        "a DGX H100 it binds nothing and says so. It also works in a job of your own, with as many processes as the\n"
        "flags ask for.\n\n"
        "Containers are started by [pyxis](https://github.com/NVIDIA/pyxis) where `srun --help` lists\n"
        "`--container-image`, else by Docker on the nodes. A cluster with neither is refused with exit code 13. MPI\n"
        "launchers (`--mpi=pmix`) are not used: JAX needs Slurm's variables only."
    ),
    kubernetes=True,
)

PERLMUTTER = Machine(
    title="Perlmutter",
    script="run-perlmutter.sh",
    gpus=4,
    options=("--constraint=gpu&hbm80g", "--qos=regular", "--cpus-per-task=32", "--gpus-per-task=1", "--gpu-bind=none"),
    launch="--cpus-per-task=32 --gpus-per-task=1 --gpu-bind=none",
    start="",
    containers=SHIFTER_OR_MODULES,
    settings=(
        (
            "IMAGE",
            "the image, for Shifter (`docker:REGISTRY/REPO:TAG`, pulled by `shifterimg pull`), or for podman-hpc",
        ),
        (
            "CHECKOUT",
            "without an image: the repository with its `.venv`, where all nodes see it. Load modules before `sbatch`",
        ),
    ),
    about=(
        "A node has four A100. Each process sees all of them (`--gpu-bind=none`, so that NCCL reaches the others\n"
        "directly) and takes the one of its rank on the node."
    ),
)

ANY = Machine(
    title="any cluster",
    script="run.sh",
    gpus=0,
    options=(),
    launch="",
    start="",
    containers=CHECKOUT_ONLY,
    settings=(
        (
            "CHECKOUT",
            "the repository with its `.venv` (`./bootstrap.sh --group run --group cuda12`), where all nodes see it",
        ),
    ),
    about=(
        "A template: say with options of sbatch how many nodes and processes there are, one per GPU, and with flags\n"
        "what they train. Copy the folder to bind processes to cores, or to start them in containers, as the folders\n"
        "beside it do."
    ),
)

_MEMORY_70B = """## Memory

By the forecast these flags need 119 GiB on each GPU of stage 0, more than an H100 has; with `--schedule
interleaved` it is 60 GiB. Only the order of the tasks differs: parameters, their moments and gradients are 20
GiB in both. One forward of one layer keeps 0.37 GiB for its backward (8,192 tokens of 25,000 numbers in
bfloat16: what comes in, queries, keys, values and two products of the feed-forward block, by `--remat
minimal`). In `prefetch-wavefront` the backward of layer s comes about 2 x (80 - s) fronts after its forward,
when most of the 64 microbatches have passed it: stage 0 holds 64 + 64 + 64 + 64 + 32 = 288 of its 320 forwards
(`gpipe` holds all 320). Interleaved 1F1B holds 95. The original's flags are kept as they are: whether its
runtime holds as much is not known here.

"""

LLAMA3_8B = (
    f"--dp 2 --pp 2 --tp 4 --interleave 8 --schedule prefetch-wavefront --only-fuse-loop-tasks --model-name llama3-8b "
    f"--num-layers 32 --sequence-length 4096 --batch-size 32 --microbatch-size 2 {SHARED}"
)

JOBS = (
    Job(
        folder="gpt3-175b-64gpus",
        title="gpt3-175b on 64 GPUs",
        grid="pp 8, tp 8, interleave 12; 96 layers, sequence 2048, batch 128, microbatch 4",
        machine=DGX_H100,
        nodes=8,
        time="01:00:00",
        flags=(
            "--pp 8 --tp 8 --interleave 12 --schedule wavefront --model-name gpt3-175b --num-layers 96 "
            "--model-dims 12288 --num-heads 96 --sequence-length 2048 --batch-size 128 --microbatch-size 4 "
            f"{SHARED} --fbmem 77 --num-steps 8"
        ),
    ),
    Job(
        folder="llama3-70b-64gpus",
        title="llama3-70b on 64 GPUs",
        grid="pp 16, tp 4, interleave 5; 80 layers, sequence 4096, batch 128, microbatch 2",
        machine=DGX_H100,
        nodes=8,
        time="01:00:00",
        flags=(
            "--pp 16 --tp 4 --interleave 5 --schedule prefetch-wavefront --only-fuse-loop-tasks "
            "--model-name llama3-70b --num-layers 80 --sequence-length 4096 --batch-size 128 --microbatch-size 2 "
            f"{SHARED} --fbmem 78 --num-steps 10"
        ),
        note=_MEMORY_70B,
    ),
    Job(
        folder="llama3-8b-16gpus",
        title="llama3-8b on 16 GPUs",
        grid="dp 2, pp 2, tp 4, interleave 8; 32 layers, sequence 4096, batch 32, microbatch 2",
        machine=DGX_H100,
        nodes=2,
        time="00:30:00",
        flags=f"{LLAMA3_8B} --fbmem 78 --num-steps 20",
    ),
    Job(
        folder="perlmutter",
        title="llama3-8b on 16 GPUs of Perlmutter",
        grid="dp 2, pp 2, tp 4, interleave 8; 32 layers, sequence 4096, batch 32, microbatch 2",
        machine=PERLMUTTER,
        nodes=4,
        time="01:00:00",
        flags=f"{LLAMA3_8B} --num-steps 20",
    ),
    Job(
        folder="slurm",
        title="A job of your own",
        grid="Processes are those that sbatch is asked for, one per GPU; flags are those behind the script",
        machine=ANY,
        nodes=0,
        time="01:00:00",
        flags="",
    ),
)


def files(job: Job) -> dict[str, str]:
    """Return the name and the content of each file of a job's folder."""
    machine = job.machine
    named = machine.containers is not CHECKOUT_ONLY
    sizes = (f"--nodes={job.nodes}", f"--ntasks-per-node={machine.gpus}") if job.nodes else ()
    options = (f"--job-name={job.folder}", *sizes, *machine.options, f"--time={job.time}")
    several = f"{job.nodes} nodes of {machine.gpus} GPUs each ({machine.title}), one process per GPU: "
    words = {
        "containers": machine.containers.lstrip(),
        "attempts": ATTEMPTS,
        "lost": str(LOST),
        "variables": VARIABLES,
        "options": "\n".join(f"#SBATCH {option}" for option in options),
        "start": machine.start,
        "bind": '"${bind[@]}" ' if machine.start else "",
        "flags": _wrapped(job.flags),
        "launch": machine.launch,
        "script": machine.script,
        "folder": job.folder,
        "title": job.title,
        "grid": job.grid,
        "nodes": several if job.nodes else "",
        "submit": "IMAGE=REPO:TAG" if named else "CHECKOUT=$PWD",
        "example": "" if job.nodes else " --pp 2 --dp 4 --batch-size 32",
        "asked": "" if job.nodes else "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 ",
        "about": machine.about,
        "settings": "\n".join(f"| `{name}` | {text} |" for name, text in machine.settings),
        "count": str(job.nodes),
        "gpus": str(machine.gpus),
        "words": ("\n" + 20 * " ").join(_listed(job.flags)),
        "jobset": _JOBSET_ROW if machine.kubernetes else "",
        "note": job.note,
        "tried": _TRIED if job.folder == "llama3-8b-16gpus" else _UNTRIED,
    }
    made = {"job.sbatch": BATCH, machine.script: PROCESS, "README.md": README}
    made |= {"jobset.yaml": JOBSET} if machine.kubernetes else {}
    return {name: _filled(template, words) for name, template in made.items()}


_JOBSET_ROW = (
    "| `jobset.yaml` | the same job for Kubernetes with JobSet, one process per node; never applied to a cluster |\n"
)

_UNTRIED = "No run on such a machine has been recorded."

_TRIED = """No run on 16 GPUs, on a DGX
or with pyxis has been recorded. What was run: this batch script on a Slurm of two nodes on one machine, in Docker
containers, with a small llama3 on CPU devices.

## As the check of an image

`docker/build.py --validate large` submits this job with the image that it built, shows its output, and judges it by its
exit state and its last loss: see [docker/README.md](../../docker/README.md#the-large-check)."""


def _filled(template: str, words: dict[str, str]) -> str:
    for name, text in words.items():
        template = template.replace(f"@{name}@", text)
    return template


def _wrapped(flags: str) -> str:
    """Break flags into lines of a shell command, each flag with its value."""
    lines = [""]
    for flag in flags.replace(" --", "\n--").splitlines():
        if len(lines[-1]) + len(flag) > 110:
            lines.append("")
        lines[-1] += f"{flag} "
    return "\\\n  ".join(lines)


def _listed(flags: str) -> list[str]:
    """Return flags as lines of a list in YAML, numbers as text."""
    lines = [""]
    for word in flags.split():
        item = f"{json.dumps(word) if word.isdigit() else word}, "
        if len(lines[-1]) + len(item) > 100:
            lines.append("")
        lines[-1] += item
    return [line.rstrip() for line in lines]


def main() -> None:
    """Write all folders."""
    for job in JOBS:
        for name, text in files(job).items():
            path = HERE / job.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    main()
