"""Records what happens to tests that keep a promise; see ``workflows/ledger.py`` and CONTRIBUTING.md."""

from __future__ import annotations

import datetime
import importlib.metadata
import signal
from pathlib import Path
from typing import cast

import pytest

from workflows import ledger

_PROPERTY = "promise"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ledger", metavar="FILE", type=Path, help="add the outcomes of promise tests to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background, as the programs that tests interrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (path := config.getoption("--ledger")) is not None:
        config.pluginmanager.register(Recorder(path.resolve()), "promise-recorder")


class Recorder:
    """Collects one record per promise and test, and merges them into the file when the session ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.promises: dict[str, list[ledger.Promise]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("promise"):
                # Properties travel with the reports, also from the workers of a parallel run.
                item.user_properties.append((_PROPERTY, (mark.args[0], mark.kwargs.get("stand_in"))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        promises = [value for name, value in report.user_properties if name == _PROPERTY]
        if not promises:
            return
        test = report.nodeid
        self.promises[test] = [ledger.Promise(*cast("tuple[str, str | None]", value)) for value in promises]
        self.seconds[test] = self.seconds.get(test, 0.0) + report.duration
        if report.outcome != "passed":
            before = self.outcomes.get(test)
            self.outcomes[test] = "failed" if "failed" in (before, report.outcome) else report.outcome
        elif report.when == "call":
            self.outcomes.setdefault(test, "passed")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # a worker of a parallel run, whose reports reach the process that started it
        try:
            jax = importlib.metadata.version("jax")
        except importlib.metadata.PackageNotFoundError:
            jax = None
        commit = ledger.current_commit(ledger.ROOT)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        ledger.merge_results(
            self.path,
            (
                ledger.Record(promise, test, outcome, round(self.seconds[test], 2), commit, date, jax)
                for test, outcome in self.outcomes.items()
                for promise in self.promises[test]
            ),
        )
