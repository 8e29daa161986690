"""Tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return p


def commit_of(clone: Path) -> str:
    """Return the commit of a clone, in seven digits; empty where git knows none."""
    line = ["git", "-C", str(clone), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()


def show(tables: dict[str, Sequence[Row]], as_json: bool) -> None:
    """Print ``tables`` (title to rows); all rows of a table have the keys of its first one."""
    if as_json:
        run = {"date": datetime.now(UTC).date().isoformat(), "jax": jax.__version__, "devices": len(jax.devices())}
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[2]}
        print(json.dumps(run | machine | {"tables": tables}, indent=2))
        return
    console = Console()
    for title, rows in tables.items():
        table = Table(title=title, title_justify="left")
        for name in rows[0] if rows else ():
            table.add_column(name, justify="right" if isinstance(rows[0][name], int | float) else "left")
        for row in rows:
            table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
        console.print(table)
