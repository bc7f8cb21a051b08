"""What the harness makes of what it sees: evidence from logs, errors that an outage excuses, orphans in the ledger."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from evidence import MAX_LINE, MAX_LINES, Evidence
from outages import NODE_WAIT_S, Outages
from rig import ORPHAN_S, Auditor

TRACEBACK = """12:00:00.000 E decode-0 what nobody foresaw
Traceback (most recent call last):
  File "node.py", line 1, in step
    self._arrive(event)
KeyError: 'row'
12:00:00.001 I decode-0 on it goes
"""
NONE_LEFT = "no node of model 'chaos' could take the request for 10 s: no decode node is left"


def test_evidence_is_what_a_scenarios_logs_say_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "decode-0-0.log").write_text("12:00:00.000 I decode-0 rid=cmpl-1 of an earlier scenario\n")
    evidence = Evidence(tmp_path)
    with (tmp_path / "decode-0-0.log").open("a") as log:
        log.write("12:00:01.000 W decode-0 rid=cmpl-1 transfer_error: " + "x" * 1000 + "\n")
        log.write("12:00:01.000 I decode-0 rid=cmpl-2 admitted\n" + TRACEBACK)
    (tmp_path / "router-1.log").write_text("12:00:01.000 I router rid=cmpl-1 moves: why\n" * 100)  # started meanwhile
    lines = evidence.of("cmpl-1").strip().splitlines()
    assert sum("decode-0-0: " in line for line in lines) == 1 + 4 and any("KeyError: 'row'" in line for line in lines)
    assert sum("router-1: " in line for line in lines) == MAX_LINES
    assert not any(word in line for line in lines for word in ("earlier", "cmpl-2", "on it goes"))
    assert max(map(len, lines)) < MAX_LINE + 40
    assert "transfer_error" in evidence.of("") and "admitted" not in evidence.of("")  # no id: what was complained of


def test_only_an_outage_as_long_as_the_stated_wait_excuses_an_error() -> None:
    nodes = {"decode-0": True, "decode-1": True, "prefill-0": True}
    outages = Outages()
    assert outages.look(nodes, 0.0) == [] and not outages.excuse(NONE_LEFT)
    assert outages.look(nodes | {"decode-0": False}, 1.0) == []
    nobody = nodes | {"decode-0": False, "decode-1": False}
    assert outages.look(nobody, 2.0) == outages.look(nobody, 1.9 + NODE_WAIT_S / 2) == ["decode"]
    assert outages.look(nodes, 5.0) == [] and not outages.excuse(NONE_LEFT)
    assert outages.look(nobody, 100.0) == ["decode"]  # another one: the two do not add up
    assert outages.look(nobody, 99.0 + NODE_WAIT_S / 2) == ["decode"] and not outages.excuse(NONE_LEFT)
    assert outages.look(nobody, 100.0 + NODE_WAIT_S) == ["decode"] and outages.excuse(NONE_LEFT)
    assert outages.excuse("503: model 'chaos' cannot be served now: it has no decode node")
    assert not outages.excuse(NONE_LEFT.replace("decode", "prefill"))
    assert not outages.excuse("a node failed at this request; its log says why")


def test_an_orphan_is_as_old_as_the_books_say() -> None:
    """An answer that the router waited for in vain does not make those of others older."""
    auditor: Any = Auditor(None)  # type: ignore[arg-type]
    books = {"router": {"requests": []}, "nodes": {"p0": {"requests": [], "tickets": ["cmpl-1/0.0"]}, "d0": None}}
    now = time.monotonic()
    auditor._look(books, now)
    auditor._since = {key: since - 2 * ORPHAN_S for key, since in auditor._since.items()}  # seen first long ago
    auditor._look(books, now - 2 * ORPHAN_S + 0.2)  # asked for soon after
    assert not auditor.orphans and auditor.longest < ORPHAN_S
    auditor._look(books, now)
    assert auditor.orphans == ["cmpl-1/0.0 at p0"] and auditor.longest > ORPHAN_S
