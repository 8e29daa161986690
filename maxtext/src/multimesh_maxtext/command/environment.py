"""The environment of a trainer: XLA's flags, memory, module path, and JAX's cache of compiled programs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import yaml

from multimesh_maxtext.command.command_line import purpose
from multimesh_maxtext.command.flags import DEVICES, FLAGS, Flags
from multimesh_maxtext.command.job import Job, Paths, has_package
from multimesh_maxtext.errors import FlagError, MissingPartError

CACHE, CACHE_SWITCH = "JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"
"""JAX's variables for the folder of compiled programs; and that turns it off: 0 or false."""

CACHE_SIZE = 5 * 10**9
"""Bytes of the folder; what was not read for longest goes first."""

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Packages with JAX's compiler for GPUs."""

_JAX_FRACTION = 0.75  # of a GPU's memory that JAX takes by default
_LEAST_FRACTION = 0.05  # with less JAX cannot even load its libraries; a wrong unit is likely
_MB_FROM = 1000  # --fbmem counts GB below this, and MB from here on

_PACKAGES = [  # that the hooks import
    Path(spec.origin).resolve().parents[1]
    for spec in map(find_spec, ("multimesh_maxtext", "multimesh", "multimesh_planner"))
    if spec and spec.origin
]

_LOG_LEVELS = {
    "none": {"TF_CPP_MIN_LOG_LEVEL": "1"},
    "info": {"JAX_LOGGING_LEVEL": "INFO", "TF_CPP_MIN_LOG_LEVEL": "0"},
    "debug": {"JAX_LOGGING_LEVEL": "DEBUG", "TF_CPP_MIN_LOG_LEVEL": "0"},
    "spew": {"JAX_LOGGING_LEVEL": "DEBUG", "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_MAX_VLOG_LEVEL": "1"},
}

_ONLY = {"gpu": "GPUs", "pipeline": "pipelines of MultiMesh", "run": "a run: a forecast trains nothing"}
"""What flags are for that have an effect in some jobs alone."""


