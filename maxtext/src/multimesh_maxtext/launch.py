"""The process that trains: its command, its environment, and the hand-over to the hooks in it."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from multimesh_maxtext import memory
from multimesh_maxtext.checks import Job, schedule_name
from multimesh_maxtext.errors import CheckpointError, UsageError
from multimesh_maxtext.member import ALONE, Member
from multimesh_maxtext.options import Options
from multimesh_maxtext.translate import Paths, argument, configuration, environment

TRAINER = "maxtext.trainers.pre_train.train"

JOIN = ("multimesh_maxtext", "join")
"""The trainer as one of several processes: see `join`."""

FORESEE = ("multimesh_maxtext", "foresee")
"""The trainer that only forecasts: see `foresee`."""

RUN = "MULTIMESH_RUN"
"""Environment variable of every trainer. Where it is set, the patched MaxText takes its batches from us."""

VARIABLE = "MULTIMESH_MAXTEXT"
"""Environment variable of a pipeline, with the hand-over. Without both variables the hooks do nothing."""

SECONDS = "perf/step_seconds"
"""Name in the records of the time from the end of the step before to the end of a step."""

_DEFAULTS = {
    *("run_name", "jax_cache_dir", "enable_checkpointing", "enable_tensorboard", "grain_worker_count"),
    *("learning_rate", "vocab_size", "head_dim", "base_num_kv_heads", "olmo_apply_ngram_filter"),
}
"""Settings that we choose without a flag: a KEY=VALUE argument replaces them."""

_CHECKPOINTED = {"run_name", "enable_checkpointing"}
"""With ``--checkpoint`` the flag decides these of them."""


@dataclass(frozen=True)
class Handoff:
    """How to run the pipeline.

    Attributes
    ----------
    stages
        Number of pipeline stages; the devices are dealt to them in equal shares.
    interleave
        Pieces of the model per stage.
    schedule
        A name that `multimesh.schedules` knows, or ``custom``.
    table
        File of the custom schedule.
    sizes
        Decoder layers of each piece, in the order of the model; empty: all have as many.
    route
        Of the schedule ``auto``: stage of each piece; empty: in turn.
    chosen
        File for the choice of the schedule ``auto``.
    limit
        Bytes that a device has, for the schedule ``auto``; 0 where that is not known.
    placement
        File to be written with the devices of every parameter and optimizer moment.
    forecast
        File to be written with the memory that each stage will need; nothing is allocated, compiled or trained then.
    dump, dump_passes, dump_only
        Folder for the plan of the step; whether every pass of MultiMesh goes there too, and whether that is all to do.
    profile
        Folder for measured timelines of the step.
    context
        Options of `multimesh.context` that the step is compiled under.
    replicate_below
        Arrays of the train state with fewer elements than this lie whole on each device of their stage.
    platform
        Platform of the devices that a forecast is for; it may run on another.
    gather_once
        Whether parameters are gathered before the loop over microbatches, and not in it.
    """

    stages: int
    interleave: int
    schedule: str
    table: str | None
    placement: str
    forecast: str = ""
    sizes: tuple[int, ...] = ()
    route: tuple[int, ...] = ()
    chosen: str = ""
    limit: int = 0
    dump: str = ""
    dump_passes: bool = False
    dump_only: bool = False
    profile: str = ""
    context: Mapping[str, bool] = field(default_factory=dict)
    replicate_below: int = 0
    platform: str = ""
    gather_once: bool = False

    def variables(self) -> dict[str, str]:
        """Return the variables to add to the trainer's environment."""
        return {VARIABLE: json.dumps(asdict(self))}


def received(environment: Mapping[str, str]) -> Handoff:
    """Return the `Handoff` in an environment.

    Raises
    ------
    UsageError
        Where the variable does not hold a `Handoff`.
    """
    try:
        given = json.loads(environment[VARIABLE])
        handoff = Handoff(**{**given, **{key: tuple(given.get(key, ())) for key in ("sizes", "route")}})
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{VARIABLE} is not what maxtext/run.py writes ({error}); start MaxText with it") from error
    return handoff


