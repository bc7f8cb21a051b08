"""A request is cancelled in each phase of its life.

No later step computes for it, everything it held becomes free, and none of its messages is dropped as malformed. The
nodes are real, in one process, stepped by the test. Leases are long, so nothing becomes free by the end of a lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checkpoints import make_checkpoint
from cluster import wait_until
from served import Served, Stream
from served_nodes import decode_of, num_generated, prefill_of

from baton.decode_node.node import DecodeNode
from baton.metadata.handoff.transfer import Arrived
from baton.metadata.wire.messages import Cancel
from baton.prefill_node.node import PrefillNode

PAGES = 30  # of 4 tokens, on each node
PROMPT = list(range(5, 45))  # seven chunks
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "n": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(make_checkpoint(tmp_path_factory.mktemp("model") / "tiny"), num_pages=PAGES) as served:
        yield served.up(1, 1)


def queued(served: Served) -> Stream:
    served.held.update(served.nodes)
    stream = served.ask(**BODY)
    wait_until(lambda: served.dispatcher.queues.num_waiting, "the request waits")
    return stream


def prefilling(served: Served) -> Stream:
    stream = served.ask(**BODY)
    served.run(lambda: any(each.num_computed for each in prefill_of(served).scheduler.computing))
    return stream


def offered(served: Served) -> Stream:
    """The decode node claims the pages and then pulls none."""
    stream = served.ask(**BODY)
    decode = decode_of(served)
    served.run(lambda: decode.scheduler.reserved)
    served.held.update(name for name in served.nodes if name.startswith("decode"))
    served.run(lambda: prefill_of(served).scheduler.handing_over)
    return stream


def pulling(served: Served) -> Stream:
    stream = served.ask(**BODY)
    inbound = decode_of(served).handoff._transfers
    served.run(lambda: any(each._offered and not each.is_whole for each in inbound.values()))
    return stream


def pulled(served: Served) -> Stream:
    """The decode node has pulled, checked and acknowledged the pages, and has not admitted the sequence."""
    handoff = decode_of(served).handoff
    poll, late = handoff.poll, []

    def hold_back() -> list[Any]:
        events = poll()
        late.extend(event for event in events if isinstance(event, Arrived))
        return [event for event in events if not isinstance(event, Arrived)]

    handoff.poll = hold_back  # type: ignore[method-assign]
    stream = served.ask(**BODY)
    served.run(lambda: len(late) == 2)
    handoff.poll = lambda: [late.pop() for _ in range(len(late))] + poll()  # type: ignore[method-assign]
    return stream


def decoding(served: Served) -> Stream:
    stream = served.ask(**BODY)
    served.run(lambda: num_generated(served) >= 6)
    return stream


def preempted(served: Served) -> Stream:
    """Two sequences do not fit into the pool to their ends, so the younger one is preempted."""
    stream = served.ask(**BODY)
    served.run(lambda: decode_of(served).scheduler.preempted)
    return stream


def moving(served: Served) -> Stream:
    """The decode node has died, and the next one has not answered the reservation."""
    stream = served.ask(**BODY)
    served.run(lambda: num_generated(served) >= 6)
    (name,) = (name for name in served.nodes if name.startswith("decode"))
    served.kill(name)
    fresh = served.start("decode", f"decode-{len(name)}")
    reserve, asked = fresh._reserve, set[str]()

    def answer_others(message: Any) -> None:
        if not message.rid.startswith("canary"):
            asked.add(next(iter(asked), message.rid))
        if message.rid not in asked:
            reserve(message)

    fresh._reserve = answer_others
    served.run(lambda: asked, 20)
    assert not fresh.units() or stream.errors == []
    return stream


PHASES = (queued, prefilling, offered, pulling, pulled, decoding, preempted, moving)


@pytest.mark.parametrize("how", ["the client leaves", "an operator cancels it", "its deadline passes"])
@pytest.mark.parametrize("phase", PHASES)
def test_after_a_cancel_nothing_is_computed_and_everything_becomes_free(
    served: Served,
    phase: Callable[[Served], Stream],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = phase(served)
    requests = [each for each in served.dispatcher.requests.values() if not each.is_canary]
    assert len(requests) == 1, "the request was over before it could be cancelled"
    [request] = requests
    rid = request.rid
    heard = [watch(node, rid, monkeypatch) for node in served.nodes.values()]
    if how == "the client leaves":
        stream.leave()
    elif how == "an operator cancels it":
        served.call(lambda: served.dispatcher.abort(request, "by the test"))
    else:
        request.deadline = time.monotonic()
    wait_until(lambda: request.is_over, "the router has ended the request")
    served.held.clear()
    served.run(lambda: not served.call(lambda: served.dispatcher.cancels.num_unacked))
    served.check_books()
    assert "dropped a frame" not in caplog.text
    assert not any(node.stats().dropped_frames for node in served.nodes.values())
    assert any(heard) or phase is queued, "no node received a Cancel"
    stream.join()
    expected = {"an operator cancels it": ["cancelled"], "its deadline passes": ["timeout"]}.get(how, [])
    assert [error["code"] for error in stream.errors] == expected


def watch(node: PrefillNode | DecodeNode, rid: str, monkeypatch: pytest.MonkeyPatch) -> list[Cancel]:
    """Record the Cancel messages that the node receives, and check that no later step computes for the request."""
    heard: list[Cancel] = []
    handle = node._handle

    def check(message: Any) -> None:
        handle(message)
        if isinstance(message, Cancel) and message.rid == rid:
            heard.append(message)
            assert (rid, message.attempt) not in attempts_to_compute(node)

    monkeypatch.setattr(node, "_handle", check)
    return heard


def attempts_to_compute(node: PrefillNode | DecodeNode) -> list[tuple[str, int]]:
    """Return the requests and sequences for which the next step may compute, as (rid, attempt)."""
    if isinstance(node, PrefillNode):
        return [(each.rid, each.attempt) for each in (*node.scheduler.waiting, *node.scheduler.computing)]
    return [(sequence.unit.rid, sequence.unit.attempt) for sequence in node.scheduler]
