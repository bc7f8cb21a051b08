"""The automaton of restarts, with a simulated clock: when a process starts again, and when the launcher gives up."""

from __future__ import annotations

import pytest

from baton.deploy.restarts import (
    FIRST_WAIT_S,
    MAX_FAILED_STARTS,
    MAX_WAIT_S,
    PROOF_S,
    REFUSED_WAIT_S,
    SERVED_S,
    GiveUp,
    Restart,
    Restarts,
)

ALL = [("router", "router"), ("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode")]


class Fleet:
    """The processes of a cluster, with a simulated clock."""

    def __init__(self, *, have_joined: bool = True) -> None:
        self.now = 100.0
        self.restarts = Restarts(ALL)
        for name, _ in ALL if have_joined else ():
            assert self.restarts.joined(name, self.now)

    def end(self, name: str, status: int = -9, served_s: float | None = None) -> Restart | GiveUp:
        """End the process. If `served_s` is given, it joins first and serves that long."""
        if served_s is not None:
            self.now += PROOF_S
            self.restarts.joined(name, self.now)
            self.now += served_s
        verdict = self.restarts.ended(name, status, self.now)
        if isinstance(verdict, Restart):
            assert self.restarts.is_waiting(name)
        return verdict

    def start(self, name: str) -> None:
        """Advance the clock to the next start of the process."""
        while self.restarts.is_waiting(name):
            after_s = self.restarts.next_start_s(self.now)
            assert after_s is not None
            self.now += after_s
            assert self.restarts.due(self.now)


def test_the_back_off_doubles_up_to_its_cap_and_starts_anew_after_a_minute_of_service() -> None:
    fleet = Fleet()
    waits: list[float] = []
    for number in range(1, 12):
        verdict = fleet.end("decode-1", served_s=3.0)
        assert isinstance(verdict, Restart) and verdict.num_in_row == number
        waits.append(verdict.after_s)
        fleet.start("decode-1")
    assert waits == [FIRST_WAIT_S * 2**number for number in range(6)] + [MAX_WAIT_S] * 5
    assert fleet.end("decode-1", served_s=SERVED_S) == Restart(FIRST_WAIT_S, 1)


def test_a_long_load_is_no_service() -> None:
    """A node that loads for minutes and ends before it joins still waits longer each time."""
    fleet = Fleet()
    waits: list[float] = []
    for _ in range(8):
        verdict = fleet.end("decode-1", status=1)
        assert isinstance(verdict, Restart)
        waits.append(verdict.after_s)
        fleet.start("decode-1")
        fleet.now += 600.0
    assert waits[-1] == MAX_WAIT_S


def test_one_node_in_a_crash_loop_is_started_for_ever_while_another_serves() -> None:
    fleet = Fleet()
    for _ in range(100):
        assert isinstance(fleet.end("decode-1", status=1), Restart)
        assert fleet.restarts.serving("decode") == ["decode-0"]
        fleet.start("decode-1")


def test_the_only_node_of_a_role_that_joins_and_dies_is_started_for_ever() -> None:
    fleet = Fleet()
    for _ in range(100):
        assert isinstance(fleet.end("prefill-0", status=-11, served_s=1.0), Restart)
        fleet.start("prefill-0")


@pytest.mark.parametrize("status", [1, 2, -9])
def test_a_role_that_cannot_start_at_all_ends_everything_at_once(status: int) -> None:
    fleet = Fleet(have_joined=False)
    first = fleet.end("decode-1", status)
    assert isinstance(first, GiveUp) is (status == 2), "another may start yet, unless the flags are wrong"
    last = fleet.end("decode-0", status)
    assert isinstance(last, GiveUp) and last.is_misconfigured is (status == 2)
    fleet = Fleet(have_joined=False)
    assert isinstance(fleet.end("prefill-0", status), GiveUp)
    assert isinstance(Fleet(have_joined=False).end("router", status), GiveUp)


def test_a_node_that_cannot_start_is_tried_again_if_another_of_its_role_has_joined() -> None:
    fleet = Fleet(have_joined=False)
    fleet.restarts.joined("decode-0", fleet.now)
    for _ in range(20):
        assert isinstance(fleet.end("decode-1", 2), Restart)
        fleet.start("decode-1")


def test_a_role_that_has_served_and_cannot_start_any_more_is_given_up_after_some_tries() -> None:
    """The model directory may have been deleted meanwhile, for example."""
    fleet = Fleet()
    verdicts: list[Restart | GiveUp] = []
    for name in ("decode-0", "decode-1"):
        verdicts.append(fleet.end(name))
    for _ in range(MAX_FAILED_STARTS):
        for name in ("decode-0", "decode-1"):
            fleet.start(name)
            verdicts.append(fleet.end(name, status=1))
    assert [isinstance(verdict, GiveUp) for verdict in verdicts] == [False] * (len(verdicts) - 1) + [True]


def test_a_router_that_serves_is_restarted_and_one_that_cannot_start_is_given_up() -> None:
    fleet = Fleet()
    for _ in range(20):
        assert isinstance(fleet.end("router", served_s=1.0), Restart), "it answers each time"
        fleet.start("router")
    verdicts: list[Restart | GiveUp] = []
    for _ in range(MAX_FAILED_STARTS):
        verdicts.append(fleet.end("router", status=1))
        if isinstance(verdicts[-1], Restart):
            fleet.start("router")
    assert isinstance(verdicts[-1], GiveUp) and not any(isinstance(each, GiveUp) for each in verdicts[:-1])


def test_a_refused_node_is_tried_seldom_while_another_serves_and_soon_when_none_does() -> None:
    fleet = Fleet()
    waits: list[float] = []
    for _ in range(4):
        verdict = fleet.end("decode-1", status=3)
        assert isinstance(verdict, Restart)
        waits.append(verdict.after_s)
        fleet.start("decode-1")
    assert waits == [0.5, REFUSED_WAIT_S, REFUSED_WAIT_S, REFUSED_WAIT_S], "the first may be a mistake"
    fleet.end("decode-1", status=3)
    fleet.end("decode-0")
    begun = fleet.now
    fleet.start("decode-1")
    assert fleet.now - begun <= MAX_WAIT_S


def test_a_node_counts_as_joined_only_a_while_after_its_restart() -> None:
    fleet = Fleet()
    fleet.end("decode-1")
    assert not fleet.restarts.joined("decode-1", fleet.now), "it does not run"
    fleet.start("decode-1")
    assert not fleet.restarts.joined("decode-1", fleet.now + 0.9 * PROOF_S)
    assert fleet.restarts.joined("decode-1", fleet.now + PROOF_S)
    assert not fleet.restarts.joined("decode-1", fleet.now + PROOF_S + 1), "that is no news"