@dataclass(frozen=True)
class Launch:
    """A process to start: its command, its additions to the environment, and MaxText's configuration."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    configuration: Mapping[str, Any]


def decided(job: Job) -> dict[str, Any]:
    """Return the settings of MaxText that only flags decide."""
    free = _DEFAULTS - _CHECKPOINTED if job.options.checkpoint else _DEFAULTS
    settings = configuration(job, Paths(python="", maxtext=Path(), output=Path(), metrics=Path()))
    o = job.options
    sizes = {"base_num_kv_heads": o.num_kv_heads, "head_dim": o.head_dim, "vocab_size": o.vocab_size}
    free = free - {key for key, value in sizes.items() if value is not None}
    free = free if o.text or o.use_tfds_dataset else free | {"dataset_type"}
    return {key: value for key, value in settings.items() if key not in free}


def launch(
    job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None, this: Member = ALONE
) -> Launch:
    """Return the process that trains a job.

    Parameters
    ----------
    inherited
        The environment of this process; XLA_FLAGS and PYTHONPATH in it are extended, not replaced.
    gpu_memory
        Memory of a visible GPU in MiB, ``None`` if unknown.
    this
        Which of several processes it is; its rank on this machine says which GPUs are its own.
    """
    extra = dict(setting.split("=", 1) for setting in job.options.settings)
    settings = configuration(job, paths)
    settings = {key: value for key, value in settings.items() if key not in extra}
    base = job.options.maxtext_config or paths.package / "configs/base.yml"
    arguments = [argument(key, value) for key, value in settings.items()]
    # -P keeps the working folder off the module path: a folder of the user's must not shadow the trainer's modules.
    trainer = JOIN if job.options.nodes > 1 else (TRAINER,)
    command = (paths.python, "-P", "-m", *trainer, str(base.resolve()), *arguments, *job.options.settings)
    variables = {**environment(job, paths, inherited=inherited, gpu_memory=gpu_memory), RUN: "1"}
    if job.options.staged:
        variables |= handoff(job, paths, _known_to_all(job, gpu_memory)).variables()
    variables |= this.variables() if this.count > 1 else {}
    if job.options.nodes > 1 and job.options.gpus:
        visible = [part for part in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
        # A launcher may show each process its own GPUs only, or all of a machine to each.
        first = 0 if len(visible) == job.options.gpus else this.local * job.options.gpus
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + job.options.gpus)))
    return Launch(command, variables, {**settings, **extra})


def _known_to_all(job: Job, gpu_memory: int | None) -> int | None:
    """Return the memory of a device where all processes of a job know the same: they must choose one schedule."""
    return memory.limit(job, gpu_memory if job.options.nodes == 1 else None)


def forecasting(job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None) -> Launch:
    """Return the process that forecasts a job: one, on CPU devices; it allocates nothing and reads no data."""
    changes: dict[str, Any] = {"checkpoint": None, "profile": False, "dump": None, "dump_only": False}
    changes |= {"use_tfds_dataset": None, "dataset_path": None, "dataset_name": None, "tokenizer_path": None}
    changes |= {"settings": [each for each in job.options.settings if not each.startswith("dataset_type=")]}
    changes |= {"nodes": 1, "gpus": 0, "cpus": job.devices}
    alone = replace(job, options=Options(**{**vars(job.options), **changes}))
    start = launch(alone, paths, inherited=inherited, gpu_memory=gpu_memory)
    asked = replace(
        handoff(alone, paths, _known_to_all(job, gpu_memory)),
        forecast=str(paths.forecast),
        platform=job.options.platform,
    )
    command = (*start.command[:3], *FORESEE, *start.command[4:])
    return replace(start, command=command, environment={**start.environment, **asked.variables()})


def handoff(job: Job, paths: Paths, limit: int | None = None) -> Handoff:
    """Return the hand-over to the hooks of a pipeline; ``limit`` is the memory of a device, where known."""
    o = job.options
    return Handoff(
        stages=o.pp,
        interleave=o.interleave,
        schedule=schedule_name(o),
        table=str(o.custom_schedule_path.resolve()) if o.custom_schedule_path else None,
        sizes=job.pieces,
        route=job.route,
        chosen=str(paths.schedule) if schedule_name(o) == "auto" else "",
        limit=limit or 0,
        placement=str(paths.placement),
        dump=str(o.dump.resolve()) if o.dump else "",
        dump_passes=bool(o.dump_mpmd_passes),
        dump_only=bool(o.dump_only),
        profile=str(paths.timelines) if o.profile else "",
        context={
            "autoshard": o.autoshard is not False,
            "enable_task_fusion": o.fuse_tasks is not False,
            "only_fuse_loop_tasks": bool(o.only_fuse_loop_tasks),
        },
        replicate_below=job.batch * o.sequence_length if o.replicate_small_params else 0,
        gather_once=bool(o.gather_once),
    )


def visible_gpu_memory() -> list[int] | None:
    """Return the memory of every visible GPU in MiB, ``None`` if there is no driver."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    memory = [int(line) for line in listing.stdout.split() if line.isdigit()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return memory if chosen is None else memory[: len([part for part in chosen.split(",") if part])]


def in_place(start: Launch, *words: str) -> Launch:
    """Return the process that does ``python -m multimesh_maxtext WORDS`` in place of the trainer."""
    return replace(start, command=(*start.command[:3], "multimesh_maxtext", *words))


def write_export(folder: str, step: str, target: str, *unrolled: str) -> None:
    """Write the parameters of a checkpoint for MaxText's tools; print their size and layout as JSON."""
    from multimesh_maxtext.export import export

    try:
        print(json.dumps(export(Path(folder), int(step), Path(target), unrolled=bool(unrolled))))
    except CheckpointError as error:
        sys.exit(f"error: {error}")


def compile_module(file: str) -> None:
    """Compile HLO text for all devices; print the memory of a device as JSON, or end with a line that says why not."""
    import jax

    import multimesh.jax

    try:
        found = multimesh.jax.compile_hlo_module(file, num_partitions=jax.device_count())
    except multimesh.MultiMeshError as error:
        sys.exit(f"error: {error}")
    names = ("argument", "output", "temp")
    print(json.dumps({name: getattr(found, f"{name}_size_in_bytes") for name in names}))


def join(arguments: Sequence[str]) -> None:
    """Be MaxText's trainer as one of several processes, in this one.

    Variables tell its rank. It finds the first by those of srun or mpirun, or by JAX_COORDINATOR_ADDRESS.
    """
    # Only here: the command that starts the trainers never imports JAX.
    from orbax.checkpoint import v1 as ocp

    from multimesh import distributed

    rank, size = (os.environ.get(f"MULTIMESH_MAXTEXT_{name}") for name in ("RANK", "SIZE"))
    # Each command names another folder.
    distributed.initialize(
        num_processes=int(size) if size else None, process_id=int(rank) if rank else None, same_command=False
    )
    ocp.handlers.register_handler(distributed.orbax_state_handler(), checkpointable_name="items")  # the train state
    _be_trainer(arguments)


def foresee(arguments: Sequence[str]) -> None:
    """Be MaxText's trainer, in this process, until it has forecast its step. It frees no memory before its end."""
    gc.disable()
    _be_trainer(arguments)


def _be_trainer(arguments: Sequence[str]) -> None:
    sys.argv = [TRAINER, *arguments]
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)
