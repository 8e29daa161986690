#!/usr/bin/env python3
"""The jobs beside this file, for Slurm and Kubernetes: ``maxtext/jobs.py --write`` makes a folder of each description.

Change a description or a template here, never the folders: a test compares them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from job_templates import (
    ATTEMPTS,
    BATCH,
    CHECKOUT_ONLY,
    DGX,
    JOBSET,
    JOBSET_ROW,
    LACKING,
    LIMITS,
    LOST,
    MOUNTED,
    ORIGINAL_ROW,
    PLANNED_8B,
    PLANNED_70B,
    PLANNED_175B,
    PREEMPTED,
    PROCESS,
    PYXIS_OR_DOCKER,
    README,
    SHIFTER_OR_MODULES,
    TRIED,
    UNTRIED,
    VARIABLES,
)

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
    theirs
        The original's own flags for this job, where ``flags`` are better ones.
    forecasts
        Seconds of a step, and 1e9 bytes of the fullest GPU: of ``flags``, of ``theirs``, and what the original's test
        suite allows. The first two are forecasts.
    """

    folder: str
    title: str
    grid: str
    machine: Machine
    nodes: int
    time: str
    flags: str
    note: str = ""
    theirs: str = ""
    forecasts: tuple[tuple[float, float], ...] = ()

    @property
    def processes(self) -> int:
        """How many there are, each with a GPU."""
        return self.nodes * self.machine.gpus


_MOUNTS = (
    "MOUNTS",
    "folders that containers see besides those of `--output`, `--checkpoint` and `--dump` and the compiled programs, "
    "such as data: `/data:/data:ro,/more:/more`",
)

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
        _MOUNTS,
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
        "`--container-image`, else by Docker on the nodes. A cluster with neither is refused with exit code 5. MPI\n"
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
        _MOUNTS,
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

LLAMA3_8B = (
    f"--dp 2 --pp 2 --tp 4 --interleave 8 --schedule prefetch-wavefront --only-fuse-loop-tasks --model-name llama3-8b "
    f"--num-layers 32 --sequence-length 4096 --batch-size 32 --microbatch-size 2 {SHARED}"
)

GPT3_175B = (
    "--model-name gpt3-175b --num-layers 96 --model-dims 12288 --num-heads 96 --sequence-length 2048 --batch-size 128 "
    f"--microbatch-size 4 {SHARED} --fbmem 77 --num-steps 8"
)

LLAMA3_70B = (
    "--model-name llama3-70b --num-layers 80 --sequence-length 4096 --batch-size 128 "
    f"{SHARED} --fbmem 78 --num-steps 10"
)

JOBS = (
    Job(
        folder="gpt3-175b-64gpus",
        title="gpt3-175b on 64 GPUs",
        grid="pp 8, tp 8, interleave 6; 96 layers, sequence 2048, batch 128, microbatch 4",
        machine=DGX_H100,
        nodes=8,
        time="01:00:00",
        flags=f"--pp 8 --tp 8 --interleave 6 --schedule interleaved-zb --sequence-parallel {GPT3_175B}",
        note=PLANNED_175B,
        theirs=f"--pp 8 --tp 8 --interleave 12 --schedule wavefront {GPT3_175B}",
        forecasts=((8.34, 68.9), (8.80, 70.9), (9.65, 73)),
    ),
    Job(
        folder="llama3-70b-64gpus",
        title="llama3-70b on 64 GPUs",
        grid="dp 2, pp 4, tp 8, interleave 5; 80 layers, sequence 4096, batch 128, microbatch 4",
        machine=DGX_H100,
        nodes=8,
        time="01:00:00",
        flags=(
            "--dp 2 --pp 4 --tp 8 --interleave 5 --partition 5,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,3 --schedule "
            f"interleaved-zb --sequence-parallel --microbatch-size 4 {LLAMA3_70B}"
        ),
        note=PLANNED_70B,
        theirs=(
            "--pp 16 --tp 4 --interleave 5 --schedule prefetch-wavefront --only-fuse-loop-tasks --microbatch-size 2 "
            f"{LLAMA3_70B}"
        ),
        forecasts=((7.35, 69.5), (8.60, 56.6), (8.9, 72)),
    ),
    Job(
        folder="llama3-8b-16gpus",
        title="llama3-8b on 16 GPUs",
        grid="dp 2, pp 2, tp 4, interleave 8; 32 layers, sequence 4096, batch 32, microbatch 2",
        machine=DGX_H100,
        nodes=2,
        time="00:30:00",
        flags=f"{LLAMA3_8B} --fbmem 78 --num-steps 20",
        note=PLANNED_8B,
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
    contained = machine.containers is not CHECKOUT_ONLY
    sizes = (f"--nodes={job.nodes}", f"--ntasks-per-node={machine.gpus}") if job.nodes else ()
    options = (f"--job-name={job.folder}", *sizes, *machine.options, f"--time={job.time}")
    options += ("--signal=B:USR1@300", "--open-mode=append", "--requeue")
    several = f"{job.nodes} nodes of {machine.gpus} GPUs each ({machine.title}), one process per GPU: "
    forecast = (
        LIMITS.format(**dict(zip(("planned", "theirs", "limits"), job.forecasts, strict=True))) if job.forecasts else ""
    )
    words = {
        "containers": machine.containers.lstrip(),
        "lacking": str(LACKING),
        "attempts": ATTEMPTS,
        "lost": str(LOST),
        "preempted": str(PREEMPTED),
        "mounted": MOUNTED.lstrip() if contained else "",
        "variables": VARIABLES,
        "options": "\n".join(f"#SBATCH {option}" for option in options),
        "start": machine.start,
        "bind": '"${bind[@]}" ' if machine.start else "",
        "flags": _wrapped(job.flags),
        "launch": machine.launch,
        "script": machine.script,
        "chosen": f"${{SCRIPT:-{machine.script}}}" if job.theirs else machine.script,
        "original": ORIGINAL_ROW if job.theirs else "",
        "folder": job.folder,
        "title": job.title,
        "grid": job.grid,
        "nodes": several if job.nodes else "",
        "submit": "IMAGE=REPO:TAG" if contained else "CHECKOUT=$PWD",
        "example": "" if job.nodes else " --pp 2 --dp 4 --batch-size 32",
        "asked": "" if job.nodes else "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 \\\n  ",
        "about": machine.about,
        "settings": "\n".join(f"| `{name}` | {text} |" for name, text in machine.settings),
        "count": str(job.nodes),
        "gpus": str(machine.gpus),
        "words": ("\n" + 20 * " ").join(_listed(job.flags)),
        "jobset": JOBSET_ROW if machine.kubernetes else "",
        "note": forecast + job.note,
        "tried": TRIED if job.folder == "llama3-8b-16gpus" else UNTRIED,
    }
    made = {"job.sbatch": BATCH, machine.script: PROCESS, "README.md": README}
    made |= {"jobset.yaml": JOBSET} if machine.kubernetes else {}
    found = {name: _filled(template, words) for name, template in made.items()}
    if job.theirs:
        theirs = {**words, "flags": _wrapped(job.theirs), "script": "run-original.sh"}
        found["run-original.sh"] = _filled(PROCESS, theirs)
    return found


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
    """Return flags as lines of a list in YAML, numbers and lists of them as text."""
    lines = [""]
    for word in flags.split():
        item = f"{json.dumps(word) if word[0].isdigit() else word}, "
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
    if sys.argv[1:] == ["--help"]:
        print(__doc__)
    elif sys.argv[1:] == ["--write"]:
        main()
    else:
        sys.exit(__doc__)
