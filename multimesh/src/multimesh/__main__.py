"""The command line: a demonstration, forecasts, suggestions, processes.

``python -m multimesh`` imports JAX only where it is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import multimesh
from multimesh import __version__, schedules
from multimesh.commands import forecast, plugins, values
from multimesh.errors import DisagreementError, MultiMeshError, UsageError
from multimesh.schedules.costs import parse_costs

INTERRUPTED = 130
_DEVICES = "--xla_force_host_platform_device_count="  # JAX refuses it beside its own setting

_ROOT = """\
  python -m multimesh demo                                     # train a small pipeline, and draw it
  python -m multimesh forecast --stages 4 --microbatches 8     # compare schedules, without devices
  python -m multimesh suggest --model llama3-70b --nodes 8     # configurations for 64 GPUs, without devices
  python -m multimesh spawn -n 4 train.py                      # a program as four processes of this machine
  python -m multimesh check -n 8                               # whether devices can run pipelines, and why not

MultiMesh for JAX: parts of one jitted function on different submeshes."""

_DEMO = """\
  python -m multimesh demo
  python -m multimesh demo --schedule gpipe --microbatches 8 --plan
  python -m multimesh demo --schedule zb-h1 --microbatches 8 --html out.html

Train a small transformer with a tied embedding as a pipeline of two stages. Each stage is a task on a submesh of 2 x 2
devices: two for data and two for tensor parallelism. Every batch is cut into microbatches, which the schedule sends
through the stages; then SGD changes the parameters, each where it lives.

The same function runs once more under plain jax.jit on one device, from the same start. The table shows the loss of
both after each step. They are equal but for rounding, or the command fails. At the end each kernel is measured, and a
page shows when it would run on submeshes that run at the same time: open it in a browser, and point at a box. No GPU is
needed. `multimesh-demo` does the same."""

_FORECAST = """\
  python -m multimesh forecast
  python -m multimesh forecast --schedule zb-h1 --stages 4 --microbatches 8 --costs F=1,B=1,W=0.8 --svg out.svg
  python -m multimesh forecast --compile train.py:lower --device h100 --nodes 2

Simulate pipeline schedules on ideal submeshes, and compare how long each submesh is idle with the published formulas: p
submeshes, v stages on each, m microbatches; tF, tB, tW are the times of forward, backward and weight gradients of one
microbatch on a whole submesh. Each of its stages takes an equal share. Needs neither devices nor JAX.

With --compile a step of yours is compiled for GPUs that need not be here, and a table shows the memory that XLA gives
each submesh, beside the forecast. It needs JAX's compiler for GPUs: ./bootstrap.sh --group compile-gpu"""

_SPAWN = """\
  python -m multimesh spawn -n 4 train.py --steps 100
  python -m multimesh spawn -n 2 --label examples/fft3d.py 16

Start a Python program several times on this machine, as the processes of one job. In each of them
mm.distributed.initialize() finds the others; on GPUs each takes the one of its number. If one fails, all end. The
lines that they print stay whole."""

_CHECK = """\
  python -m multimesh check -n 8
  python -m multimesh check --gpus-per-stage 8 --report check.json  # behind srun or mpirun, on all nodes

Say whether these processes can run pipelines, and why not: versions, devices, a shared folder, products, collectives in
stages, transfers between neighboring stages (alone, and beside kernels), a training step. Start it as the job will be
started, or with -n on this machine. Each step has a time limit, and says what it was doing when it ended. Process 0
prints the table."""

_CHECK_EXIT_CODES = """\
    0  all steps passed
    N  that of the class of the first step that failed:
    1  a step failed; 2  processes or flags that do not fit together; 4  a device or version is unfit
   14  a pipeline computes something else than one program
   17  a process or a transfer did not answer"""

_EXIT_CODES = """\
    0  the losses of every step agree to 1e-5
    1  any other error
    2  flags that do not fit together
    4  not enough devices
   14  the losses differ"""

_FORECAST_EXIT_CODES = """\
    0  the simulation gives the published idle times, or nothing is published
    2  flags that do not fit together, or a schedule that has no such shape
   14  the simulation gives another idle time than the published
   16  the compiled step needs more memory than a device has"""


