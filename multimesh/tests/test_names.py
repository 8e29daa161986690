"""The words of the house: functions are verbs with a name of their own, and docstrings say what is done."""

from __future__ import annotations

import ast
import collections
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import multimesh

LIBRARY = Path(multimesh.__file__).parent
ROOT = LIBRARY.parents[2]
LAUNCHER = ROOT / "maxtext" / "src" / "multimesh_maxtext"
PLANNER = ROOT / "planner" / "src" / "multimesh_planner"
NUMERICS = ROOT / "numerics" / "src" / "multimesh_numerics"
HOUSES = (LIBRARY, PLANNER, NUMERICS, LAUNCHER, ROOT / "tooling")
ROOMS = tuple(room for house in HOUSES for room in (house, *sorted(house.iterdir())) if (room / "__init__.py").exists())
"""Every room of the library, of MaxText's launcher and of the tooling, and the modules beside them."""

PARTICIPLES = frozenset(
    (
        *("begun", "chosen", "drawn", "found", "given", "held", "kept", "known", "made", "seen", "sent", "shown"),
        *("taken", "told", "written"),
    )
)
ENDS_AS_ONE = frozenset(("embed", "feed", "need", "seed", "shed", "speed"))
PREDICATES = ("is_", "_is_", "has_", "_has_")  # English has no other word: ``is_placed``
NO_VERBS = frozenset(
    (
        *("a", "all", "an", "any", "both", "each", "every", "how", "it", "most", "no", "one", "some", "that"),
        *("the", "their", "those", "twice", "what", "when", "where", "whether", "which", "who", "why", "submesh"),
    )
)
"""Words with which a sentence begins that does not say what is returned or done."""

VAGUE = frozenset(
    (
        *("found", "made", "given", "held", "kept", "told", "known", "met", "wanted", "asked", "left", "seen", "taken"),
        *("meant", "mine", "own", "whole", "rest", "same", "what", "each", "alike", "apart", "alone", "around"),
    )
)
"""Names that do not say what they hold."""

MOST_VAGUE = 0.002
"""The share of such names among those that a package or its tests bind."""

PUBLIC_TWICE = {
    "trainer": {"place_state", "everywhere"},  # hooks for the patches pass them on
    **{room: {"register", "run"} for room in ("ci", "image", "sources")},  # each command has these two
}
CALLED_BY_PATCHES = frozenset(("stepped",))

NAMED_BY_FORMULA = frozenset(("published", "idle"))  # the docstring is the formula, which ``--help`` shows


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """The functions of a module or class, without the signatures of ``overload``."""
    nodes = [node for node in getattr(tree, "body", ()) if isinstance(node, ast.FunctionDef)]
    return [node for node in nodes if "overload" not in map(ast.unparse, node.decorator_list)]


def modules(room: Path) -> dict[str, ast.Module]:
    files = sorted((room.glob if room in HOUSES else room.rglob)("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in files}


@functools.cache
def every_room() -> dict[Path, dict[str, ast.Module]]:
    """Parse all modules of all rooms, once, when the first test asks for them."""
    return {room: modules(room) for room in ROOMS}


def every_function() -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Return file and function for all rooms, and whether it is a member of a class."""
    for trees in every_room().values():
        for file, tree in trees.items():
            yield from ((file, f, False) for f in functions(tree))
            classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
            yield from ((file, f, True) for node in classes for f in functions(node))


def is_participle(name: str) -> bool:
    words = name.strip("_").split("_")
    return any(w in PARTICIPLES or (w.endswith("ed") and w not in ENDS_AS_ONE) for w in (words[0], words[-1]))


def test_functions_are_verbs():
    rules = "passes/verifying"  # these are named by the sentence that must hold
    names = [(file, f.name) for file, f, member in every_function() if not member and is_participle(f.name)]
    assert [
        (file, name)
        for file, name in names
        if rules not in file and not name.startswith(PREDICATES) and name not in CALLED_BY_PATCHES
    ] == []


def test_public_functions_of_a_room_have_names_of_their_own():
    for room, trees in every_room().items():
        names = [f.name for tree in trees.values() for f in functions(tree) if not f.name.startswith("_")]
        twice = {name for name, times in collections.Counter(names).items() if times > 1}
        assert twice - PUBLIC_TWICE.get(room.name, set()) == set(), room


def test_docstrings_say_what_is_done():
    faults = []
    for file, f, _ in every_function():
        text = ast.get_docstring(f)
        is_property = any("property" in ast.unparse(decorator) for decorator in f.decorator_list)
        if text and not is_property and f.name[0] != "_" and f.name not in NAMED_BY_FORMULA:
            first = text.split(maxsplit=1)[0].rstrip(".,:;").lower()
            if first in NO_VERBS or (first.endswith("s") and not first.endswith("ss")) or not first.isalpha():
                faults.append(f"{file}: {f.name}: {text.splitlines()[0]}")
    assert faults == []


def bindings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name.strip("_").lower()


@pytest.mark.parametrize("package", ["multimesh", "planner", "numerics", "maxtext", "tooling", "tests"])
def test_names_say_what_they_hold(package: str):
    files = (ROOT / package).rglob("*.py")
    names = [name for file in files for name in bindings(ast.parse(file.read_text(encoding="utf-8")))]
    vague = collections.Counter(name for name in names if name in VAGUE)
    assert vague.total() <= MOST_VAGUE * len(names), vague.most_common()
