#!/usr/bin/env python3
"""What the folders of jobs beside this file share: ``maxtext/jobs.py --write`` takes it from `SOURCE` to the others.

Change a script in `SOURCE`, then write; a test compares. For a DGX H100 a folder's scripts are those of `SOURCE` with
another model. Other machines share the mounts of containers, and how processes start again.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
DGX = "run-dgx-h100.sh"

LARGE = "--attention cudnn_flash_te --remat minimal --xla-rs-threshold 51200 --replicate-small-params"
"""Flags that the original gives to all of its large jobs, in so far as they mean something here."""

LLAMA3_8B = (
    "--dp 2 --pp 2 --tp 4 --interleave 8 --schedule prefetch-wavefront --only-fuse-loop-tasks --model-name llama3-8b "
    f"--num-layers 32 --sequence-length 4096 --batch-size 32 --microbatch-size 2 {LARGE}"
)

GPT3_175B = (
    "--model-name gpt3-175b --num-layers 96 --model-dims 12288 --num-heads 96 --sequence-length 2048 --batch-size 128 "
    f"--microbatch-size 4 {LARGE} --fbmem 77 --num-steps 8"
)

LLAMA3_70B = (
    f"--model-name llama3-70b --num-layers 80 --sequence-length 4096 --batch-size 128 {LARGE} --fbmem 78 --num-steps 10"
)

SHARED = (
    re.compile(r"^# A container sees these folders.*?^  mounts\+=\([^\n]*\nfi\n", re.MULTILINE | re.DOTALL),
    re.compile(r"^# With --max-restarts K.*\Z", re.MULTILINE | re.DOTALL),
)
"""Parts of a batch script that do not depend on the machine."""


@dataclass(frozen=True)
class Job:
    """A folder of files for one job.

    Attributes
    ----------
    title
        For people: the model, and the devices; only of jobs for a DGX H100.
    nodes, gpus
        How many there are, and GPUs of each; 0 where the user says.
    time
        For Slurm.
    flags
        For ``run.py``, without the processes and devices.
    theirs
        The original's own flags for this job, where ``flags`` are better ones.
    """

    folder: str
    title: str = ""
    nodes: int = 0
    gpus: int = 8
    time: str = ""
    flags: str = ""
    theirs: str = ""

    @property
    def processes(self) -> int:
        """The number of processes, each with a GPU."""
        return self.nodes * self.gpus


SOURCE = Job(
    folder="llama3-8b-16gpus",
    title="llama3-8b on 16 GPUs",
    nodes=2,
    time="00:30:00",
    flags=f"{LLAMA3_8B} --fbmem 78 --num-steps 20",
)

JOBS = (
    SOURCE,
    Job(
        folder="gpt3-175b-64gpus",
        title="gpt3-175b on 64 GPUs",
        nodes=8,
        time="01:00:00",
        flags=(
            "--pp 8 --tp 8 --interleave 6 --schedule interleaved-zb --sequence-parallel --xla-ag-threshold 268435456 "
            f"{GPT3_175B}"
        ),
        theirs=f"--pp 8 --tp 8 --interleave 12 --schedule wavefront {GPT3_175B}",
    ),
    Job(
        folder="llama3-70b-64gpus",
        title="llama3-70b on 64 GPUs",
        nodes=8,
        time="01:00:00",
        flags=(
            "--dp 2 --pp 4 --tp 8 --interleave 5 --partition 5,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,3 --schedule "
            f"interleaved-zb --sequence-parallel --microbatch-size 4 --xla-ag-threshold 268435456 {LLAMA3_70B}"
        ),
        theirs=(
            "--pp 16 --tp 4 --interleave 5 --schedule prefetch-wavefront --only-fuse-loop-tasks --microbatch-size 2 "
            f"{LLAMA3_70B}"
        ),
    ),
    Job(folder="perlmutter", nodes=4, gpus=4, flags=f"{LLAMA3_8B} --num-steps 20"),
    Job(folder="slurm"),
)


def find(folder: str) -> Job:
    """Return the job of a folder."""
    return next(job for job in JOBS if job.folder == folder)


def files(job: Job) -> dict[str, str]:
    """Return the name and the content of each file of a job's folder, with all that it shares as `SOURCE` has it."""
    source = _read(SOURCE)
    found = _read(job)
    if job.title and job is not SOURCE:
        found |= {name: _adapt(text, job) for name, text in source.items() if name != "README.md"}
        if job.theirs:
            found["job.sbatch"] = found["job.sbatch"].replace(DGX, f"${{SCRIPT:-{DGX}}}")
            own = found[DGX].replace(_wrap(job.flags), _wrap(job.theirs))
            found["run-original.sh"] = own.replace(DGX, "run-original.sh")
    for part in SHARED:
        (text,) = part.findall(source["job.sbatch"])
        found["job.sbatch"] = part.sub(lambda _, text=text: text, found["job.sbatch"])
    return found


def _read(job: Job) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in (HERE / job.folder).iterdir()}


def _adapt(text: str, job: Job) -> str:
    """Return a script of `SOURCE` with the names, sizes and flags of another job for the same machine."""
    for own, other in (
        (SOURCE.title, job.title),
        (SOURCE.folder, job.folder),
        (SOURCE.time, job.time),
        (_wrap(SOURCE.flags), _wrap(job.flags)),
        (_list(SOURCE.flags), _list(job.flags)),
    ):
        text = text.replace(own, other)
    counts = r'(?m)(^#SBATCH --nodes=|^ *(?:parallelism|completions): |--nodes, "|^ *value: ")2(?="?,|"?$)'
    return re.sub(counts, rf"\g<1>{job.nodes}", text)


def _wrap(flags: str) -> str:
    """Break flags into lines of a shell command, each flag with its value."""
    lines = [""]
    for flag in flags.replace(" --", "\n--").splitlines():
        if len(lines[-1]) + len(flag) > 110:
            lines.append("")
        lines[-1] += f"{flag} "
    return "\\\n  ".join(lines)


def _list(flags: str) -> str:
    """Return flags as lines of a list in YAML, numbers and lists of them as text."""
    lines = [""]
    for word in flags.split():
        item = f"{json.dumps(word) if word[0].isdigit() else word}, "
        if len(lines[-1]) + len(item) > 100:
            lines.append("")
        lines[-1] += item
    return ("\n" + 20 * " ").join(line.rstrip() for line in lines)


def main() -> None:
    """Write all folders."""
    for job in JOBS:
        for name, text in files(job).items():
            path = HERE / job.folder / name
            path.write_text(text)
            path.chmod(0o755 if name.endswith(".sh") else 0o644)


if __name__ == "__main__":
    if sys.argv[1:] == ["--help"]:
        print(__doc__)
    elif sys.argv[1:] == ["--write"]:
        main()
    else:
        sys.exit(__doc__)
