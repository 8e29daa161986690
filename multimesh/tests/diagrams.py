"""The diagram of the rooms of the library in docs/pictures, from its imports."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Mapping
from html import escape

from test_house import FLOORS, ROOT, library, part_of

from tests import imports

STYLE = """\
text{font-family:Helvetica,Arial,'Liberation Sans',sans-serif;font-size:11px;fill:#1d2126}
.card{fill:#fff;stroke:#d5d9de}
.room{fill:#f3f5f7;stroke:#8a8f98}
.edge{fill:none;stroke:#8a8f98;stroke-width:1.2}
.tip{fill:#8a8f98}
.title{font-size:15px;font-weight:bold}
.word{font-size:13px;font-weight:bold}
.soft{fill:#545b64}
.m{text-anchor:middle}
@media (prefers-color-scheme:dark){
text{fill:#e8eaed}
.card{fill:#16191d;stroke:#3a4048}
.room{fill:#22262c;stroke:#6a717b}
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
        if name != "schedules":  # it imports lazily what it names
            graph[part_of(name, graph)] |= {part_of(other, graph) for other in others} - {part_of(name, graph)}
    return graph


def _about(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = ROOT / f"{room.replace('.', '/')}.py"
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
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


_SPLIT, _SIZES = 250, {"submeshes": 2, "chunks": 1, "microbatches": 3}
