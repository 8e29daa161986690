"""Reads the command line of ``maxtext/run.py`` into `Flags`. It imports no JAX and reads no file."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import yaml

from multimesh_maxtext.command.flags import COMMON, DEFAULTS, FLAGS, GROUPS, Flag, Flags
from multimesh_maxtext.errors import FlagError, error_classes

DESCRIPTION = """\
  maxtext/run.py --text my-notes.md --num-steps 50
  maxtext/run.py --cpus 8 --dp 2 --tp 2 --pp 2 --batch-size 8

Train a MaxText model on a grid of dp x fsdp x tp x cp x pp x ep devices.
KEY=VALUE arguments go to MaxText (learning_rate=3e-4, dtype=float32, ...)."""

SETTINGS = {
    "--attention-type": "attention_type",
    "--use-iota-embed": "use_iota_embed=true",
    "--no-use-iota-embed": "use_iota_embed=false",
    "--logits-dot-in-fp32": "logits_dot_in_fp32=true",
    "--no-logits-dot-in-fp32": "logits_dot_in_fp32=false",
    "--use-tfds-dataset": "dataset_type=tfds",
    "--no-use-tfds-dataset": "dataset_type=synthetic",
    "--dataset-path": "dataset_path",
    "--dataset-name": "dataset_name",
    "--tokenizer-path": "tokenizer_path",
}
"""Flags of the original that are settings of MaxText; a line says so. Only the values of those without one follow."""

IGNORED = {
    "the Realm runtime": r"--eager-.+|-[a-z]+:.+|-(logfile|level|errlevel|cat|tracelog)|--(zcmem|sysmem|network)",
    "the original's compiler": (
        r"--host-offload-min-reuse-distance|--(no-)?(hoist-loop-convert|load-balance-(embeddings|decoder-norm))"
    ),
    "the original's passes; here they are always as by default": r"--(no-)?(autoshard|fuse-tasks|only-fuse-loop-tasks)",
    "the original's dumps; --dump writes every pass": r"--(no-)?(hlo|dump-(mpmd|all)-passes)",
    "MaxText's train_compile": "--compile-topology-num-slices",
}
"""The original's flags without effect here, by their purpose. A number, or another word without "=", is the value."""


def _exit_codes() -> str:
    kinds = [kind for kind in error_classes().values() if "exit_code" in vars(kind)]
    meanings = {kind.exit_code: (kind.__doc__ or "").partition("\n")[0].replace("`", "") for kind in kinds}
    meanings |= {0: "Every step ran, the loss is finite and falling.", 1: "Any other error."}
    meanings[130] = "It was interrupted."
    lines = [f"{code:5}  {meaning}" for code, meaning in sorted(meanings.items())]
    return "\n".join(["exit codes:", *(textwrap.fill(line, 80, subsequent_indent=" " * 7) for line in lines)])


