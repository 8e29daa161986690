"""``python -m multimesh``: a demonstration of the library. JAX is imported only after the flags are checked."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from multimesh import schedules
from multimesh.errors import MultiMeshError, UsageError

INTERRUPTED = 130

_DEMO = """\
Train a small transformer with a tied embedding as a pipeline of two stages. Each stage is a task on a submesh of 2 x 2
devices: two for data and two for tensor parallelism. Every batch is cut into microbatches, which the schedule sends
through the stages; then SGD changes the parameters, each where it lives.

The same function runs once more under plain jax.jit on one device, from the same start. The table shows the loss of
both after each step. They are equal but for rounding, or the command fails.

  python -m multimesh demo
  python -m multimesh demo --schedule gpipe --microbatches 8 --plan"""

_EXIT_CODES = """\
exit codes:
    0  the losses of every step agree to 1e-5
    1  any other error
    2  flags that do not fit together
    4  not enough devices
   14  the losses differ
  130  interrupted"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help lists every flag")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command and flag."""
    root = _Parser(
        prog="python -m multimesh",
        description="MultiMesh for JAX: parts of one jitted function on different submeshes.",
        allow_abbrev=False,
    )
    commands = root.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    demo = commands.add_parser(
        "demo",
        help="train a small transformer as a pipeline, beside the same function on one device",
        description=_DEMO,
        epilog=_EXIT_CODES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--schedule",
        choices=schedules.names(),
        default="1f1b",
        help="order in which a submesh runs its microbatches: gpipe (or fill-drain) all forwards, then all backwards; "
        "1f1b one forward, one backward, which keeps fewer activations (default: %(default)s)",
    )
    demo.add_argument("--steps", type=_positive, default=8, metavar="N", help="training steps (default: %(default)s)")
    demo.add_argument(
        "--microbatches",
        type=_positive,
        default=4,
        metavar="N",
        help="microbatches a step, of 4 sequences each (default: %(default)s)",
    )
    demo.add_argument(
        "--devices",
        choices=("virtual", "real"),
        default="virtual",
        help="8 virtual CPU devices, or the first 8 that JAX finds (default: %(default)s)",
    )
    demo.add_argument("--plan", action="store_true", help="show the plan first: what each submesh runs, in order")
    demo.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return root


def virtual_devices(environ: dict[str, str], count: int) -> dict[str, str]:
    """Environment variables, to be set before JAX is imported, that make ``count`` virtual CPU devices.

    A collective waits until each of its devices has a thread, so there must be more threads (``NPROC``) than programs
    in flight.
    """
    name = "--xla_force_host_platform_device_count"
    others = [flag for flag in environ.get("XLA_FLAGS", "").split() if flag.partition("=")[0] != name]
    return {
        "JAX_PLATFORMS": "cpu",
        "NPROC": environ.get("NPROC", "64"),
        "OPENBLAS_NUM_THREADS": environ.get("OPENBLAS_NUM_THREADS", "1"),
        "XLA_FLAGS": " ".join([*others, f"{name}={count}"]),
    }


def main(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code; nothing but ``--help`` leaves by an exception."""
    try:
        options = parser().parse_args(argv)
        if options.command is None:
            parser().print_help()
            return 0
        if options.devices == "virtual":
            os.environ.update(virtual_devices(dict(os.environ), 8))
        from multimesh import demo  # imports JAX, which reads the environment

        job = demo.Options(options.schedule, options.steps, options.microbatches)
        found = demo.run(job, show_plan=options.plan, quiet=options.json)
        if options.json:
            print(json.dumps({**found, "exit_code": 0}))
    except MultiMeshError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        if "--json" in argv:
            found = getattr(error, "found", {})
            print(json.dumps({**found, "error": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    with contextlib.suppress(AttributeError):  # a closed pipe ends the command quietly where there is such a signal
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
