"""The judgement of the chaos tests: evidence from logs, errors excused by an outage, orphans, sums of reports."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import psutil
from evidence import MAX_LINE, MAX_LINES, Evidence
from outages import NODE_WAIT_S, Outages
from play import Result
from rig import ORPHAN_S, Auditor, num_left
from scenarios import COMING, GOING, PHASES, Scenario
from tally import Tally

from baton.metadata.wire import data_link, messages

TRACEBACK = """12:00:00.000 E decode-0 what nobody foresaw
Traceback (most recent call last):
  File "node.py", line 1, in step
    self._arrive(event)
KeyError: 'row'
12:00:00.001 I decode-0 on it goes
"""
NONE_LEFT = "no node of model 'chaos' could take the request for 10 s: no decode node is left"


def test_evidence_holds_the_log_lines_of_a_request(tmp_path: Path) -> None:
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
    assert "transfer_error" in evidence.of("") and "admitted" not in evidence.of("")  # without an id: warnings


def test_only_an_outage_longer_than_node_wait_s_excuses_an_error() -> None:
    nodes = {"decode-0": True, "decode-1": True, "prefill-0": True}
    outages = Outages()
    assert outages.look(nodes, 0.0) == [] and not outages.excuse(NONE_LEFT)
    assert outages.look(nodes | {"decode-0": False}, 1.0) == []
    nobody = nodes | {"decode-0": False, "decode-1": False}
    assert outages.look(nobody, 2.0) == outages.look(nobody, 1.9 + NODE_WAIT_S / 2) == ["decode"]
    assert outages.look(nodes, 5.0) == [] and not outages.excuse(NONE_LEFT)
    assert outages.look(nobody, 100.0) == ["decode"]  # a second outage: the two do not add up
    assert outages.look(nobody, 99.0 + NODE_WAIT_S / 2) == ["decode"] and not outages.excuse(NONE_LEFT)
    assert outages.look(nobody, 100.0 + NODE_WAIT_S) == ["decode"] and outages.excuse(NONE_LEFT)
    assert outages.excuse("503: model 'chaos' cannot be served now: it has no decode node")
    assert not outages.excuse(NONE_LEFT.replace("decode", "prefill"))
    assert not outages.excuse("a node failed at this request; its log says why")


def test_an_orphan_is_as_old_as_the_books_say() -> None:
    """If the router waits for the answer of one node, orphans of the other nodes do not seem older."""
    auditor: Any = Auditor(None)  # type: ignore[arg-type]
    books = {"router": {"requests": []}, "nodes": {"p0": {"requests": [], "tickets": ["cmpl-1/0.0"]}, "d0": None}}
    now = time.monotonic()
    auditor._look(books, now)
    auditor._since = {key: since - 2 * ORPHAN_S for key, since in auditor._since.items()}  # first seen long ago
    auditor._look(books, now - 2 * ORPHAN_S + 0.2)  # requested soon after
    assert not auditor.orphans and auditor.longest < ORPHAN_S
    auditor._look(books, now)
    assert auditor.orphans == ["cmpl-1/0.0 at p0"] and auditor.longest > ORPHAN_S


def test_reports_of_several_runs_add_up(tmp_path: Path) -> None:
    for seed, way in ((1, "in"), (2, "out"), (3, "in")):
        tally, result = Tally(), Result(Scenario(0, seed, "drop", "queued", "decode-0"), seconds=1.0, settle_s=seed)
        result.faults["drop", "queued"] = result.ways["drop", way] = seed
        result.faults["kill", "moving"] = 1
        result.outcomes["done"] = 5
        result.longest_stream_s = seed
        result.defects = ["hangs"] if seed == 3 else []
        tally.seeds.append(seed)
        tally.add("eagle" if seed == 1 else "none", result)
        tally.write(tmp_path / f"{seed}.json")
    tool = [sys.executable, str(Path(__file__).with_name("tally.py"))]
    reports = [str(tmp_path / f"{seed}.json") for seed in (1, 2, 3)]
    done = subprocess.run(
        [*tool, *reports, "--out", str(tmp_path / "all.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "hangs" in done.stdout, done  # as for one run with a defect
    table = (tmp_path / "all.md").read_text()
    assert "| drop | 6 |  |  |  |  |  |  |  |  |  | 6 | 4 | 2 |" in table
    assert "| all | 6 | 0 | 0 | 0 | 0 | 0 | 0 | 3 | 0 | 0 | 9 | 4 | 2 |" in table
    assert "9 faults in 3 scenarios; of messages 4 in and 2 out. Streams: 15 done" in table and "Defects: 1" in table
    again = subprocess.run([*tool, str(tmp_path / "all.json")], capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout


def test_messages_of_a_phase_are_sent_in_that_direction() -> None:
    kinds = {
        "in": messages.ToNode | data_link.ToDecode,
        "out": messages.ToRouter | data_link.ToPrefill,
    }
    for way, phases in (("in", COMING), ("out", GOING)):
        known = {each.__struct_config__.tag for each in get_args(kinds[way])}
        assert set(phases) == set(PHASES)
        assert {tag for tags in phases.values() for tag in tags} <= known


def test_a_process_that_outlives_its_node_is_counted() -> None:
    words = "sleep 60 & echo $!"
    node = subprocess.Popen(["sh", "-c", words], stdout=subprocess.PIPE, text=True, process_group=0)
    assert node.stdout is not None
    rank = psutil.Process(int(node.stdout.readline()))
    node.stdout.close()
    node.wait()
    try:
        assert num_left(node.pid) == 1
    finally:
        rank.kill()
    assert num_left(node.pid) == 0