_SPAWN_EXIT_CODES = """\
    0  all processes ended well
    2  flags that do not fit together, or no such program
    N  that of the first process that failed; 128 more than a signal that ended it"""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        groups = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        commands: dict[str, argparse.ArgumentParser] = dict(*groups)
        flags = [flag for parser in commands.values() or [self] for flag in parser._option_string_actions]
        words = re.findall(r"(?<![\w-])(--[\w-]+|(?<=invalid choice: ')[\w-]+)", message)
        near = [n for word in words for n in difflib.get_close_matches(word, [*commands, *flags], 1) if n != word]
        hint = f"did you mean {near[0]}? " if near else ""
        help_of = f"{self.prog} COMMAND" if commands else self.prog
        raise UsageError(f"{message}; {hint}{help_of} --help lists the flags")


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command and flag."""
    root = _Parser(prog="python -m multimesh", description=_ROOT)
    root.add_argument("--version", action="version", version=f"multimesh-jax {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    _add_demo(commands)
    _add_forecast(commands)
    _add_spawn(commands)
    _add_check(commands)
    for name, plugin in plugins.load_all().items():
        command = _command(commands, name, plugin.SUMMARY, plugin.ABOUT, plugin.EXIT_CODES)
        plugin.add_flags(command)
        command.set_defaults(plugin=plugin)
    return root


def _command(commands: Any, name: str, words: str, description: str, codes: str) -> argparse.ArgumentParser:
    epilog = f"exit codes:\n{codes}\n  130  interrupted"
    return commands.add_parser(name, help=words, usage="%(prog)s [flags]", description=description, epilog=epilog)


def _add_spawn(commands: Any) -> None:
    words = "start a program as several processes of one job on this machine"
    several = _command(commands, "spawn", words, _SPAWN, _SPAWN_EXIT_CODES)
    add = several.add_argument
    several.usage = "%(prog)s -n N [--label] PROGRAM [ARGUMENT ...]"
    add("-n", "--processes", type=values.positive, required=True, metavar="N", help="how many of them")
    text = "the number of its process before each line, as srun -l does"
    add("-l", "--label", action="store_true", help=text)
    add("program", metavar="PROGRAM", help="the file of a Python program")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its own arguments")


def _add_check(commands: Any) -> None:
    words = "say whether these processes and devices can run pipelines, and why not"
    add = _command(commands, "check", words, _CHECK, _CHECK_EXIT_CODES).add_argument
    add("-n", "--processes", type=values.positive, metavar="N", help="start N processes on this machine")
    text = "stages of the pipeline (default: as many as processes)"
    add("--stages", type=values.positive, metavar="N", help=text)
    text = "devices of a stage (default: all, dealt out to the stages)"
    add("--gpus-per-stage", dest="per_stage", type=values.positive, metavar="N", help=text)
    add("--quick", action="store_true", help="the steps for the start of a job, with fewer turns")
    text = "one that all processes share (default: here)"
    add("--folder", type=Path, default=Path(), metavar="DIR", help=text)
    text = "write the rows as JSON without hosts, users, addresses and paths"
    add("--report", type=values.file, metavar="FILE", help=text)
    text = "write the nodes whose processes are at fault in a step that failed, one a line"
    add("--unfit", type=values.file, metavar="FILE", help=text)
    add("--json", action="store_true", help="one JSON object instead of the table")


def _add_demo(commands: Any) -> None:
    words = "train a small transformer as a pipeline, beside the same function on one device"
    demo = _command(commands, "demo", words, _DEMO, _EXIT_CODES)
    add = demo.add_argument
    text = (
        "order in which a submesh runs its microbatches: "
        + "; ".join(f"{schedule.name}: {schedule.summary}" for schedule in schedules.PUBLISHED)
        + "; auto: the best table for the estimated costs of the stages (default: %(default)s)"
    )
    add("--schedule", type=values.schedule, metavar="NAME", default="1f1b", help=text)
    add("--steps", type=values.positive, default=8, metavar="N", help="training steps (default: %(default)s)")
    text = "microbatches a step, of 4 sequences each (default: %(default)s)"
    add("--microbatches", type=values.positive, default=4, metavar="N", help=text)
    text = "8 virtual CPU devices, or the first 8 that JAX finds (default: %(default)s)"
    add("--devices", choices=("virtual", "real"), default="virtual", help=text)
    add("--plan", action="store_true", help="show the plan first: what each submesh runs, in order")
    text = "measure each kernel, and write when it ran as a page that names each box you point at (default: a new file)"
    add("--html", type=values.file, metavar="FILE", help=text)
    add("--json", action="store_true", help="one JSON object instead of the table and the page")


def _add_forecast(commands: Any) -> None:
    words = "simulate pipeline schedules, beside the published formulas"
    command = _command(commands, "forecast", words, _FORECAST, _FORECAST_EXIT_CODES)
    add = command.add_argument
    text = (
        f"by default all published ones are compared: {', '.join(schedules.names())}; auto searches for a shorter "
        "table in the memory of 1f1b"
    )
    add("--schedule", type=values.schedule, metavar="NAME", help=text)
    text = "submeshes of the pipeline (default: %(default)s)"
    add("--stages", type=values.positive, default=4, metavar="P", help=text)
    text = "stages on each submesh (default: 2 or 1, as it is usual)"
    add("--interleave", type=values.positive, metavar="V", help=text)
    add("--microbatches", type=values.positive, default=8, metavar="M", help="default: %(default)s")
    add("--costs", default="F=1,B=1,W=1", metavar="F=1,B=1,W=1", help="times; default: all 1")
    text = "time of a transfer; formulas are for 0, the default"
    add("--transfer", type=values.time, default=0.0, metavar="T", help=text)
    text = "draw the timeline of one schedule: a row a submesh, a box a kernel"
    add("--svg", type=values.file, metavar="FILE", help=text)
    text = "write it as Chrome-trace JSON for ui.perfetto.dev"
    add("--perfetto", type=values.file, metavar="FILE", help=text)
    text = "compile the step that this function returns, mm.jit(f).lower(...); it takes the devices"
    add("--compile", metavar="FILE:FUNCTION", help=text)
    add("--device", default="h100", metavar="NAME", help="GPU of --compile (default: %(default)s)")
    add("--nodes", type=values.positive, default=1, metavar="N", help="nodes (default: %(default)s)")
    add("--gpus", type=values.positive, default=8, metavar="N", help="GPUs of each (default: %(default)s)")
    add(
        "--memory",
        type=values.time,
        metavar="BYTES",
        help="of a GPU that may be used: 72e9 (default: 3/4, as JAX takes)",
    )
    add("--json", action="store_true", help="one JSON object instead of the table")


def _demo(options: argparse.Namespace) -> dict[str, Any]:
    if options.devices == "virtual":
        flags = os.environ.get("XLA_FLAGS", "").split()
        os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(_DEVICES))
        multimesh.virtual_devices(8)
    from multimesh.commands import demo  # imports JAX

    job = demo.Job(options.schedule, options.steps, options.microbatches)
    results = demo.run_demo(job, show_plan=options.plan, quiet=options.json)
    if options.html or not options.json:
        path = options.html or Path(tempfile.mkdtemp(prefix="multimesh-demo-")) / "timeline.html"
        _write(options, "--html", path, demo.profile(job).simulated.to_html)
    return results


def _check(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if options.processes and "MULTIMESH_PROCESS" not in os.environ:  # its processes have the flag too
        from multimesh.commands import spawn

        return spawn.spawn(["-m", "multimesh", *argv], options.processes)
    from multimesh.commands.check import run  # imports JAX

    return run.run(options)


def _compile(options: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX tells at length that it finds no CUDA libraries
    from multimesh.commands import compiled_forecast  # imports JAX, which reads the environment

    where = options.device, options.nodes, options.gpus
    forecasts = compiled_forecast.compile_step(options.compile, *where, options.memory)
    if not options.json:
        print(f"memory on each device of a submesh at the peak of a call, compiled for {options.device}")
        print(forecasts.table())
    forecasts.check_fits()
    return forecasts.to_json()


def _forecast(options: argparse.Namespace) -> dict[str, Any]:
    if options.compile:
        return _compile(options)
    if options.schedule is None and (options.svg or options.perfetto):
        raise UsageError("--svg and --perfetto show one schedule; name it with --schedule")
    costs = parse_costs(options.costs)
    shapes = forecast.choose_schedules(options.schedule, options.stages, options.interleave, options.microbatches)
    results = [forecast.simulate_schedule(name, shape, costs, options.transfer) for name, shape in shapes]
    timeline = results[0].timeline
    for flag, path, write in (
        ("--svg", options.svg, timeline.to_svg),
        ("--perfetto", options.perfetto, timeline.to_perfetto),
    ):
        if path is not None:
            _write(options, flag, path, write)
    if not options.json:
        times = ", ".join(f"t{phase}={time:g}" for phase, time in costs.items())
        print(f"p={options.stages} submeshes, m={options.microbatches} microbatches, {times}, ", end="")
        print(f"transfers {options.transfer:g}\n\n{forecast.table(results)}")
    wrong = [result.schedule for result in results if result.agrees is False]
    if wrong:
        raise DisagreementError(f"{', '.join(wrong)}: the simulated idle time is not the published")
    return {"costs": costs, "transfer": options.transfer, "schedules": [result.to_json() for result in results]}


def _write(options: argparse.Namespace, flag: str, path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    if not options.json:
        print(f"wrote {path}{'; open it in a browser' if flag == '--html' else ''}")


def run_demo() -> NoReturn:
    """Run the command ``multimesh-demo``."""
    sys.exit(main(["demo", *sys.argv[1:]]))


def run() -> NoReturn:
    """Run the command ``multimesh``, which is ``python -m multimesh``."""
    with contextlib.suppress(AttributeError):  # a closed pipe ends the command quietly where there is such a signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code. Only ``--help`` leaves by an exception."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of ASCII shows ? for a sign that it lacks
            stream.reconfigure(errors="replace")
    try:
        plugins.refuse_missing(argv)
        options = parser().parse_args(argv)
        if options.command is None:
            parser().print_help()
            return 0
        if options.command == "spawn":
            from multimesh.commands import spawn

            return spawn.spawn([options.program, *options.arguments], options.processes, label=options.label)
        if options.command == "check":
            return _check(options, argv)
        run = {"demo": _demo, "forecast": _forecast}.get(options.command) or options.plugin.run
        results = run(options)
        if options.json:
            print(json.dumps({**results, "exit_code": 0}))
    except MultiMeshError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        if "--json" in argv:
            results = getattr(error, "found", {})
            print(json.dumps({**results, "error": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more while Python ends would end it by the signal
        exec("")  # noqa: S102 - a string interrupted while Python executed it would too, until the next one
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    run()
