"""The pictures in docs/pictures: the house, and every schedule with 4 submeshes and 8 microbatches of equal phases.

``python multimesh/tests/drawings.py --write`` renews them; without ``--write`` it says which would change.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Mapping
from html import escape
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from test_house import FLOORS, ROOT, library, part_of

from tests import imports

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
# Of runs; by hand:
OTHERS = ("concepts.svg", "processes.svg", "layouts.svg", "particle-mesh.png")
PAGES = ("tutorial-", "slow-")  # written by docs/ten-minutes.md, which a test compares, and by docs/troubleshooting.md


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


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:g}" y="{y:g}">{escape(text)}</text>'


def reduced(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The edges of an acyclic graph that no longer path implies."""
    reach: dict[str, set[str]] = {}
    for node in imports.bottom_up(graph):
        imported = graph.get(node, set())
        reach[node] = imported.union(*(reach[other] for other in imported))
    return {node: {b for b in below if not any(b in reach[c] for c in below - {b})} for node, below in graph.items()}


def rooms() -> dict[str, set[str]]:
    """The rooms that each room imports, after `FLOORS` and the imports of `test_house`."""
    graph: dict[str, set[str]] = {room: set() for floor in FLOORS for room in floor}
    for name, others in library().items():
        if name != "schedules":  # it imports lazily what it names
            graph[part_of(name, graph)] |= {part_of(other, graph) for other in others} - {part_of(name, graph)}
    return graph


def _describe(room: str) -> str:
    """The first sentence of a room's docstring."""
    path = ROOT / f"{room.replace('.', '/')}.py"
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("`", "").partition(". ")[0].rstrip(".")


def house() -> str:
    """Every room on its floor, and an arrow for each import that no other path implies."""
    column, high, gap, top = 200, 76, 28, 64
    columns = {1: (2,), 2: (1, 3), 3: (1, 2, 3), 4: (0, 1, 3, 4), 5: (0, 1, 2, 3, 4)}
    floors = [zip(columns[len(names)], names, strict=True) for names in FLOORS]
    at = {room: (n, floor) for floor, names in enumerate(floors) for n, room in names}
    positions = set(at.values())

    def middle(n: float) -> float:
        return column * (n + 0.5)

    def arrow(room: str, other: str) -> str:
        (n, floor), (to, last) = at[room], at[other]
        y, end = top + floor * (high + gap) + high, top + last * (high + gap) - 6
        clear = all((to, between) not in positions for between in range(floor + 1, last))
        side = to if clear else to + (-0.5 if n < to else 0.5)  # beside the rooms between, where there are any
        turn, bend = y + gap, end - gap + 6
        if clear and n == to:
            return f"M{middle(n):g} {y:g}V{end:g}"
        if last == floor + 1:
            return f"M{middle(n):g} {y:g}C{middle(n):g} {turn:g} {middle(to):g} {bend:g} {middle(to):g} {end:g}"
        down = f"M{middle(n):g} {y:g}C{middle(n):g} {turn:g} {middle(side):g} {y:g} {middle(side):g} {turn:g}V{bend:g}"
        return f"{down}C{middle(side):g} {end:g} {middle(to):g} {bend:g} {middle(to):g} {end:g}"

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
        lines = textwrap.wrap(_describe(room), 30)
        assert len(lines) <= 3, f"{room}: begin its docstring with a shorter sentence"
        parts.append(f'<rect class="room" x="{x - 90:g}" y="{y:g}" width="180" height="{high}" rx="3"/>')
        parts.append(_text(x, y + 19, name, "word m"))
        parts += [_text(x, y + 36 + 13 * n, line, "soft m") for n, line in enumerate(lines)]
    sentence = "; ".join(f"{room} imports {', '.join(sorted(below))}" for room, below in rooms().items() if below)
    width, height = 5 * column, top + len(FLOORS) * (high + gap) - gap + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="houset housed">\n<title id="houset">house</title>\n'
        f'<desc id="housed">{escape(sentence)}.</desc>\n<style>{STYLE}</style>'
    )
    card = f'<rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>'
    return "\n".join([head, card, *parts, "</svg>\n"])


def drawings() -> dict[str, str]:
    """File name to what the file must hold."""
    from multimesh.commands import forecast
    from multimesh.observe.timelines import svg

    pictures = {"house.svg": house()}
    for name, shape in forecast.choose_schedules(None, submeshes=4, chunks=None, microbatches=8):
        pictures[f"{name}.svg"] = svg.draw(forecast.simulate_schedule(name, shape).timeline)
    return pictures


def list_stale() -> list[str]:
    """Names of files that are missing, not as they would be drawn now, or drawn by nothing; others left out."""
    pictures = drawings()
    files = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*") if path.name not in OTHERS}
    files = {name: text for name, text in files.items() if not name.startswith(PAGES)}
    return sorted(name for name in {*pictures, *files} if pictures.get(name) != files.get(name))


def main() -> None:
    """Write the pictures, or name those that are not current."""
    if sys.argv[1:] == ["--write"]:
        for name, text in drawings().items():
            (FOLDER / name).write_text(text, encoding="utf-8")
    print("\n".join(list_stale()))


if __name__ == "__main__":
    main()
