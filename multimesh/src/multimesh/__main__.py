"""The command line: forecasts, suggestions, processes, a check of them. It imports JAX only where it is needed."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from multimesh import __version__, launch, schedules
from multimesh.commands import forecast, values
from multimesh.core import names
from multimesh.errors import DisagreementError, MultiMeshError, UsageError
from multimesh.schedules.costs import parse_costs

INTERRUPTED = 130
_SUGGEST = "multimesh_planner.suggest_command"  # of another distribution, which a user may do without

_ROOT = """\
  python -m multimesh forecast
  python -m multimesh check --help

MultiMesh for JAX: parts of one jitted function on different submeshes. The help of each command has examples."""

_FORECAST = """\
simulate pipeline schedules, beside the published formulas

  python -m multimesh forecast
  python -m multimesh forecast --schedule zb-h1 --stages 4 --microbatches 8 --costs F=1,B=1,W=0.8 --svg out.svg
  python -m multimesh forecast --compile train.py:lower --device h100 --nodes 2

Simulate pipeline schedules on ideal submeshes, and compare how long each submesh is idle with the published formulas: p
submeshes, v stages on each, m microbatches; tF, tB, tW are the times of forward, backward and weight gradients of one
microbatch on a whole submesh. Each of its stages takes an equal share. Needs neither devices nor JAX.

With --compile a step of yours is compiled for GPUs that need not be here, and a table shows the memory that XLA gives
each submesh, beside the forecast. It needs JAX's compiler for GPUs: ./bootstrap.sh --group compile-gpu"""

_SPAWN = """\
start a program as several processes of one job on this machine

  python -m multimesh spawn -n 4 train.py --steps 100
  python -m multimesh spawn -n 2 --label examples/fft3d.py 16

Start a Python program several times on this machine, as the processes of one job. In each of them
mm.distributed.initialize() finds the others; on GPUs each takes the one of its number. If one fails, all end. The
lines that they print stay whole."""

_CHECK = """\
say whether these processes and devices can run pipelines, and why not

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

    def flag(self, name: str, kind: Callable[[str], Any], metavar: str, words: str, **options: Any) -> None:
        """Declare a flag with a value."""
        self.add_argument(name, type=kind, metavar=metavar, help=words, **options)

    def switch(self, *names: str, words: str) -> None:
        """Declare a flag without a value."""
        self.add_argument(*names, action="store_true", help=words)


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command and flag."""
    root = _Parser(prog="python -m multimesh", description=_ROOT)
    root.add_argument("--version", action="version", version=f"multimesh-jax {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    rows = dict(_COMMANDS)
    if importlib.util.find_spec(_SUGGEST.partition(".")[0]):
        suggest = importlib.import_module(_SUGGEST)
        about = f"{suggest.SUMMARY}\n\n{suggest.ABOUT}"
        rows["suggest"] = about, suggest.EXIT_CODES, suggest.add_flags, suggest.run
    for name, (about, codes, add_flags, run_command) in rows.items():
        words, _, about = about.partition("\n\n")
        epilog = f"exit codes:\n{codes}\n  130  interrupted"
        command = commands.add_parser(name, help=words, usage="%(prog)s [flags]", description=about, epilog=epilog)
        command.set_defaults(run=run_command)
        add_flags(command)
    return root


def _add_spawn(command: _Parser) -> None:
    command.usage = "%(prog)s -n N [--label] PROGRAM [ARGUMENT ...]"
    add = command.add_argument
    add("-n", "--processes", type=values.positive, required=True, metavar="N", help="how many of them")
    command.switch("-l", "--label", words="the number of its process before each line, as srun -l does")
    add("program", metavar="PROGRAM", help="the file of a Python program")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="its own arguments")


def _add_check(command: _Parser) -> None:
    words = "start N processes on this machine"
    command.add_argument("-n", "--processes", type=values.positive, metavar="N", help=words)
    flag = command.flag
    flag("--stages", values.positive, "N", "stages of the pipeline (default: as many as processes)")
    words = "devices of a stage (default: all, dealt out to the stages)"
    flag("--gpus-per-stage", values.positive, "N", words, dest="per_stage")
    command.switch("--quick", words="the steps for the start of a job, with fewer turns")
    flag("--folder", Path, "DIR", "one that all processes share (default: here)", default=Path())
    flag("--report", values.file, "FILE", "write the rows as JSON without hosts, users, addresses and paths")
    words = "write the nodes whose processes are at fault in a step that failed, one a line"
    flag("--unfit", values.file, "FILE", words)
    command.switch("--json", words="one JSON object instead of the table")


