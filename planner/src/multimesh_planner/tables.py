"""The tables of this package: devices, software, models, bands and published runs, each a file beside the code."""

from __future__ import annotations

import csv
import functools
import tomllib
from importlib import resources
from typing import Any


@functools.cache
def read_table(name: str) -> Any:
    """Return the rows of a CSV file, or the tables of a TOML file, of which one takes over those of what it is like."""
    text = resources.files("multimesh_planner").joinpath(name).read_text(encoding="utf-8")
    if name.endswith(".csv"):
        return tuple(csv.DictReader(text.splitlines()))
    tables = tomllib.loads(text)
    for key, fields in tables.items():  # one is like another before it
        tables[key] = {**tables.get(fields.pop("like", ""), {}), **fields}
    return tables
