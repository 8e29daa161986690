"""Reads a YAML document that nobody vouches for: strict syntax, strict schema, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from workflows import errors


class _Loader(yaml.SafeLoader):
    """The safe loader, but a key given twice is an error and aliases are not allowed."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load(path: Path, schema: Path) -> dict[str, Any]:
    """Return the document at ``path`` if it follows the JSON schema at ``schema``."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise errors.ManifestError(f"{path.name}: not found in {path.parent}; run this from a whole clone") from error
    except UnicodeDecodeError as error:
        raise errors.ManifestError(f"{path.name}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    try:
        document = yaml.load(text, _Loader)  # noqa: S506  (a stricter SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise errors.ManifestError(f"{path.name}{line}: {error.problem or 'is not valid YAML'}") from error
    except yaml.YAMLError as error:
        raise errors.ManifestError(f"{path.name}: is not valid YAML ({' '.join(str(error).split())})") from error
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text(encoding="utf-8")))
    fault = jsonschema.exceptions.best_match(validator.iter_errors(document))
    if fault is not None:
        where = ".".join(str(part) for part in fault.absolute_path) or "the document"
        raise errors.ManifestError(f"{path.name}: {where}: {' '.join(fault.message.split())[:300]}")
    return dict(document)
