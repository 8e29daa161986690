"""Diagrams in docs/pictures: the rooms of the library, from its imports, and the words of a pipeline."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from html import escape

from multimesh.commands import forecast
from test_house import FLOORS, ROOT, library

from tests import imports

STYLE = """\
text{font-family:Helvetica,Arial,'Liberation Sans',sans-serif;font-size:11px;fill:#1d2126}
.card{fill:#fff;stroke:#d5d9de}
.room{fill:#f3f5f7;stroke:#8a8f98}
.frame{fill:none;stroke:#8a8f98}
.loop{fill:none;stroke:#8a8f98;stroke-dasharray:4 3}
.idle{fill:#eceef1}
.edge{fill:none;stroke:#8a8f98;stroke-width:1.2}
.tip{fill:#8a8f98}
.x{fill:none;stroke:#cc79a7;stroke-width:1.6}
.SEND,.RECV{fill:none;stroke:#cc79a7;stroke-width:1.4}
.F{fill:#0072b2}
.B{fill:#e69f00}
.tF{fill:#fff}
.tB{fill:#000}
.title{font-size:15px;font-weight:bold}
.word{font-size:13px;font-weight:bold}
.soft{fill:#545b64}
.m{text-anchor:middle}
@media (prefers-color-scheme:dark){
text{fill:#e8eaed}
.card{fill:#16191d;stroke:#3a4048}
.room{fill:#22262c;stroke:#6a717b}
.idle{fill:#2a2f36}
.soft{fill:#aab1ba}
}"""


def _picture(name: str, width: float, height: float, description: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-labelledby="{name}t {name}d">\n<title id="{name}t">{name}</title>\n'
        f'<desc id="{name}d">{escape(description)}</desc>\n<style>{STYLE}</style>'
    )
    card = f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, card, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str, radius: float = 3) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The edges of an acyclic graph that no longer path implies."""
    reach: dict[str, set[str]] = {}
    for node in imports.bottom_up(graph):
        below = graph.get(node, set())
        reach[node] = below.union(*(reach[other] for other in below))
    return {node: {b for b in below if not any(b in reach[c] for c in below - {b})} for node, below in graph.items()}


def rooms() -> dict[str, set[str]]:
    """The rooms that each room imports, after `FLOORS` and the imports of `test_house`."""
    graph: dict[str, set[str]] = {room: set() for floor in FLOORS for room in floor}
    for name, others in library().items():
        graph[name.split(".")[0]] |= {other.split(".")[0] for other in others} - {name.split(".")[0]}
    return graph


def _about(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = ROOT / f"{room}.py" if (ROOT / f"{room}.py").exists() else ROOT / room / "__init__.py"
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return said.partition("\n\n")[0].replace("\n", " ").replace("`", "").partition(". ")[0].rstrip(".")


def house() -> str:
    """Every room on its floor, and an arrow for each import that no other path implies."""
    column, high, gap, top = 200, 76, 28, 64
    columns = {1: (2,), 2: (1, 3), 3: (1, 2, 3), 4: (0, 1, 3, 4), 5: (0, 1, 2, 3, 4)}
    floors = [zip(columns[len(names)], names, strict=True) for names in FLOORS]
    at = {room: (n, floor) for floor, names in enumerate(floors) for n, room in names}
    taken = set(at.values())

    def middle(n: float) -> float:
        return column * (n + 0.5)

    def arrow(room: str, other: str) -> str:
        (n, floor), (to, last) = at[room], at[other]
        y, end = top + floor * (high + gap) + high, top + last * (high + gap) - 6
        clear = all((to, between) not in taken for between in range(floor + 1, last))
        side = to if clear else to + (-0.5 if n < to else 0.5)  # beside the rooms between, where there are any
        turn, back = y + gap, end - gap + 6
        if clear and n == to:
            return f"M{middle(n):g} {y:g}V{end:g}"
        if last == floor + 1:
            return f"M{middle(n):g} {y:g}C{middle(n):g} {turn:g} {middle(to):g} {back:g} {middle(to):g} {end:g}"
        down = f"M{middle(n):g} {y:g}C{middle(n):g} {turn:g} {middle(side):g} {y:g} {middle(side):g} {turn:g}V{back:g}"
        return f"{down}C{middle(side):g} {end:g} {middle(to):g} {back:g} {middle(to):g} {end:g}"

    parts = [
        _text(16, 26, "The rooms of the library", "title"),
        _text(
            16, 46, "An arrow leads from a room to one that it imports. Longer ways imply the arrows left out.", "soft"
        ),
    ]
    for room, below in reduced(rooms()).items():
        for other in sorted(below, key=lambda other: at[other]):
            x, y = middle(at[other][0]), top + at[other][1] * (high + gap)
            parts.append(f'<path class="edge" d="{arrow(room, other)}"/>')
            parts.append(f'<path class="tip" d="M{x - 4:g} {y - 8:g}h8l-4 8z"/>')
    for room, (n, floor) in at.items():
        x, y = middle(n), top + floor * (high + gap)
        name = {"__init__": "multimesh", "__main__": "python -m multimesh"}.get(room, room)
        lines = textwrap.wrap(_about(room), 30)
        assert len(lines) <= 3, f"{room}: begin its docstring with a shorter sentence"
        parts += [_box(x - 90, y, 180, high, "room"), _text(x, y + 19, name, "word m")]
        parts += [_text(x, y + 36 + 13 * n, line, "soft m") for n, line in enumerate(lines)]
    listed = "; ".join(f"{room} imports {', '.join(sorted(below))}" for room, below in rooms().items() if below)
    return _picture("house", 5 * column, top + len(FLOORS) * (high + gap) - gap + 16, f"{listed}.", parts)


def concepts() -> str:
    """A program of two tasks, its stages and kernels, a table of cells, and the plan of instructions."""
    parts = [_text(16, 28, "From a function to a plan", "title")]
    for y, words in zip((62, 208, 342, 470), _WORDS, strict=True):
        parts += _glossary(y, words)
    parts += [*_program(62), *_kernels(208), *_table(342), *_plan(470)]
    said = " ".join(f"{word}: {meaning}." for words in _WORDS for word, meaning in words)
    return _picture("concepts", 1000, 600, said, parts)


_WORDS = (
    (
        ("program", "the function as JAX traces it"),
        ("task", "a part that runs on one submesh"),
        ("microbatch", "the loop runs once for each"),
    ),
    (
        ("submesh", "some of the devices, as a Mesh"),
        ("stage", "a part of the pipeline, on a submesh"),
        ("kernel", "what is compiled for a submesh"),
    ),
    (
        ("schedule", "the order, as a table of cells"),
        ("cell", "phase, stage, microbatch: B1.0"),
        ("transfer", "arrays on their way to a submesh"),
    ),
    (("plan", "the instructions of all submeshes"), ("instruction", "RUN a kernel, SEND, RECV, FREE")),
)
_SPLIT, _SIZES = 250, {"submeshes": 2, "chunks": 1, "microbatches": 3}


def _glossary(y: float, words: Iterable[tuple[str, str]]) -> Iterator[str]:
    for n, (word, meaning) in enumerate(words):
        yield _text(16, y + 14 + 38 * n, word, "word")
        yield _text(16, y + 29 + 38 * n, meaning, "soft")


def _chip(x: float, y: float, width: float, kind: str, text: str, height: float = 24) -> Iterator[str]:
    yield _box(x, y, width, height, kind)
    yield _text(x + width / 2, y + height / 2 + 4, text, f"m t{kind}")


def _program(y: float) -> Iterator[str]:
    yield _box(_SPLIT, y, 734, 122, "loop", 6)
    yield _text(_SPLIT + 10, y + 16, "microbatch loop", "soft")
    tasks = (
        ("task front, on submesh 0", ("dot_general", "tanh"), ("mul", "dot_general")),
        ("task back, on submesh 1", ("dot_general", "sub", "reduce_sum"), ("dot_general", "mul", "div")),
    )
    x = _SPLIT + 12.0
    for name, forward, backward in tasks:
        width = 12 + 108 * len(forward)
        yield _box(x, y + 26, width, 88, "frame", 6)
        yield _text(x + 10, y + 41, name)
        for row, ops, kind in ((48, forward, "F"), (80, backward, "B")):
            for n, op in enumerate(ops):
                yield from _chip(x + 8 + 108 * n, y + row, 100, kind, op)
        x += width + 20
    yield from _chip(x, y + 48, 62, "F", "forward")
    yield from _chip(x, y + 80, 62, "B", "backward")


def _kernels(y: float) -> Iterator[str]:
    for row in range(2):
        x = _SPLIT + 372 * row
        yield _box(x, y, 362, 104, "frame", 6)
        yield _text(x + 10, y + 16, f"submesh {row}", "soft")
        yield _box(x + 10, y + 26, 342, 68, "idle", 6)
        yield _text(x + 20, y + 42, f"stage {row}")
        yield from _chip(x + 20, y + 52, 152, "F", f"kernel F{row}", 32)
        yield from _chip(x + 190, y + 52, 152, "B", f"kernel B{row}", 32)


def _table(y: float) -> Iterator[str]:
    line = _forecast()
    unit = (734 - 70) / line.makespan
    left = _SPLIT + 70
    for row, name in enumerate(line.rows):
        yield _text(_SPLIT, y + 26 + 50 * row, name)
        yield _box(left, y + 6 + 50 * row, line.makespan * unit, 32, "idle", 0)
        for span in line.row(row):
            x, wide = left + span.start * unit + 1, span.duration * unit - 2
            yield from _chip(x, y + 6 + 50 * row, wide, span.phases, _cell(span), 32)
    for hop in line.transfers:
        down = hop.target > hop.source
        start, end = (y + 38, y + 56) if down else (y + 56, y + 38)
        x = left + hop.start * unit
        yield f'<path class="x" d="M{x - 3:g} {start:g}L{x + 3:g} {end:g}"/>'


def _plan(y: float) -> Iterator[str]:
    line = _forecast()
    for row, name in enumerate(line.rows):
        x, top = _SPLIT + 70.0, y + 6 + 54 * row
        yield _text(_SPLIT, top + 24, name)
        listed = list(_instructions(line, row))
        step = (734 - 70) / len(listed)
        for kind, what, phase in listed:
            yield _box(x, top, step - 4, 40, phase or kind)
            yield _text(x + step / 2 - 2, top + 17, kind, f"m t{phase}")
            yield _text(x + step / 2 - 2, top + 31, what, f"m t{phase}")
            x += step


def _instructions(line, row: int) -> Iterator[tuple[str, str, str]]:
    for number in line.order(row):
        span = line.spans[number]
        yield from (("RECV", f"from {hop.source}", "") for hop in line.transfers if number in hop.consumers)
        yield "RUN", _cell(span), span.phases
        yield from (("SEND", f"to {hop.target}", "") for hop in line.transfers if number == hop.producer)


def _cell(span) -> str:
    return f"{span.phases}{span.stage}.{span.microbatch}"


def _forecast():
    return forecast.simulate_schedule("gpipe", forecast.Shape(**_SIZES), {"F": 1, "B": 1, "W": 0}, transfer=0).timeline
