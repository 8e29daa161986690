"""``--validate large``: the llama3-8b job on 16 GPUs under Slurm, submitted and followed, or cancelled, to its end."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from workflows import complaints, console, errors, proc
from workflows.image.engine import Engine

JOB = Path("maxtext/llama3-8b-16gpus/job.sbatch")
PLACE = Path("build/image/large")
LOG = PLACE / "job.log"
OPTIONS_VARIABLE, FLAGS_VARIABLE = "MULTIMESH_SLURM_OPTIONS", "MULTIMESH_SLURM_FLAGS"
_POLL_S = 5.0
_PATIENCE_S = 20.0
_SILENCE_S = 300.0  # how long a controller may not answer before the job counts as lost
_ENDED = re.compile("COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE|PREEMPTED")
_FIELDS = {"State": 32, "exit_code": 12, "TimeUsed": 20, "Reason": 64}
_VERDICT = re.compile(r"ok: \d+ steps, loss \S+ -> \S+")
_CAUSE = re.compile(r"(\d+: )?(error|Error|srun: error|slurmstepd: error|.*: error)\b.*")


@dataclass(frozen=True)
class State:
    """Where a job stands: Slurm's word for it, its exit code (a signal is negative), how long it ran, why it waits."""

    word: str
    exit_code: int
    ran: str
    reason: str

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return _ENDED.fullmatch(self.word) is not None

    @property
    def line(self) -> str:
        """For people."""
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"{self.word.lower()}{why}, {self.ran}"


