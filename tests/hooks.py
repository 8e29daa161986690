"""Hooks of pytest that every conftest imports: which cases run for every change, and less work between tests."""

from __future__ import annotations

import collections
import gc
import importlib.util
import signal

import pytest

YOUNG = 50_000  # objects made between collections; Python's own number is 2000


def pytest_configure() -> None:
    """Let the programs that tests start be interrupted also where a shell started pytest in the background."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``full`` the cases that a test's ``@pytest.mark.telling("id", ...)`` does not name."""
    cases: dict[tuple[str, tuple[str, ...]], set[str]] = collections.defaultdict(set)
    for item in items:
        mark = item.get_closest_marker("telling")
        if mark is not None and isinstance(item, pytest.Function):
            cases[item.nodeid.partition("[")[0], mark.args].add(item.callspec.id)
            if item.callspec.id not in mark.args:
                item.add_marker(pytest.mark.full)
    for (test, names), ids in cases.items():
        if len(ids) > 1 and not ids.issuperset(names):  # one alone was asked for by its name
            raise pytest.UsageError(f"{test}: telling names {sorted({*names} - ids)}, which are no cases of it")


def pytest_collection_finish() -> None:
    """Leave all that is there out of later collections of garbage, which else take a good part of the time."""
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs JAX's compiler for GPUs, which `.ci/run compile-gpu` has, where it is not installed."""
    modules = ("jax_cuda12_plugin", "nvidia.cuda_nvcc")
    if item.get_closest_marker("compile_gpu") and not (
        importlib.util.find_spec("nvidia") and all(map(importlib.util.find_spec, modules))
    ):
        pytest.skip("needs ./bootstrap.sh --group compile-gpu")
