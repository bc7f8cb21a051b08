"""Plays one scenario on a rig: send requests, inject the fault, repair the cluster, judge the outcome."""

from __future__ import annotations

import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from evidence import Evidence
from faulty import Strike
from outages import Outages
from rig import REQUEST_S, Rig, role_of
from scenarios import (
    EVENTS,
    EVICT,
    FILES,
    FRAMES,
    JUMPS_S,
    PAGES,
    PHASE_OF,
    RANK_EVENTS,
    RANKS,
    STOPS_S,
    STORM_WEIGHTS,
    TAGS,
    Scenario,
)
from streams import HANG_S, Known, Stream

REACH_S = 15.0  # longest wait for a phase
MOST_LOADS = 4  # how often more requests are sent if a planned fault has not happened
TIRING = (*FRAMES, *PAGES, "storm")  # these faults may hit every attempt of a request, until it is given up
SALTS = ("", "one", "two")
GIVEN_UP = "given up after"
_STOPPED = {"SIGKILL": "kill", "SIGSTOP": "stop"}
_RANK_STOPPED = {f"rank {name}": f"rank {kind}" for name, kind in _STOPPED.items()}


@dataclass
class Result:
    """The outcome of one scenario."""

    scenario: Scenario
    faults: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # by kind and phase
    ways: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])  # by kind and direction
    outcomes: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list)  # reasons of streams that were allowed to fail
    defects: list[str] = field(default_factory=list)
    seconds: float = 0.0
    settle_s: float = 0.0
    longest_stream_s: float = 0.0


