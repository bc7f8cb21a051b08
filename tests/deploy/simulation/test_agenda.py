"""The agenda: order of events."""

from __future__ import annotations

import pytest

from baton.deploy.simulation.agenda import Agenda


def test_events_happen_in_time_order_and_those_of_one_time_as_they_came() -> None:
    agenda, seen = Agenda(), list[tuple[str, float]]()

    def note(name: str) -> None:
        seen.append((name, agenda.now))
        if name == "b":
            agenda.at(agenda.now, note, "d")

    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        agenda.at(when, note, name)
    agenda.run()
    assert seen == [("a", 1.0), ("b", 1.0), ("d", 1.0), ("c", 2.0)]


def test_nothing_happens_in_the_past() -> None:
    agenda = Agenda()
    agenda.at(1.0, lambda: None)
    agenda.run()
    with pytest.raises(AssertionError):
        agenda.at(0.5, lambda: None)
