"""Which cases of a test run for every change: ``@pytest.mark.telling("id", ...)``. The others are for ``-m full``."""

from __future__ import annotations

import collections

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that a test's ``telling`` does not name; every conftest imports this hook."""
    cases: dict[tuple[str, tuple[str, ...]], set[str]] = collections.defaultdict(set)
    for item in items:
        mark = item.get_closest_marker("telling")
        if mark is not None and isinstance(item, pytest.Function):
            cases[item.nodeid.partition("[")[0], mark.args].add(item.callspec.id)
            if item.callspec.id not in mark.args:
                item.add_marker(pytest.mark.full)
    for (test, named), ids in cases.items():
        if len(ids) > 1 and not ids.issuperset(named):  # one alone was asked for by its name
            raise pytest.UsageError(f"{test}: telling names {sorted({*named} - ids)}, which are no cases of it")
