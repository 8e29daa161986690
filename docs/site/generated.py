"""Fills the lines ``<!-- made: NAME ARGUMENTS -->`` of the pages with what the code says, while the site is built.

On GitHub such a line is an invisible comment, so a page says in words what the site shows there.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import explorer
import messages
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

MADE = re.compile(r"^<!-- made: ([a-z-]+) ?(.*?) -->$", re.MULTILINE)
NUMBER = re.compile(r"(?<![^\s(])(\d[\d.]*(?:e?-\d[\d.]*)+)")  # 2e-07, 2.4-2.9: a hyphen may end a line
BREAK = re.compile(r"(?<=[/_.,={(])(?=\w{3})")  # where a long word of code may
SHORT = 10  # characters: 3 minutes, 0.6 GB
LONG = 28  # characters; a wider column of code leaves no room for three others in 1300 pixels


def api(names: str) -> Iterator[str]:
    """Yield the reference of these names, from their docstrings."""
    for name in names.split():
        module, _, last = f"multimesh.{name}".rpartition(".")
        value = getattr(find_module(module), last)
        if inspect.isclass(value):
            kind, options = "autoclass", ["   :members:"]
            if issubclass(value, Exception):
                kind, options = "autoexception", ["   :show-inheritance:"]
        else:
            kind, options = ("autofunction", []) if callable(value) else ("autodata", [])
        yield from ("```{eval-rst}", f".. {kind}:: {module}.{last}", *options, "```", "")


def find_module(name: str) -> Any:
    """Return a module of the library, or one of another package that it loads, as ``multimesh.linalg``."""
    package, _, last = name.partition(".")
    module = getattr(importlib.import_module(package), last, None) if last else None
    return module or importlib.import_module(name)


def errors(package: str) -> Iterator[str]:
    """Yield a table of the messages for each module of a package."""
    for module, subject, entries in messages.collect(package):
        title, _, more = subject.partition(". ")
        if package == "multimesh":  # a note below a message links here (multimesh/errors.py)
            yield f"({re.sub(r'[._]', '-', module.partition('.')[2])})="
        yield from (f"#### {title.rstrip('.')}", "", f"{more} Module `{module.partition('.')[2]}`.".strip(), "")
        yield from ("| message | what to do |", "|---|---|")
        yield from (f"| {error.cause} (`{error.kind}`) | {error.remedy} |" for error in entries)
        yield ""


def codes(package: str) -> Iterator[str]:
    """Yield a table of a package's kinds of errors with the exit codes of its commands."""
    yield from ("| error | exit code | meaning |", "|---|---|---|")
    for name, kind in vars(importlib.import_module(package)).items():
        if inspect.isclass(kind) and issubclass(kind, Exception) and "exit_code" in vars(kind):
            yield f"| `{name}` | {kind.exit_code} | {messages.plain(inspect.getdoc(kind) or '')} |"
    yield ""


def flags(_: str) -> Iterator[str]:
    """Yield a table for each group of flags of ``maxtext/run.py``, and one of flags that are settings of MaxText."""
    records, original = (importlib.import_module(name) for name in ("multimesh_maxtext.command.flags", "original"))
    for name, flag in records.FLAGS.items():
        if name in records.GROUPS:
            title, about = records.GROUPS[name]
            yield from ("", f"## {title.capitalize()}", "", messages.plain(about), "")
            yield from ("| flag | what it does | in the original |", "|---|---|---|")
        usage = " ".join(filter(None, (flag.option, flag.value))) if flag.value else _switch(name, records)
        default = original.DEFAULTS.get(flag.option)
        entry = f"the same; default: {messages.plain(default)}" if default else "the same"
        cells = (
            f"`{usage}`".replace("|", r"\|"),
            messages.plain(flag.help),
            entry if flag.option in original.FLAGS else "",
        )
        yield f"| {' | '.join(cells)} |"
    settings = importlib.import_module("multimesh_maxtext.command.command_line").SETTINGS
    yield from (
        "",
        "## Settings of MaxText",
        "",
        "These flags of the original are settings of MaxText; both are accepted.",
    )
    yield from ("", "| flag | setting |", "|---|---|")
    yield from (f"| `{flag}` | `{setting}` |" for flag, setting in settings.items() if flag in original.FLAGS)
    yield ""


def _switch(name: str, records: Any) -> str:
    option = records.FLAGS[name].option
    return option if records.DEFAULTS[name] is False else option.replace("--", "--[no-]", 1)


