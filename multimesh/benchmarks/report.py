"""Tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return p


def show(tables: Mapping[str, Sequence[Row]], as_json: bool) -> None:
    """Print ``tables`` (title to rows); all rows of a table have the keys of its first one."""
    if as_json:
        machine = {"date": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count(), "load": os.getloadavg()[2]}
        print(json.dumps(machine | {"tables": tables}, indent=2))
        return
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left")
        for name in rows[0] if rows else ():
            table.add_column(name, justify="right" if isinstance(rows[0][name], int | float) else "left")
        for row in rows:
            table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
        Console().print(table)
