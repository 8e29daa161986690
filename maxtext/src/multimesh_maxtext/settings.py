"""``KEY=VALUE`` arguments as MaxText will read them, before it starts: its names, and the values of its enumerations.

Read from the source of MaxText's configuration classes, because importing them imports JAX.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from multimesh_maxtext.errors import UsageError

_SOURCES = ("common/common_types.py", "configs/types.py")
_ROOT = "MaxTextConfig"
_MANY = 12  # more values than this are not listed where some are near
_NOTHING = ("", "none", "null", "~")
_KINDS = {
    **dict.fromkeys(("int", "NonNegativeInt", "PositiveInt"), "a whole number"),
    **dict.fromkeys(("float", "NonNegativeFloat"), "a number"),
    "bool": "true or false",
}


@dataclass(frozen=True)
class _Field:
    """What a setting may be: of an enumeration, of a kind in words, nothing at all; without any of them, anything."""

    choices: tuple[str, ...] = ()
    kind: str = ""
    optional: bool = False

    def takes(self, value: str) -> bool:
        """Whether MaxText may take a value."""
        if value.lower() in _NOTHING and not (value and value in self.choices):
            return self.optional or "" in self.choices or not (self.choices or self.kind)
        if self.choices:
            return value in self.choices
        try:
            number = float(value)
        except ValueError:
            return not self.kind or (self.kind == "true or false" and isinstance(yaml.safe_load(value), bool))
        return self.kind != "a whole number" or number.is_integer()


def read_values(settings: Sequence[str]) -> dict[str, Any]:
    """Return the settings with their values as YAML reads them."""
    return {key: yaml.safe_load(value) for key, value in (setting.split("=", 1) for setting in settings)}


def find_wrong_settings(settings: Sequence[str], package: Path) -> Iterator[tuple[str, UsageError]]:
    """Yield the settings that MaxText would refuse by their name or by their value, and why, with the nearest ones.

    Parameters
    ----------
    package
        MaxText's package folder.
    """
    if not settings:
        return
    fields = _fields(package)
    for setting in settings:
        key, value = setting.split("=", 1)
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=3, cutoff=0.75)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else f"its settings are in {package / 'configs/base.yml'}"
            )
            yield setting, UsageError(f"{setting}: MaxText has no setting {key}; {hint}")
            continue
        try:
            yaml.safe_load(value)
        except yaml.YAMLError:
            yield setting, UsageError(f"{setting}: the value is no YAML; put strings with special characters in quotes")
            continue
        field = fields[key]
        if field.takes(value):
            continue
        choices = field.choices
        if not choices:
            yield setting, UsageError(f"{setting}: MaxText wants {field.kind}; write {key}=VALUE")
            continue
        near = difflib.get_close_matches(value, choices, n=3, cutoff=0.6) if len(choices) > _MANY else []
        hint = f"near it are {', '.join(near)}" if near else f"it is one of {', '.join(filter(None, choices))}"
        yield setting, UsageError(f"{setting}: MaxText has no such {key}; {hint}")


@functools.cache
def _fields(package: Path) -> Mapping[str, _Field]:
    """Return what each setting may be."""
    classes: dict[str, ast.ClassDef] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for source in _SOURCES:
        for node in ast.parse((package / source).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                aliases[node.targets[0].id] = _field(node.value, {}).choices
    for name, found in classes.items():
        if any("Enum" in ast.unparse(base) for base in found.bases):
            members = (item.value for item in found.body if isinstance(item, ast.Assign))
            aliases[name] = tuple(str(value.value) for value in members if isinstance(value, ast.Constant))
    fields: dict[str, _Field] = {}
    waiting = [_ROOT]
    while waiting:
        group = classes.get(waiting.pop())
        if group is None:
            continue
        waiting += [base.id for base in group.bases if isinstance(base, ast.Name)]
        for item in group.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                fields.setdefault(item.target.id, _field(item.annotation, aliases))
                # Settings of a group may be given without its name.
                if isinstance(item.annotation, ast.Name) and item.annotation.id not in aliases:
                    waiting.append(item.annotation.id)
    return fields


def _field(annotation: ast.expr, aliases: Mapping[str, tuple[str, ...]]) -> _Field:
    """Return what an annotation allows: a name, a literal, or one of them or None."""
    match annotation:
        case ast.Name(id=name):
            return _Field(aliases.get(name, ()), _KINDS.get(name, ""))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=items)):
            return _Field(tuple(str(item.value) for item in items if isinstance(item, ast.Constant)))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=value)):
            return _Field((str(value),))
        case (
            ast.Subscript(value=ast.Name(id="Optional"), slice=inner)
            | ast.BinOp(left=ast.Constant(value=None), right=inner)
            | ast.BinOp(left=inner, right=ast.Constant(value=None))
        ):
            return replace(_field(inner, aliases), optional=True)
    return _Field()
