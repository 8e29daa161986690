"""A wait is told on a terminal by one line, elsewhere in a log."""

import io
import logging

import pytest
from multimesh.core import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "_QUIET", 0.0)


def wait_for_two():
    with progress.progress("compiling kernels", 2) as advance:
        advance()
        advance()


def test_a_terminal_has_one_line_which_goes_away(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    wait_for_two()
    first, second, third, end = screen.getvalue().split("\r")[1:]
    assert (first, second) == ("compiling kernels: 1 of 2, 0 s", "compiling kernels: 2 of 2, 0 s")
    assert (third, end) == (" " * len(second), "")


def test_a_log_has_the_start_and_the_end(caplog):
    with caplog.at_level(logging.INFO, "multimesh"):
        wait_for_two()
    assert [r.getMessage()[:25] for r in caplog.records] == ["compiling kernels: 1 of 2", "compiling kernels: 2 of 2"]


def test_short_waits_are_silent(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "_QUIET", 3600.0)
    wait_for_two()
    assert screen.getvalue() == ""