def timelines(uses: str) -> Iterator[str]:
    """Yield links to the pages that `draw_timelines` makes, by use: ``use: name name; use: name``."""
    names_of = {use.strip(): names.split() for use, _, names in (part.partition(":") for part in uses.split(";"))}
    if sorted(name for names in names_of.values() for name in names) != sorted(_forecasts()):
        raise ExtensionError(f"timelines: {uses!r} does not name each schedule once: {', '.join(_forecasts())}")
    yield "<p>Look at them as pages that explain each box you point at:</p><ul>"
    for use, names in names_of.items():
        links = ", ".join(f'<a href="../timelines/{name}.html">{name}</a>' for name in names)
        yield f"<li>{use}: {links}</li>"
    yield "</ul>"


def draw_timelines(app: Sphinx, error: Exception | None) -> None:
    """Write a page for each schedule, with 4 submeshes and 8 microbatches, beside the others."""
    folder = Path(app.outdir) / "timelines"
    folder.mkdir(exist_ok=True)
    for name, timeline in _forecasts().items():
        timeline.to_html(folder / f"{name}.html")


def _forecasts() -> dict[str, Any]:
    forecast = importlib.import_module("multimesh.commands.forecast")
    return {
        name: forecast.simulate_schedule(name, shape, transfer=0.25).timeline
        for name, shape in forecast.choose_schedules(None, submeshes=4, chunks=None, microbatches=8)
    }


def names(page: str) -> Iterator[str]:
    """Yield a table of the names that a page of the reference has, by section."""
    sections: dict[str, list[str]] = {}
    for line in (messages.ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            sections[line.removeprefix("## ")] = links = []
        elif (match := MADE.match(line)) and match[1] == "api":
            links += (f"{{py:obj}}`{name} <multimesh.{name}>`" for name in match[2].split())
    yield from ("| section | names |", "|---|---|")
    yield from (f"| {section} | {', '.join(links)} |" for section, links in sections.items())
    yield ""


def version(_: str) -> Iterator[str]:
    """Yield the version of the library, and where its repository is if the build knows that."""
    release = tomllib.loads((messages.ROOT / "multimesh" / "pyproject.toml").read_text(encoding="utf-8"))
    repository = os.environ.get("GITHUB_REPOSITORY")
    link = f" · [repository](https://github.com/{repository})" if repository else ""
    yield f"Version {release['project']['version']}{link}"


MAKERS = {
    "api": api,
    "codes": codes,
    "errors": errors,
    "explorer": explorer.explorer,
    "flags": flags,
    "names": names,
    "timelines": timelines,
    "version": version,
}


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the marks of a page."""

    def generate(match: re.Match[str]) -> str:
        if match[1] not in MAKERS:
            raise ExtensionError(f"{page}: nothing makes {match[1]!r}; there are {', '.join(MAKERS)}")
        return "\n".join(MAKERS[match[1]](match[2]))

    source[0] = MADE.sub(generate, source[0])


def mark_words(app: Sphinx, tree: nodes.document) -> None:
    """Say where a line may break: in code with a word of more than `LONG` characters; in a table in no number.

    Nor in a cell of `SHORT` characters.
    """
    for code in tree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > LONG:
            code["classes"].append("long")
            first, *others = map(nodes.Text, BREAK.split(code.astext()))
            pairs = ((nodes.raw("", "<wbr>", format="html"), other) for other in others)
            code.children = []
            code.extend([first, *itertools.chain.from_iterable(pairs)])
    for entry in tree.findall(nodes.entry):
        if len(entry.astext()) <= SHORT:
            entry["classes"].append("short")
        for text in list(entry.findall(nodes.Text)):
            if not isinstance(text.parent, nodes.literal):
                pieces = enumerate(NUMBER.split(text))
                runs = [nodes.inline("", part, classes=["number"]) if i % 2 else nodes.Text(part) for i, part in pieces]
                text.parent.replace(text, runs)


def hide_constructor(app: Sphinx, kind: str, name: str, *_: Any) -> tuple[str, None] | None:
    """Leave out how objects are made that users only receive; a schedule may be theirs."""
    return ("", None) if kind == "class" and ".schedules." not in name else None


def mend(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon, which runs before, reads into docstrings: types of properties, and several names as one."""
    if kind == "property" and lines and lines[-1].startswith(":type: "):
        lines[:] = [f"{lines[-1].removeprefix(':type: ')}: {' '.join(lines[:-1]).strip()}"]
    several = [re.match(r":(?:ivar|vartype) ([^:]*, [^:]*):", line) for line in lines]
    lines[:] = [
        line.replace(match[1], match[1].replace(", ", "/")) if match else line
        for line, match in zip(lines, several, strict=True)
    ]


def setup(app: Sphinx) -> dict[str, Any]:
    """Hook into Sphinx."""
    app.connect("source-read", fill)
    app.connect("doctree-read", mark_words)
    app.connect("build-finished", draw_timelines)
    app.connect("build-finished", explorer.write_tables)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("autodoc-process-docstring", mend, priority=900)
    return {"parallel_read_safe": True}