def _add_forecast(command: _Parser) -> None:
    flag = command.flag
    published = "; ".join(f"{schedule.name}: {schedule.summary}" for schedule in schedules.PUBLISHED)
    words = f"default: all but auto. {published}; auto: the shortest of them in the memory of 1f1b"
    flag("--schedule", values.schedule, "NAME", words)
    flag("--stages", values.positive, "P", "submeshes of the pipeline (default: %(default)s)", default=4)
    flag("--interleave", values.positive, "V", "stages on each submesh (default: 2 or 1, as it is usual)")
    flag("--microbatches", values.positive, "M", "default: %(default)s", default=8)
    flag("--costs", str, "F=1,B=1,W=1", "times; default: all 1", default="F=1,B=1,W=1")
    flag("--transfer", values.time, "T", "time of a transfer; formulas are for 0, the default", default=0.0)
    flag("--svg", values.file, "FILE", "draw the timeline of one schedule: a row a submesh, a box a kernel")
    flag("--perfetto", values.file, "FILE", "write it as Chrome-trace JSON for ui.perfetto.dev")
    words = "compile the step that this function returns, mm.jit(f).lower(...); it takes the devices"
    flag("--compile", str, "FILE:FUNCTION", words)
    flag("--device", str, "NAME", "GPU of --compile (default: %(default)s)", default="h100")
    flag("--nodes", values.positive, "N", "nodes (default: %(default)s)", default=1)
    flag("--gpus", values.positive, "N", "GPUs of each (default: %(default)s)", default=8)
    flag("--memory", values.time, "BYTES", "of a GPU that may be used: 72e9 (default: 3/4, as JAX takes)")
    command.switch("--json", words="one JSON object instead of the table")


def _spawn(options: argparse.Namespace) -> int:
    if not Path(options.program).is_file():
        raise UsageError(f"spawn: there is no file {options.program!r}; give the Python program after the flags")
    return _run_processes([options.program, *options.arguments], options.processes, label=options.label)


def _run_processes(program: Sequence[str], processes: int, *, label: bool = False) -> int:
    """Return 0, or the exit code of the first of the processes that failed, 128 more than a signal that ended it."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    # A program that writes to a pipe would keep its lines for a while; a killed one would take them along.
    job = {"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1"), **launch.job_variables()}
    environments = [job | launch.process_variables(rank, processes) for rank in range(processes)]
    labels = [f"{rank:{len(str(processes - 1))}}: " if label else "" for rank in range(processes)]
    commands = [[sys.executable, *program]] * processes
    code = launch.run_together(commands, environments, labels=labels if label or processes > 1 else None)
    return code if code >= 0 else 128 - code


def _check(options: argparse.Namespace) -> int:
    if options.processes and "MULTIMESH_PROCESS" not in os.environ:  # its processes have the flag too
        return _run_processes(["-m", "multimesh", *options.argv], options.processes)
    from multimesh.commands.check import run  # imports JAX

    return run.run(options)


def _forecast(options: argparse.Namespace) -> dict[str, Any]:
    if options.compile:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # or JAX tells at length that it finds no CUDA libraries
        from multimesh.commands import compiled_forecast  # imports JAX, which reads the environment

        where = options.device, options.nodes, options.gpus
        say = (lambda _: None) if options.json else print
        return compiled_forecast.compile_step(options.compile, *where, options.memory, say)
    if options.schedule is None and (options.svg or options.perfetto):
        raise UsageError("--svg and --perfetto show one schedule; name it with --schedule")
    costs = parse_costs(options.costs)
    shapes = forecast.choose_schedules(options.schedule, options.stages, options.interleave, options.microbatches)
    results = [forecast.simulate_schedule(name, shape, costs, options.transfer) for name, shape in shapes]
    for flag, path in (("--svg", options.svg), ("--perfetto", options.perfetto)):
        if path is not None:
            try:
                getattr(results[0].timeline, f"to_{flag[2:]}")(path)
            except OSError as error:
                raise UsageError(f"{flag} {path}: {error.strerror}") from None
            if not options.json:
                print(f"wrote {path}")
    if not options.json:
        times = ", ".join(f"t{phase}={time:g}" for phase, time in costs.items())
        print(f"p={options.stages} submeshes, m={options.microbatches} microbatches, {times}, ", end="")
        print(f"transfers {options.transfer:g}\n\n{forecast.table(results)}")
    wrong = [result.schedule for result in results if result.agrees is False]
    if wrong:
        raise DisagreementError(f"{', '.join(wrong)}: the simulated idle time is not the published")
    return {"costs": costs, "transfer": options.transfer, "schedules": [result.to_json() for result in results]}


_COMMANDS: dict[str, tuple[str, str, Callable[[Any], None], Callable[[argparse.Namespace], Any]]] = {
    "forecast": (_FORECAST, _FORECAST_EXIT_CODES, _add_forecast, _forecast),
    "spawn": (_SPAWN, _SPAWN_EXIT_CODES, _add_spawn, _spawn),
    "check": (_CHECK, _CHECK_EXIT_CODES, _add_check, _check),
}
"""The commands: a line for their list and a description, exit codes, flags, and what returns a code or JSON data."""


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
        if next(iter(argv), "") == "suggest":
            names.load_extra(_SUGGEST, "python -m multimesh suggest")  # or says how to install it
        options = parser().parse_args(argv, argparse.Namespace(argv=argv))
        if options.command is None:
            parser().print_help()
            return 0
        results = options.run(options)
        if isinstance(results, int):
            return results
        if options.json:
            print(json.dumps({**results, "exit_code": 0}))
    except MultiMeshError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        if "--json" in argv:
            print(json.dumps({"error": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more while Python ends would end it by the signal
        exec("")  # noqa: S102 - a string interrupted while Python executed it would too, until the next one
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    run()