def wishes(environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the environment's changes to the job's folder: options of sbatch, and flags of ``run.py``."""
    try:
        return shlex.split(environment.get(OPTIONS_VARIABLE, "")), shlex.split(environment.get(FLAGS_VARIABLE, ""))
    except ValueError as error:
        raise errors.UsageError(f"{OPTIONS_VARIABLE}, {FLAGS_VARIABLE}: {error}; quote as for a shell") from error


def check_means() -> None:
    """Raise ``UsageError`` where the job cannot be submitted."""
    wishes(os.environ)
    absent = [program for program in ("sbatch", "srun", "squeue", "scancel") if shutil.which(program) is None]
    fault = f"no {absent[0]} here" if absent else None
    if fault is None:
        try:
            told = proc.run(["sinfo", "--noheader", "--format=%D"], check=False, timeout_s=_PATIENCE_S)
            fault = f"Slurm does not answer ({told.complaint})" if told.returncode else None
        except TimeoutError as error:
            fault = f"Slurm does not answer ({error})"
    if fault is not None:
        raise errors.UsageError(f"--validate large: {fault}; run it where Slurm is, or take --validate small")
    if runs_containers() and shutil.which("enroot") is None:
        raise errors.UsageError("--validate large: srun takes images from enroot (pyxis); install that here")


def check_engine(engine: Engine) -> None:
    """Raise ``UsageError`` where no container of this engine's image would run in the job."""
    if engine.kind != "docker" and not runs_containers():
        raise errors.UsageError(
            f"--validate large: srun has no --container-image (pyxis), and nodes load no image of {engine.kind}; "
            "install pyxis or docker, or take --validate small"
        )


def runs_containers() -> bool:
    """Say whether ``srun`` itself starts containers: the plugin pyxis."""
    return shutil.which("srun") is not None and "--container-image" in proc.run(["srun", "--help"]).text


def argv(options: list[str], flags: list[str]) -> list[str]:
    """Return the command that submits the job, to be run in the repository; the last flags win."""
    return ["sbatch", "--parsable", f"--output={LOG}", "--export=ALL", *options, str(JOB), *flags]


def bring(engine: Engine, image: str, folder: Path, *, pyxis: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command that writes an image where nodes see it, and the job's variables that name it."""
    if pyxis:
        squashed, scheme = folder / "image.sqsh", {"docker": "dockerd", "podman": "podman"}[engine.kind]
        return ["enroot", "import", "--output", str(squashed), f"{scheme}://{image}"], {"IMAGE": str(squashed)}
    archive = folder / "image.tar"
    return [*engine.cli, "save", "--output", str(archive), image], {"IMAGE": image, "IMAGE_ARCHIVE": str(archive)}


def planned(engine: Engine, image: str) -> list[list[str]]:
    """Return the commands of the job; nothing is asked of Slurm where it is not here."""
    return [bring(engine, image, PLACE, pyxis=runs_containers())[0], argv(*wishes(os.environ))]


def run(root: Path, engine: Engine, image: str) -> str:
    """Run the job with an image; return its verdict, with the environment's changes, or raise ``SmokeError``."""
    (options, flags), log = wishes(os.environ), root / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    # Below the repository: we assume that a cluster's nodes see it.
    with tempfile.TemporaryDirectory(prefix="image-", dir=log.parent) as folder:
        log.unlink(missing_ok=True)
        command, told = bring(engine, image, Path(folder), pyxis=runs_containers())
        console.note("writing the image where the nodes see it")
        proc.run(command)
        done = proc.run(argv(options, flags), env=os.environ | told, cwd=root, check=False)
        if done.returncode:
            raise errors.SmokeError(f"Slurm does not take the job ({done.complaint}); no tag was moved")
        job = done.text.partition(";")[0].strip()
        console.note(f"job {job} of Slurm, its output in {LOG}")
        lines = list[str]()

        def show(line: str) -> None:
            lines.append(line)
            print(f"       |  {line}", file=sys.stderr, flush=True)

        end = follow(job, log, show, lambda now: console.note(f"job {job}: {now.line}"))
    return judge(job, end, lines, [*options, *flags])


def judge(job: str, end: State, lines: list[str], wanted: list[str]) -> str:
    """Return the verdict of a job that ended, from its exit state and its last words."""
    verdict = next((line for line in reversed(lines) if _VERDICT.match(line)), None)
    if end.word != "COMPLETED" or end.exit_code:
        cause = next((line for line in lines if _CAUSE.match(line)), (lines or ["it wrote nothing"])[-1])
        raise errors.SmokeError(
            f"the validation job 'large' failed: job {job} of Slurm is {end.word}, exit code {end.exit_code} "
            f"({complaints.shortened(cause.strip())}); no tag was moved. Its output: {LOG}"
        )
    if verdict is None:
        raise errors.SmokeError(f"job {job} of Slurm ended without a verdict on its loss; no tag was moved")
    otherwise = f" with other settings: {shlex.join(wanted)}" if wanted else ""
    return f"{verdict}; the llama3-8b job of Slurm{otherwise}"


def follow(job: str, log: Path, on_line: Callable[[str], None], on_state: Callable[[State], None]) -> State:
    """Return how a job ended, handing on each line of its log as it is written; cancel it if this is interrupted."""
    seen, before, heard = 0, ("", ""), time.monotonic()
    try:
        while True:
            if (now := state(job)) is not None:
                heard = time.monotonic()
                if (now.word, now.reason) != before:
                    on_state(now)
                    before = now.word, now.reason
            elif time.monotonic() - heard > _SILENCE_S:
                raise errors.SmokeError(
                    f"Slurm says nothing of job {job} for {_SILENCE_S:.0f} s; look for it, and at {log}"
                )
            if log.exists():
                with log.open("rb") as file:
                    file.seek(seen)
                    whole, newline, _ = file.read().rpartition(b"\n")
                for line in whole.decode("utf-8", "replace").splitlines():
                    on_line(line)
                seen += len(whole) + len(newline)
            if now is not None and now.ended:
                return now
            time.sleep(_POLL_S)
    except BaseException:
        proc.run(["scancel", job], check=False)
        raise


def state(job: str) -> State | None:
    """Return where a job stands, or None where Slurm gives no answer now."""
    fields = ",".join(f"{name}:{width}" for name, width in _FIELDS.items())
    ask = ["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--Format={fields}"]
    told = proc.run(ask, check=False)
    if told.returncode == 0 and told.text.strip():
        return parse(told.text.splitlines()[0])
    # Long after its end only the accounts know a job, where the cluster keeps any.
    ask = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State,ExitCode,Elapsed"]
    if shutil.which("sacct") is None or (told := proc.run(ask, check=False)).returncode or not told.text.strip():
        return None
    word, code, ran = told.text.splitlines()[0].split("|")
    status, signal = map(int, code.split(":"))
    return State(word.partition(" ")[0], -signal or status, ran, "")


def parse(line: str) -> State:
    """Read a line of squeue: fields of fixed width, because reasons hold blanks."""
    fields = list[str]()
    for width in _FIELDS.values():
        fields.append(line[:width].strip())
        line = line[width:]
    word, status, ran, reason = fields
    return State(word, os.waitstatus_to_exitcode(int(status)), ran, reason)
