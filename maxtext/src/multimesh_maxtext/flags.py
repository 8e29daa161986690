"""The flags of ``maxtext/run.py``, in groups whose help teaches what they do. Parsing only: no JAX, no file is read."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from multimesh.errors import UsageError
from multimesh_maxtext.groups import GROUPS
from multimesh_maxtext.options import Options

DESCRIPTION = """\
Train a MaxText model. The devices form a grid of dp x fsdp x tp x pp x ep; the global batch is cut into rows for each
of its dp x fsdp x ep domains, and each domain works through its rows in microbatches.

  maxtext/run.py --cpus 8 --dp 2 --tp 2 --pp 2 --batch-size 8 --microbatch-size 2
  maxtext/run.py --text my-notes.md --num-steps 50

KEY=VALUE arguments go to MaxText as they are (learning_rate=3e-4, dtype=float32, num_experts=8, ...)."""

EPILOG = """\
exit codes:
    0  every step ran, the loss is finite and falling
    1  any other error
    2  flags that do not fit together
    3  something that this backend cannot do
    4  MaxText, a package or a device is missing
   10  the trainer failed
   11  the trainer stopped early
   12  a loss is not finite
   13  the loss is not falling
   14  losses or gradient norms differ (--verify)
   15  a checkpoint cannot be read, written or continued from
   16  more memory is needed than a device has
  130  interrupted"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message + "; maxtext/run.py --help lists every flag")


def parser() -> argparse.ArgumentParser:
    """Return the parser of every flag."""
    root = _Parser(
        prog="maxtext/run.py",
        usage="%(prog)s [flags] [KEY=VALUE ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in GROUPS:
        add(root)
    return root


def parse(argv: Sequence[str]) -> Options:
    """Parse a command line.

    Raises
    ------
    UsageError
        For a flag that is not known or a value of the wrong kind; the message names the nearest flag.
    """
    root = parser()
    eager, rest = _take_eager(argv)
    options, unknown = root.parse_known_intermixed_args(rest, namespace=Options(eager=eager))
    if unknown:
        known = [flag for action in root._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else "maxtext/run.py --help lists every flag"
        raise UsageError(f"{unknown[0]}: no such flag; {hint}")
    for setting in options.settings:
        if not setting.split("=")[0].isidentifier() or "=" not in setting:
            raise UsageError(
                f"{setting!r} is neither a flag nor a KEY=VALUE for MaxText; write e.g. learning_rate=3e-4"
            )
    return options


def _take_eager(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate ``--eager-NAME [VALUE]`` from the rest: the Realm runtime had an open list of them."""
    eager: list[str] = []
    rest: list[str] = []
    expects_value = False
    for word in argv:
        if word.startswith("--eager-"):
            eager.append(word.split("=")[0])
            expects_value = "=" not in word
        elif expects_value and not word.startswith("-"):
            expects_value = False
        else:
            rest.append(word)
            expects_value = False
    return eager, rest