def environment(job: Job, paths: Paths, *, inherited: Mapping[str, str], gpu_memory: int | None) -> dict[str, str]:
    """Return the variables that the trainer gets on top of the inherited ones."""
    flags = job.flags
    values, users_flags = flags.values, inherited.get("XLA_FLAGS", "")
    process = f"process-{paths.rank}" if paths.rank else ""
    xla = [users_flags, *xla_flags(flags, devices=job.devices // flags.nodes, users=users_flags, process=process)]
    packages = [str(folder) for folder in _PACKAGES if folder.name not in ("site-packages", "dist-packages")]
    # A stray jax.py or numpy.py of the user's must not win: installed packages come before inherited folders.
    places = sysconfig.get_paths()
    installed = dict.fromkeys(places[name] for name in ("stdlib", "platstdlib", "platlib", "purelib"))
    users = [path for path in inherited.get("PYTHONPATH", "").split(":") if Path(path).is_absolute()]
    search = [str(paths.maxtext), *packages, *(installed if users else ()), *users]
    variables = {
        # Without Google Cloud MaxText also leaves out TensorBoard; else it takes what is installed.
        "DECOUPLE_GCLOUD": str(not (values.get("enable_tensorboard") is True or flags.buckets)).upper(),
        "JAX_PLATFORMS": "cuda" if flags.gpus else "cpu",
        "PYTHONPATH": ":".join(search),
        "PYTHONUNBUFFERED": "1",
        **_LOG_LEVELS[flags.debug],
    }
    if flags.checkpoint and flags.nodes > 1:
        variables["JAX_ENABLE_PREEMPTION_SERVICE"] = "1"  # SIGTERM is a notice, which all processes get
    if "jax_cache_dir" not in values:
        variables |= cache_variables(inherited)
    if any(xla):
        variables["XLA_FLAGS"] = " ".join(filter(None, xla))
    if flags.platform == "cpu":
        # XLA:CPU takes the size of its thread pool from NPROC: fewer threads than waiting collectives deadlock.
        # OpenBLAS threads of every virtual device would fight over the same cores.
        variables |= {"NPROC": str(max(64, 8 * job.devices)), "OPENBLAS_NUM_THREADS": "1"}
    elif flags.fbmem is not None and gpu_memory:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction(flags.fbmem, gpu_memory))
    if flags.debug_nccl and flags.gpus:
        variables["NCCL_DEBUG"] = "INFO"
    return variables


def xla_flags(flags: Flags, *, devices: int, users: str = "", process: str = "") -> list[str]:
    """Return the flags for ``XLA_FLAGS``, for so many devices of this process, whose folder for dumps is ``process``.

    Those of ``users`` win over our defaults, and the command line wins over them.
    """
    words = [f"--xla_force_host_platform_device_count={devices}"] if flags.platform == "cpu" else []
    for name, flag in FLAGS.items() if flags.platform == "gpu" else ():
        chosen = getattr(flags, name)
        usual = None if flag.xla_staged and not flags.staged else flag.xla_default
        value = usual if chosen is None else chosen
        if value is not None:
            shown = str(value).lower()
            words += [f"{xla}={shown}" for xla in flag.xla if chosen is not None or xla not in users]
    if flags.gpus and flags.collective_matmul is not None:
        words.append("--xla_gpu_multi_streamed_windowed_einsum=true")
    if flags.dump and not flags.staged:  # a pipeline dumps its plan
        words += [f'--xla_dump_to="{flags.dump.resolve() / process}"', "--xla_dump_hlo_as_text=true"]
    return words


def memory_fraction(fbmem: int, device_memory: int) -> float:
    """Return JAX's memory fraction for ``--fbmem``, of a device's MiB; at most 1, and not next to nothing."""
    fraction = round(min(1.0, _read_mib(fbmem) / device_memory), 4)
    if fraction < _LEAST_FRACTION:
        raise FlagError(
            f"--fbmem {fbmem} is {fraction} of a GPU's {device_memory} MiB, less than {_LEAST_FRACTION}; it counts GB "
            f"below {_MB_FROM} and MB from there on: use e.g. --fbmem {int(0.9 * device_memory)}, or leave it out"
        )
    return fraction


def _read_mib(fbmem: int) -> int:
    """Return ``--fbmem`` in MiB, as the original hands it to its runtime."""
    return fbmem if fbmem >= _MB_FROM else 1000 * fbmem


def memory_limit(flags: Flags, gpu_memory: int | None) -> int | None:
    """Return the memory of a device that a run is held against, in bytes; None where it is held against none."""
    if flags.device_memory is None and not ((flags.device or flags.gpus) and flags.staged):
        return None
    return usable_memory(flags, gpu_memory)


def usable_memory(flags: Flags, gpu_memory: int | None = None) -> int | None:
    """Return the bytes of a GPU that JAX may use: the user's, or JAX's part of the named or the smallest GPU."""
    if flags.device_memory is not None:
        return flags.device_memory
    if flags.device:
        gpu_memory = DEVICES[flags.device]
    if gpu_memory is None:
        return _read_mib(flags.fbmem) * 2**20 if flags.fbmem else None
    fraction = memory_fraction(flags.fbmem, gpu_memory) if flags.fbmem is not None else _JAX_FRACTION
    return int(gpu_memory * 2**20 * fraction)


def cache_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a trainer that keeps all that it compiles in the user's cache folder.

    Nothing where the user's variables of JAX name a folder or turn the cache off, or there is no home. JAX locks
    it, and tells machines with other instructions apart.
    """
    off = inherited.get(CACHE_SWITCH, "1").lower() in ("0", "false", "f", "no", "n", "off")
    home = Path(inherited.get("XDG_CACHE_HOME", ""))
    home = home if home.is_absolute() else Path(f"{inherited.get('HOME') or '.'}/.cache")
    if off or CACHE in inherited or not home.is_absolute() or home.is_file():
        return {}
    ours = {"JAX_COMPILATION_CACHE_MAX_SIZE": str(CACHE_SIZE), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ours[CACHE] = str(home / "multimesh/compiled")
    return {name: value for name, value in ours.items() if name not in inherited}


def find_flag_notes(flags: Flags, *, gpu_memory: int | None) -> list[str]:
    """Return lines about flags that became something else, or nothing. ``gpu_memory``: MiB of a GPU, if known."""
    lines = []
    if flags.replaced:
        settings = " ".join(flags.settings[: len(flags.replaced)])
        lines.append(f"{' '.join(flags.replaced)}: settings of MaxText, {settings} here")
    if flags.fbmem is not None and flags.gpus and gpu_memory is not None:
        fraction = memory_fraction(flags.fbmem, gpu_memory)
        lines.append(f"--fbmem {flags.fbmem}: JAX takes {fraction} of each GPU's {gpu_memory} MiB")
    if flags.zero and not flags.staged:
        lines.append(
            "--zero 1: MaxText rounds parameters and sums of gradients to bfloat16 if it accumulates microbatches"
        )
    if flags.xla_pipelining and flags.gpus and not flags.staged:
        lines.append("--xla-pipelining: one program that accumulates microbatches computes 1.67 times as much with it")
    idle = dict[str, list[str]]()  # flags without effect, by their purpose
    for name in dict.fromkeys(flags.ignored):
        idle.setdefault(purpose(name), []).append(name)
    useful = {"": True, "gpu": flags.platform == "gpu", "pipeline": flags.staged, "run": not flags.forecast}
    for flag in [FLAGS[name] for name in flags.used if not useful[FLAGS[name].only]]:
        idle.setdefault(_ONLY[flag.only], []).append(flag.option)
    if flags.fbmem is not None and flags.gpus and gpu_memory is None and not flags.forecast:
        idle["a GPU, and none can be seen here"] = ["--fbmem"]
    if idle:
        shown = "; ".join(f"{', '.join(names)} (for {reason})" for reason, names in idle.items())
        lines.append(f"without effect here: {shown}")
    return lines


def describe_python() -> str:
    """Return the version of this Python, the one that its environment was made from, and the version of jax."""
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    jax = "".join(f", jax {package.version}" for package in metadata.distributions(name="jax"))
    return f"Python {platform.python_version()} (of {os.path.basename(sys.prefix)}: {base}){jax}"


def stale_parts(root: Path) -> Iterator[str]:
    """Yield a line where ``third_party/maxtext`` is another than that of ``sources.lock``, as after a pull."""
    try:
        lock = yaml.safe_load((root / "sources.lock").read_text(encoding="utf-8"))
        locked = lock["components"]["maxtext"]["patched_commit"]
        git = root / "third_party/maxtext/.git"
        head = (git / "HEAD").read_text(encoding="utf-8").strip().removeprefix("ref: ")
        commit = (git / head).read_text(encoding="utf-8").strip() if "/" in head else head
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return  # no checkout with sources, or one in a form of its own
    if locked and commit != locked:
        yield f"third_party/maxtext is at {commit[:12]}, sources.lock wants {locked[:12]}; run ./bootstrap.sh"


def find_gpus(flags: Flags) -> list[int] | None:
    """Return the MiB of every GPU here that a job may use, none without a driver; refuse a job that lacks something."""
    memory = visible_gpu_memory() if flags.gpus else None
    if flags.gpus and not (flags.dry_run or flags.forecast):
        visible, processes = len(memory or ()), flags.nodes if flags.spawn else 1
        need = f"--gpus {flags.gpus}" + (f" for each of {processes} processes" if processes > 1 else "")
        if flags.gpus * processes > visible:
            there = f"{visible} GPUs" if visible else "no GPU"
            raise MissingPartError(f"{need}, but {there} can be seen here; check nvidia-smi, or use --cpus")
        if not any(map(has_package, PLUGINS)):  # JAX would run on the CPU, and only warn
            raise MissingPartError(f"--gpus {flags.gpus}: JAX has no CUDA plugin here; ./bootstrap.sh --group cuda12")
    return memory


def visible_gpu_memory() -> list[int] | None:
    """Return the memory of every visible GPU in MiB, ``None`` if there is no driver."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    memory = [int(line) for line in listing.stdout.split() if line.isdigit()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return memory if chosen is None else memory[: len([part for part in chosen.split(",") if part])]
