"""What the launcher imports: of the library its public names alone, of itself one module after the other."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import multimesh
import multimesh.jax
import multimesh_maxtext
from multimesh import launch, planner, schedules
from tests import imports

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(multimesh_maxtext.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))
PUBLIC = {
    "multimesh": multimesh.__all__,
    "multimesh.schedules": schedules.__all__,
    "multimesh.launch": launch.__all__,
    "multimesh.planner": planner.__all__,
    "multimesh_planner": planner.__all__,
    "multimesh.jax": multimesh.jax.__all__,
}
WAYS = (  # --pp in both processes
    ("run", "command.cli", "command.translate", "command.flags"),
    ("trainer.hooks", "trainer.placement"),
)


def chain(node: ast.expr) -> list[str]:
    """``a.b.c`` as its names; empty for anything else."""
    if isinstance(node, ast.Attribute):
        names = chain(node.value)
        return [*names, node.attr] if names else []
    return [node.id] if isinstance(node, ast.Name) else []


def hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(source: str) -> Iterator[str]:
    """Uses of what is not public: imports from the library, its attributes, and underscored ones of anything else."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}  # name here to module of the library
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {a.asname or a.name: a.name for a in node.names if a.name.split(".")[0] == "multimesh"}
            yield from (a.name for a in node.names if a.name.startswith("multimesh.") and a.name not in PUBLIC)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "multimesh":
            for a in node.names:
                path = f"{node.module}.{a.name}"
                if path in PUBLIC:
                    bound[a.asname or a.name] = path
                if a.name not in PUBLIC.get(node.module or "", ()):
                    yield path
        elif isinstance(node, ast.ImportFrom | ast.Import):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (prefix + a.name for a in node.names if any(map(hidden, (prefix + a.name).split("."))))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        names = chain(node)
        if hidden(node.attr) and names[:-1] not in (["self"], ["cls"]) and names != ["os", "_exit"]:  # that is public
            yield ast.unparse(node)
        module = ".".join([bound.get(names[0], ""), *names[1:-1]]) if names else ""
        if module in PUBLIC and node.attr not in PUBLIC[module]:
            yield ast.unparse(node)


@pytest.mark.parametrize("file", SOURCES, ids=lambda path: path.stem)
def test_of_the_library_only_public_names_are_used(file: Path):
    assert list(private_uses(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import multimesh.plan",
        "from multimesh.errors import UsageError",
        "from multimesh import ir",
        "import multimesh as mm\nmm.plan.Plan",
        "import multimesh\nmultimesh.schedules.table.Cell",
        "from multimesh import schedules\nschedules.published",
        "from multimesh import jit\njit(f)._compiled",
        "from jax._src import core",
    ],
)
def test_what_is_private_is_found(source: str):
    assert len(list(private_uses(source))) == 1


def test_a_page_names_every_module():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## MaxText's launcher")[2]
    table = table.partition("\n## ")[0]
    page_modules = set(re.findall(r"`(\w+)`", table))
    assert sorted({path.stem for path in SOURCES} - {"__init__", "__main__"} - page_modules) == []


def test_imports_go_one_way():
    """No module imports itself through others; ``--pp`` goes downwards to the mesh, through at most 8 modules."""
    graph = {name: others - {"__init__", "command", "trainer"} for name, others in imports.graph(FOLDER).items()}
    for module in reversed(imports.bottom_up(graph)):
        print(f"{module:10} -> {' '.join(sorted(graph[module])) or '-'}")
    doors = {"run": set(imports.of_file(ROOT / "maxtext" / "run.py", FOLDER.name, graph))}
    for modules in WAYS:
        assert all(lower in (graph | doors)[upper] for upper, lower in itertools.pairwise(modules))
    assert sum(map(len, WAYS)) <= 8


def test_the_command_and_the_trainer_meet_in_the_handoff_alone():
    graph = imports.graph(FOLDER)
    room = {name: name.split(".")[0] for name in graph}
    other_rooms = {"command": {"trainer"}, "trainer": {"command"}, "__main__": set()}
    forbidden = {name: other_rooms.get(room[name], {"command", "trainer"}) for name in graph}
    assert [f"{a} imports {b}" for a, others in graph.items() for b in others if room[b] in forbidden[a]] == []
