"""A whole load: what is sent when, and what is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from baton.deploy.bench.client import Reply, Target, open_session
from baton.deploy.bench.figures import LoadFigures, load_figures, percentiles
from baton.deploy.bench.load import Planned
from baton.deploy.bench.sender import Sender, run_on_uvloop
from baton.deploy.simulation.figures import Slo

from .conftest import TimetableServer

NEAR_S = 0.002


def sent(
    server: TimetableServer,
    planned: list[Planned],
    *,
    stop: Callable[[Reply], float] | None = None,
    **settings: object,
) -> Sender:
    """Return a sender that has sent these requests. `stop`: it is stopped when this is true of its first reply."""
    target = Target(server.url, "toy", fields={"return_token_ids": True}, **settings)  # type: ignore[arg-type]

    async def run() -> Sender:
        async with open_session(target, timeout_s=10.0) as session:
            sender = Sender(session, target)
            task = asyncio.create_task(sender.run(planned))
            if stop is not None:
                while not (sender.asked and stop(sender.asked[0].reply)):
                    await asyncio.sleep(0.005)
                task.cancel()
            await task
            return sender

    return run_on_uvloop(run())


def figures(sender: Sender) -> LoadFigures:
    return load_figures(sender, 20.0, 1, [Slo(60, 15)])


@pytest.mark.timing
def test_percentiles_are_those_of_the_server_itself() -> None:
    """The server notes by the same clock when it sends each token. It shares the client's loop: what waits, waits in
    both."""
    server = TimetableServer(waits_s=[0.05, 0.01, 0.03, 0.01, 0.06, 0.01, 0.02])

    async def run() -> Sender:
        runner = await server.start()
        target = Target(server.url, "toy")
        async with open_session(target) as session:
            sender = Sender(session, target)
            await sender.run([Planned(0.015 * index, [7], 7) for index in range(40)])
        await runner.cleanup()
        return sender

    sender = run_on_uvloop(run())
    found = figures(sender)
    answers = list(server.sent_s.values())
    ttft = percentiles(server.sent_s[each.reply.rid][0] - each.reply.sent_s for each in sender.asked)
    gaps = [[b - a for a, b in pairwise(times)] for times in answers]
    itl, gap = percentiles(each for one in gaps for each in one), percentiles(max(one) for one in gaps)
    tpot = percentiles((times[-1] - times[0]) / 6 for times in answers)
    for name, theirs in {"ttft": ttft, "itl": itl, "gap": gap, "tpot": tpot}.items():
        ours = getattr(found, name)
        for column in ("p50", "p90", "p95"):  # a busy machine may stop between both looks at the clock
            assert getattr(ours, column) == pytest.approx(getattr(theirs, column), abs=NEAR_S * 1e3), (name, column)


def test_requests_are_sent_at_their_times_whatever_became_of_others(server: TimetableServer) -> None:
    server.waits_s = [600.0]
    planned = [Planned(at_s, [7], 1) for at_s in (0.0, 0.05, 0.1)]
    sender = sent(server, planned, stop=lambda _: len(server.came_s) == 3)
    assert [each.at_s for each in sender.asked] == pytest.approx([0.0, 0.05, 0.1])
    assert all(each.late_s >= 0 for each in sender.asked) and figures(sender).unfinished == 3


@pytest.mark.parametrize("kind", ["ids", "text", "chat"])
def test_each_turn_holds_the_whole_history(server: TimetableServer, kind: str) -> None:
    first, later = ([5, 6], ([7], [8, 9])) if kind == "ids" else (["a", "b"], (["c"], ["d", "e"]))
    sender = sent(server, [Planned(0.0, first, 2, later)], is_chat=kind == "chat")  # type: ignore[arg-type]
    prompts = [body["messages" if kind == "chat" else "prompt"] for body in server.bodies]
    if kind == "ids":
        assert prompts == [[5, 6], [5, 6, 0, 1, 7], [5, 6, 0, 1, 7, 0, 1, 8, 9]]
    elif kind == "text":
        assert prompts == ["a b", "a bt0 t1  c", "a bt0 t1  ct0 t1  d e"]
    else:
        assert [len(each) for each in prompts] == [1, 3, 5]
        assert [each["content"] for each in prompts[2]] == ["a b", "t0 t1 ", "c", "t0 t1 ", "d e"]
    assert [each.turn for each in sender.asked] == [1, 2, 3]
    assert [each.requests for each in figures(sender).turns] == [1, 1, 1]


def test_a_conversation_ends_with_a_failure_and_others_go_on(server: TimetableServer) -> None:
    server.faults = [503]
    found = figures(sent(server, [Planned(0.0, [1], 2, ([2],)), Planned(0.2, [1], 2, ([2],))]))
    assert (found.sent, found.answered, found.failed, found.unfinished) == (3, 2, 1, 0)
    ((failure),) = found.failures
    assert (failure.kind, failure.count, failure.message) == ("HTTP 503", 1, "the queue is full")


def test_what_came_before_it_was_stopped_is_kept(server: TimetableServer) -> None:
    server.waits_s = [0.0, 0.0]
    planned = [Planned(0.0, [1], 2), Planned(600.0, [1], 2)]
    found = figures(sent(server, planned, stop=lambda reply: reply.end_s))
    assert (found.sent, found.answered, found.unfinished, found.is_complete) == (1, 1, 0, False)
    server.waits_s = [0.0, 600.0]
    found = figures(sent(server, planned[:1], stop=lambda reply: len(reply.times)))
    assert (found.sent, found.answered, found.unfinished, found.is_complete) == (1, 0, 1, False)
    assert found.requests[0].error == "unfinished" and found.requests[0].ttft_ms is not None