class _Setting(argparse.Action):
    """Adds one of `SETTINGS` to the KEY=VALUE arguments."""

    def __call__(self, _parser: Any, namespace: Any, value: Any, name: str | None = None) -> None:
        key = SETTINGS[name or ""]
        namespace.settings.append(key if "=" in key else argument(key, value))
        namespace.replaced.append(name)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows a value as one that must be there: the parser takes flags without it to collect all errors."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return f"{action.metavar or default_metavar}{' ...' if action.nargs == '*' else ''}"


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of every flag. It leaves values as they are written, and None for those that are missing."""
    root = argparse.ArgumentParser(
        prog="maxtext/run.py",
        usage="%(prog)s [flags] [KEY=VALUE ...]",
        description=DESCRIPTION,
        epilog=_exit_codes(),
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=_HelpFormatter,
    )
    common = group = root.add_argument_group("the most common flags")
    for name, flag in FLAGS.items():
        if name in GROUPS:
            group = root.add_argument_group(*GROUPS[name])
        options: dict[str, Any] = {"help": flag.help.replace("%", "%%"), "default": argparse.SUPPRESS}
        if flag.value:
            options |= {"metavar": flag.value, "nargs": "*" if flag.several else "?"}
        else:
            options["action"] = "store_true" if DEFAULTS[name] is False else argparse.BooleanOptionalAction
        (common if name in COMMON else group).add_argument(flag.option, dest=name, **options)
    for name, key in SETTINGS.items():
        hidden: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        root.add_argument(name, action=_Setting, dest="settings", nargs=0 if "=" in key else None, **hidden)
    return root


@dataclass(frozen=True)
class CommandLine:
    """A command line as far as it can be read."""

    flags: Flags  # flags whose value is wrong have their default
    wrong: tuple[FlagError, ...] = ()  # errors of the words that cannot be read
    doubtful: frozenset[str] = frozenset()  # flags that those words may have meant. Their values are not known.


def read(argv: Sequence[str]) -> CommandLine:
    """Parse a command line as far as possible; collect its errors."""
    wrong, doubtful, ignored = list[FlagError](), set[str](), list[str]()
    try:
        namespace, others = parser().parse_known_args(argv, argparse.Namespace(settings=[], replaced=[]))
    except argparse.ArgumentError as error:  # a value of a switch, or none of a setting
        name = error.argument_name or ""
        return CommandLine(Flags(), (FlagError(f"{name}: {error.message}"),), frozenset(name.split("/")))
    values = vars(namespace)
    others += [word for word in values.get("text", ()) if _is_setting(word)]  # it takes all words that follow
    values |= {"text": [word for word in values["text"] if not _is_setting(word)]} if "text" in values else {}
    for name in [name for name, flag in FLAGS.items() if flag.value and name in values]:
        try:
            values[name] = _read_value(FLAGS[name], values[name])
        except argparse.ArgumentTypeError as error:
            del values[name]
            wrong.append(FlagError(f"{FLAGS[name].option}: {error}"))
            doubtful.add(FLAGS[name].option)
    for before, word in pairwise(["", *others]):
        name = word.split("=")[0]
        if purpose(name):
            ignored.append(name)
        elif name.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", name):  # a negative number is a value
            near = difflib.get_close_matches(name, [flag.option for flag in FLAGS.values()], n=1, cutoff=0.7)
            hint = f"did you mean {near[0]}?" if near else "maxtext/run.py --help lists every flag"
            wrong.append(FlagError(f"{word}: no such flag; {hint}"))
            doubtful.update(near)
        elif _is_setting(word):
            if before != "-level":
                values["settings"].append(word)
        elif not before.startswith("-"):  # else it is the value of that flag
            wrong.append(
                FlagError(f"{word!r} is neither a flag nor a KEY=VALUE for MaxText; write e.g. learning_rate=3e-4")
            )
    values |= {name: tuple(values[name]) for name in ("settings", "replaced")}
    return CommandLine(Flags(**values, ignored=tuple(ignored)), tuple(wrong), frozenset(doubtful))


def _is_setting(word: str) -> bool:
    """Return whether a word is a KEY=VALUE."""
    return "=" in word and word.partition("=")[0].isidentifier()


def _read_value(flag: Flag, text: Any) -> Any:
    """Return the value of a flag; raise an ``argparse.ArgumentTypeError`` where the text is none."""
    if not text:
        raise argparse.ArgumentTypeError(f"expected {'at least one argument' if flag.several else 'one argument'}")
    if flag.several:
        return tuple(map(flag.read, text))  # type: ignore[arg-type]
    value = flag.read(text) if flag.read else text
    if flag.choices and value not in flag.choices:
        names = list(map(str, flag.choices))
        near = difflib.get_close_matches(text, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(names)}){hint}")
    return value


def write_words(flags: Flags) -> list[str]:
    """Return a command line that is read as these flags."""
    words = list(flags.settings)
    for name, flag in FLAGS.items():
        value = getattr(flags, name)
        if value == DEFAULTS[name]:
            continue
        if not flag.value:
            words.append(flag.option if value else f"--no-{flag.option[2:]}")
            continue
        texts = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
        words += [flag.option, *(texts if flag.several else [",".join(texts)])]
    return words


def purpose(name: str) -> str:
    """Return the purpose of a name that is ignored; empty for another."""
    return next((about for about, names in IGNORED.items() if re.fullmatch(names, name)), "")


def argument(key: str, value: Any) -> str:
    """Return ``key=value`` such that MaxText's YAML reader gives back the value, of the same type."""
    if isinstance(value, bool) or value is None:
        return f"{key}={json.dumps(value)}"
    if isinstance(value, str) and value:
        plain = value != "=" and frozenset("#:{}[],&*!|>'\"%@`\n").isdisjoint(value)
        if not plain or yaml.safe_load(value) != value:
            return f"{key}={json.dumps(value, ensure_ascii=False)}"
    return f"{key}={value}"
