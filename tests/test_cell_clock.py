"""The line below a notebook's cell that says how long it has been at work."""

import sys
import time
from types import SimpleNamespace

import pytest
from IPython import display

from qa_lib import cell_clock
from qa_lib.cell_clock import CellClock, show_cell_clock


@pytest.fixture
def shown(monkeypatch):
    """What is shown by clocks that tick every few milliseconds."""
    texts = []

    class Handle:
        def display(self, text, raw):
            texts.append(text["text/plain"])

        update = display

    monkeypatch.setattr(display, "DisplayHandle", Handle)
    monkeypatch.setattr(cell_clock, "SILENT_S", 0.05)
    monkeypatch.setattr(cell_clock, "TICK_S", 0.01)
    return texts


def test_a_long_cell_shows_that_it_is_at_work_and_takes_the_line_away_at_its_end(shown):
    clock = CellClock()
    clock.begin()
    time.sleep(0.3)
    clock.end()
    assert len(shown) > 2
    assert shown[0] == "at work for 0 s"
    assert shown[-1] == ""


def test_a_short_cell_shows_nothing(shown):
    clock = CellClock()
    clock.begin()
    clock.end()
    assert shown == []


def test_the_cell_in_which_the_clock_is_registered_ends_without_a_beginning(shown):
    CellClock().end()
    assert shown == []


@pytest.fixture
def registered(monkeypatch):
    """Registers the clock in such a shell, twice; the names of the events."""

    def register(**shell):
        events = []
        shell = SimpleNamespace(
            events=SimpleNamespace(register=lambda name, call: events.append(name)), **shell
        )
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        show_cell_clock()
        show_cell_clock()
        return events

    return register


def test_a_notebook_gets_one_clock_however_often_its_first_cell_runs(registered):
    assert registered(kernel="a kernel") == ["pre_run_cell", "post_run_cell"]


def test_a_shell_in_a_terminal_gets_none(registered):
    assert registered() == []
