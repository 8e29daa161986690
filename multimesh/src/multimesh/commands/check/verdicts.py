"""The rows of a check, their table, and a report without names."""

from __future__ import annotations

import dataclasses
import getpass
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OK, FAILED, ABSENT = "ok", "FAILED", "-"
_COLUMNS = ("what", "", "seconds")
WIDTH = 110
_PATH = re.compile(r"(?<![\w/.])/(?:[\w.+-]+/)*[\w.+-]+")
_ADDRESS = re.compile(r"\b[1-9]\d{0,2}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:]*::[0-9a-fA-F:]*\](?::\d+)?")


@dataclass(frozen=True)
class Row:
    """The finding of one step of the check."""

    name: str  # the thing that was tried
    verdict: str  # `OK`; `FAILED`; `ABSENT`: there is nothing to try here
    measured: str  # a sentence for the table
    remedy: str = ""  # the remedy, where the verdict is not `OK`
    code: int = 0  # exit code of the class of the failure; 0 if it is none
    seconds: float = 0.0  # how long the step took
    processes: Sequence[int] = ()  # those at fault, where that is known


def make_failure(name: str, measured: str, remedy: str, code: int = 1, **more: Any) -> Row:
    """Return the row of a step that failed."""
    return Row(name, FAILED, measured, remedy=remedy, code=code or 1, **more)


def exit_code(rows: Iterable[Row]) -> int:
    """Return the code of the first failure, or 0."""
    return next((row.code for row in rows if row.verdict == FAILED), 0)


def unfit_nodes(rows: Iterable[Row], nodes: Sequence[str]) -> list[str]:
    """Return the nodes whose processes are at fault in a row that failed. ``nodes``: that of each process."""
    return sorted({nodes[rank] for row in rows if row.verdict == FAILED for rank in row.processes if nodes})


def table_of_rows(rows: Sequence[Row]) -> str:
    """Draw the rows in lines of at most 110 columns; remedies stand below theirs."""
    cells = [_COLUMNS] + [(row.name, row.verdict, f"{row.seconds:.1f}") for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    margin = sum(widths) + 2 * len(widths)
    texts = [["measured"]] + [_wrap(row, WIDTH - margin) for row in rows]
    lines = []
    for line, text in zip(cells, texts, strict=True):
        start = "".join(f"{word:{width}}  " for word, width in zip(line, widths, strict=True))
        lines += [f"{start}{text[0]}".rstrip(), *(f"{'':{margin}}{more}" for more in text[1:])]
    return "\n".join(lines)


def _wrap(row: Row, width: int) -> list[str]:
    text = textwrap.wrap(row.measured, width)
    remedy = textwrap.wrap(row.remedy, width, initial_indent="-> ", subsequent_indent="   ")
    return [*(text or [""]), *remedy]


def without_names(value: Any, hosts: Sequence[str]) -> Any:
    """Return JSON data without hosts, the user, addresses and paths. A host becomes ``host 0`` and so on."""
    if isinstance(value, Mapping):
        return {key: without_names(item, hosts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_names(item, hosts) for item in value]
    if not isinstance(value, str):
        return value
    for number, host in sorted(enumerate(dict.fromkeys(hosts)), key=lambda pair: -len(pair[1])):
        value = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", f"host {number}", value)
    value = _ADDRESS.sub("ADDRESS", _PATH.sub("PATH", value))
    return re.sub(rf"\b{re.escape(_user())}\b", "USER", value)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number that has no name, in a container
        return "nobody"


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON data."""
    return [dataclasses.asdict(row) for row in rows]


def from_json(data: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of `to_json`."""
    return [Row(**fields) for fields in data]