class Play:
    """One scenario in progress."""

    def __init__(self, rig: Rig, answers: dict[str, Known], scenario: Scenario) -> None:
        self.rig, self.answers, self.scenario = rig, answers, scenario
        self.rng = random.Random(scenario.seed)
        self.result = Result(scenario)
        self.streams: list[Stream] = []
        self.evidence = Evidence(rig.directory)
        self.outages = Outages()
        self.router = next(iter(rig.doors)) if len(rig.doors) == 1 else self.rng.choice(list(rig.doors))  # the target
        self._preempted = self._num_preempted()

    def run(self) -> Result:
        """Play the scenario. Raises AssertionError if the cluster does not recover."""
        started = time.monotonic()
        self.rig.new_faults()
        if self.scenario.phase == "idle":
            self._strike()
            time.sleep(self.rng.uniform(0.2, 1.5))
            self._load()
        else:
            self._before()
            self._load()
            self._strike()
        self._join()
        self._ask_others()
        self._collect()
        self.rig.mend()
        self.result.settle_s = self.rig.settle()
        self._judge()
        self.result.seconds = time.monotonic() - started
        return self.result

    def _load(self) -> None:
        scenario, rng = self.scenario, self.rng
        names = list(self.answers)
        chosen = rng.sample(names, rng.randint(4, 7))
        if scenario.phase == "preempted" or scenario.kind == "storm":
            chosen = [name for name in names if name not in ("one token", "few tokens")] * 2
        if scenario.kind == "flood":
            chosen = ["one token", "few tokens"] * 25 + chosen
        if scenario.phase in ("decoding", "moving", "draining"):
            chosen = list({*chosen, "greedy", "sampled"})
        if scenario.phase == "borrowing":
            chosen = [*chosen, "greedy", "next turn", *chosen]
        for name in chosen:
            self._send(self.answers[name], rng.choice(list(self.rig.doors)) if len(self.rig.doors) > 1 else self.router)
            if scenario.kind != "flood" and rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.1))

    def _send(self, known: Known, router: str) -> None:
        """Send a request. If nodes have tiers, it is salted: its pages are cached for some of the scenarios before."""
        if self.rig.has_tiers:
            known = replace(known, body=known.body | {"cache_salt": self.rng.choice(SALTS)})
        self.streams.append(Stream(self.rig.doors[router].connection, known, router))

    def _ask_others(self) -> None:
        """Send what was lost with its router to another one, which must give the same answers."""
        others = [name for name in self.rig.doors if name != self.router]
        lost = [each for each in self.streams if self._is_lost_with_router(each) and each.outcome != "done"]
        for stream in lost if others else ():
            self._send(stream.known, self.rng.choice(others))
        self._join()

    def _is_lost_with_router(self, stream: Stream) -> bool:
        return self.scenario.kind.startswith("router") and stream.router == self.router

    def _before(self) -> None:
        """Set up the faults that must be in place before the requests start."""
        scenario, rng = self.scenario, self.rng
        kind, phase = scenario.kind, scenario.phase
        if kind in ("kill", "stop") and (event := EVENTS.get((role_of(scenario.target), phase))):
            self._set_strike(scenario.target, kind, *event)
        elif self._rank_event is not None:
            name = f"{role_of(scenario.target)}-1"
            self._set_strike(name, kind.removeprefix("rank "), *self._rank_event, field="rank_strike")
        elif phase == "moving":
            victims = [name for name in self.rig.nodes_wanted if role_of(name) == "decode"]
            self._set_strike(rng.choice(victims), "kill", "out:tokens", 30)
        if phase not in ("moving", "draining"):
            self._spoil()

    def _set_strike(self, name: str, kind: str, event: str, most: int, field: str = "strike") -> None:
        self.rig.num_strikes += 1
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        strike = Strike(self.rig.num_strikes, event, number, self.rng.randint(0, most))
        self.rig.new_plan(name, **{field: strike})

    def _spoil(self) -> None:
        """Damage frames, pages or files of all nodes, or evict pages, if the scenario is of that kind."""
        kind, rng = self.scenario.kind, self.rng
        changes: dict[str, Any] = {"seed": rng.randrange(1 << 30)}
        if kind == "storm":
            changes |= {"frames": dict.fromkeys(FRAMES, 0.012), "pages": {"flip": 0.02, "stale": 0.004, "slow": 0.05}}
            changes |= {"files": {"full": 0.02, "flip": 0.1, "gone": 0.05}, "evicts": 0.002, "weights": STORM_WEIGHTS}
        elif kind in FRAMES:
            way, other = ("out", "in") if kind == "full" or rng.random() < 0.3 else ("in", "out")
            changes |= {"frames": {kind: rng.choice((0.1, 0.3, 1.0))}, "tags": TAGS[way][self.scenario.phase]}
            changes |= {"most": rng.randint(1, 6), "weights": {other: 0.0}}
        elif kind in FILES:
            changes |= {"files": {kind.removeprefix("file "): rng.choice((0.1, 0.5, 1.0))}, "most": rng.randint(1, 12)}
        elif kind == EVICT:  # pages on loan are to be on the way
            changes |= {"evicts": rng.choice((0.01, 0.1)), "pages": {"slow": 0.2}, "most": rng.randint(2, 8)}
        elif kind in PAGES:
            most = 2 if kind == "page stale" else 8
            changes |= {"pages": {kind.removeprefix("page "): rng.choice((0.05, 0.3))}, "most": rng.randint(1, most)}
        else:
            return
        for name in self.rig.nodes_wanted:
            strike = self.rig.plans[name].strike
            self.rig.new_plan(name, **{**changes, "strike": strike})

    def _strike(self) -> None:
        scenario = self.scenario
        kind, phase, target = scenario.kind, scenario.phase, scenario.target
        if phase == "moving":
            self._until(lambda: bool(self._struck()))
            time.sleep(self.rng.uniform(0, 0.4))
            if target in {fault["name"] for fault in self.rig.struck}:  # the target is already dead
                target = self.rng.choice([name for name in self.rig.nodes_wanted if role_of(name) == "prefill"])
        elif phase == "draining":
            self._until(self._is_decoding)
            self._signal(target, signal.SIGTERM, "restart")
            time.sleep(self.rng.uniform(0, 0.3))
        elif phase == "preempted":
            self._until(self._is_preempted)
        elif phase == "decoding":
            self._until(self._is_decoding)
        elif phase != "idle":
            time.sleep(self.rng.uniform(0, 0.3))
        if kind in ("kill", "stop") and (role_of(target), phase) in EVENTS:
            self._until_struck()
            self._resume()
        elif kind in ("kill", "stop", "restart", "router kill", "router stop", "router restart"):
            self._signals(self.router if kind.startswith("router") else target, kind.removeprefix("router "))
        elif self._rank_event is not None or (kind in PAGES and phase == "pulling"):
            self._until_struck()
        elif kind in RANKS:
            number = signal.SIGKILL if kind == "rank kill" else signal.SIGSTOP
            if self.rig.hit_rank(f"{role_of(target)}-1", number):
                self.result.faults[kind, phase] += 1
        elif kind.startswith("partition"):
            self._partition(target, kind.removeprefix("partition "))
        elif kind.endswith("clock"):
            name = self.router if kind.startswith("router") else target
            self.rig.new_plan(name, clock_s=self.rig.plans[name].clock_s + self.rng.choice(JUMPS_S))
        elif phase in ("moving", "draining", "idle"):
            self._spoil()
            time.sleep(1.0 if phase == "idle" else 0)

    @property
    def _rank_event(self) -> tuple[str, int] | None:
        """Return the event at which a rank strikes itself, as in EVENTS; None: it gets a signal, if the scenario is of
        that kind. The ranks of a group get signals: each is a node, and strikes itself as a node does."""
        role, has_pulls = role_of(self.scenario.target), "zmq" in self.rig.flags
        if self.scenario.kind not in RANKS or self.scenario.phase != "pulling" or self.rig.sharing != "tp":
            return None
        return RANK_EVENTS[role] if role == "decode" or has_pulls else None

    def _signals(self, name: str, kind: str) -> None:
        numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "restart": signal.SIGTERM}
        label = f"router {kind}" if name == self.router else kind
        self._signal(name, numbers[kind], label)
        if kind == "stop":
            self._resume()
        elif name == self.router:
            self.rig.revive_router(name)
            if self.scenario.phase == "idle" and self.rng.random() < 0.7:
                self.rig.settle()

    def _signal(self, name: str, number: int, label: str) -> None:
        self.rig.hit(name, number)
        self.result.faults[label, self.scenario.phase] += 1

    def _resume(self) -> None:
        """Leave the stopped processes stopped for a while, then continue them."""
        stopped = {fault["name"] for fault in self.rig.struck if fault["kind"] == "SIGSTOP"} | self.rig.stopped
        if not stopped:
            return
        time.sleep(self.rng.choice(STOPS_S))
        for name in stopped:
            self.rig.hit(name, signal.SIGCONT)

    def _partition(self, target: str, weather: Any) -> None:
        lines = [ends for ends in self.rig.lines if target in ends and self.rig.lines[ends].num_connections]
        for ends in self.rng.sample(lines, self.rng.randint(1, len(lines))):
            self.rig.lines[ends].weather = weather
            self.result.faults[self.scenario.kind, self.scenario.phase] += 1
        time.sleep(self.rng.choice(STOPS_S))
        self.rig.lines.clear()

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds. Returns False if all streams end first or it takes too long."""
        deadline = time.monotonic() + REACH_S
        while not condition():
            if time.monotonic() > deadline or not any(stream.thread.is_alive() for stream in self.streams):
                return False
            time.sleep(0.005)
        return True

    def _until_struck(self) -> None:
        """Wait for the planned fault. If all streams end first, send more: the router may have given the node none of
        them."""
        for _ in range(MOST_LOADS):
            if self._until(self._has_struck):
                return
            self._load()
        self._until(self._has_struck)

    def _has_struck(self) -> bool:
        """Return whether a process has struck itself, or the scenario's own kind of fault has happened."""
        return bool(self._struck()) or any(kind == self.scenario.kind for kind, _ in self.result.faults)

    def _is_decoding(self) -> bool:
        return sum(stream.num_tokens for stream in self.streams) > self._tokens_wanted

    @property
    def _tokens_wanted(self) -> int:
        return 10 + self.scenario.seed % 150

    def _is_preempted(self) -> bool:
        return any(report and report["load"]["waiting"] for report in self._reports().values())

    def _reports(self) -> dict[str, Any]:
        return self.rig.auditor.last.get("nodes", {})

    def _num_preempted(self) -> Counter[str]:
        return Counter({name: report["stats"]["preemptions"] for name, report in self._reports().items() if report})

    def _struck(self) -> list[dict[str, Any]]:
        """Collect the faults recorded since the last call. Returns all strikes so far."""
        for fault in self.rig.new_faults():
            kind, phase = fault["kind"], self.scenario.phase
            if kind in _STOPPED:
                self.rig.struck.append(fault)
                self.result.faults[_STOPPED[kind], "decoding" if self.scenario.kind != _STOPPED[kind] else phase] += 1
                if kind == "SIGSTOP":
                    self.rig.stopped.add(fault["name"])
                else:
                    self.rig.processes[fault["name"]].is_expected_to_run = False
            elif kind in _RANK_STOPPED:
                self.rig.struck.append(fault)
                self.rig.processes[fault["name"]].is_expected_to_run = False  # it ends with its rank
                self.result.faults[_RANK_STOPPED[kind], phase] += 1
            elif kind == "clock":
                self.result.faults[self.scenario.kind, phase] += 1
            else:
                way, _, tag = fault["where"].partition(":")
                if tag:
                    self.result.ways[kind, way] += 1
                own = "moving" if fault["attempt"] else "pulling" if fault["where"] == "pull" else PHASE_OF.get(tag)
                aimed = phase in ("preempted", "draining") or self.scenario.kind != "storm"
                self.result.faults[kind, phase if aimed else own or phase] += 1
        return self.rig.struck

    def _join(self) -> None:
        deadline = time.monotonic() + HANG_S + REQUEST_S
        for stream in self.streams:
            while stream.thread.is_alive() and time.monotonic() < deadline:
                self._struck()
                self._resume()
                self._end_outages()
                stream.thread.join(0.1)

    def _end_outages(self) -> None:
        """Start a node again in each role whose nodes have all ended."""
        for role in self.outages.look(self.rig.serving(), time.monotonic()):
            names = [name for name in self.rig.nodes_wanted if role_of(name) == role]
            if all(self.rig.has_gone(name) for name in names):
                self.rig.new_plan(names[0])
                self.rig.start_wanted(names[0])

    def _collect(self) -> None:
        self._struck()
        now = self._num_preempted()
        for name, count in now.items():
            more = count - self._preempted[name] if count >= self._preempted[name] else count
            if more:
                self.result.faults["out of pages", "preempted"] += more

    def _judge(self) -> None:
        result = self.result
        moved = set(re.findall(r"cmpl-[0-9a-f]+", "\n".join(self._moves())))
        for stream in self.streams:
            result.longest_stream_s = max(result.longest_stream_s, stream.seconds)
            defects = self._judge_stream(stream, has_moved=stream.rid in moved)
            if defects:
                defects[-1] += self.evidence.of(stream.rid)
            result.defects += [f"{stream.known.name} ({stream.rid}) {words}" for words in defects]
        result.defects += [f"crash: {words}" for words in self.rig.crashes]
        for words in self.rig.auditor.orphans:
            result.defects.append(f"orphan: {words}{self.evidence.of(words.partition('/')[0])}")
        self.rig.crashes.clear()
        self.rig.auditor.orphans.clear()

    def _judge_stream(self, stream: Stream, *, has_moved: bool) -> list[str]:
        """Count the outcome of a stream. Returns its defects."""
        result, kind = self.result, self.scenario.kind
        if stream.thread.is_alive():
            result.outcomes["hung"] += 1
            return [f"hangs after {stream.num_tokens} tokens"]
        defects = [f"went wrong: {problem}" for problem in stream.problems]
        if stream.outcome == "done":
            result.outcomes["saved" if has_moved else "done"] += 1
            return defects
        words = stream.error or f"the connection broke after {stream.num_tokens} tokens"
        is_refused = words.startswith("429")
        if is_refused and kind == "flood":
            result.faults["queue full", "queued"] += 1
        result.outcomes["refused" if is_refused else stream.outcome] += 1
        result.failures.append(f"{stream.known.name} ({stream.rid}): {words}")
        may_fail = (
            self._is_lost_with_router(stream) or (kind in TIRING and GIVEN_UP in words) or self.outages.excuse(words)
        )
        return defects if is_refused or may_fail else [*defects, f"did not survive: {words}"]

    def _moves(self) -> list[str]:
        logs = [path.read_text(errors="replace") for path in self.rig.directory.glob("router-*.log")]
        return [line for log in logs for line in log.splitlines() if " moves: " in line]
