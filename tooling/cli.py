"""The command line: parses the options of a command, and turns errors into exit codes.

``commands.toml`` has all commands and options. Of the modules only the one that a command names is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tooling.core import errors, proc


def parse_port(text: str) -> int:
    """Read the number of a port."""
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"'{text}' is no port; give a number from 1 to 65535")
    return int(text)


def parse_gib(text: str) -> int:
    """Read ``50G`` or ``1T`` as GiB: bazel-remote counts in whole ones."""
    if (match := re.fullmatch(r"([1-9]\d{0,6})([GT])", text)) is None:
        raise argparse.ArgumentTypeError(f"'{text}': write a whole number and G or T, e.g. 50G")
    return int(match[1]) * {"G": 1, "T": 1024}[match[2]]


_KINDS = {"path": Path, "port": parse_port, "gib": parse_gib, "yes-or-no": argparse.BooleanOptionalAction}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    document = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, **document["parser"])
    _add_commands(parser, "command", document["commands"], document["options"])
    return parser


def _add_commands(parser: argparse.ArgumentParser, level: str, commands: dict[str, Any], options: Any) -> None:
    subparsers = parser.add_subparsers(dest=level, metavar=level.upper(), required=True)
    for name, entry in commands.items():
        text = entry["help"]
        shown = "\n".join([*(f"  {line}" for line in entry.get("examples", ())), "", f"{text[0].upper()}{text[1:]}."])
        words = {"help": text, "description": shown, "formatter_class": argparse.RawDescriptionHelpFormatter}
        command = subparsers.add_parser(name, **words | entry.get("parser", {}))
        command.set_defaults(run=entry.get("run"), parser=command, **entry.get("defaults", {}))
        for group in (options[group] for group in entry.get("options", ())):
            titles = {key: value for key, value in group.items() if isinstance(value, str)}
            place = command.add_argument_group(**titles) if titles else command
            for flags, settings in group.items():
                if flags not in titles:
                    kinds = {key: _KINDS[settings[key]] for key in ("type", "action") if settings.get(key) in _KINDS}
                    place.add_argument(*flags.split(), **settings | kinds)
        if "commands" in entry:
            _add_commands(command, "step", entry["commands"], options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read a command with its options; leaves by ``SystemExit`` after help, or where they are wrong."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:  # said by the command's own parser: its name is the door that was called, as docker/build.py
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main_inner(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; errors pass through."""
    args = parse(argv)
    module, _, function = args.run.rpartition(".")
    try:
        return getattr(importlib.import_module(f"tooling.{module}"), function)(args) or 0
    except ImportError as error:
        name = error.name or "git"  # which GitPython looks for
        raise errors.ToolingError(f"{name}: not found; install it, or run ./bootstrap.sh --group image") from error


def main(argv: Sequence[str] | None = None, inner: Callable[[Sequence[str]], int] = main_inner) -> int:
    """Run one command by ``inner``; print its error, if any, as one line on stderr."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, _interrupt)
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        code = inner(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", code=128 + signal.SIGINT)
    except BrokenPipeError:
        _drop_output()  # its reader is gone (`... | head`)
        return 128 + signal.SIGPIPE
    except (errors.ToolingError, ExceptionGroup, OSError) as error:
        several = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        return _fail(*map(errors.describe, several), code=getattr(several[0], "exit_code", 1))


def _interrupt(signum: int, frame: object) -> NoReturn:
    proc.end_children()
    raise KeyboardInterrupt


def _drop_output() -> None:
    """Drop the output that cannot be written. Python would complain once more while closing stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(*messages: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # most often the error that follows
        _drop_output()
    for message in messages:
        # Names from a server, an archive or a patch must not reach the terminal as control sequences.
        shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
        with contextlib.suppress(OSError):  # the terminal is closed
            print(f"error: {shown}", file=sys.stderr, flush=True)
    return code
