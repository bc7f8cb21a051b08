"""A request that is cancelled, in any phase: no step after the one that hears of it computes for it, all is free, and
no message of it is taken for a malformed one.

The nodes are real, in one process, stepped by the test. Leases are long: nothing here comes free by their end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from served import Served, Stream

from baton.decode_node.node import DecodeNode
from baton.metadata.handoff.client import Arrived
from baton.metadata.wire.messages import Cancel
from baton.prefill_node.node import PrefillNode

PAGES = 30  # of 4 tokens, on every decode node
LONG = list(range(5, 45))  # a prompt of 40 tokens: 7 chunks
BODY: dict[str, Any] = {"prompt": LONG, "max_tokens": 60, "ignore_eos": True, "temperature": 0, "n": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from checkpoints import make_checkpoint

    with Served(make_checkpoint(tmp_path_factory.mktemp("model") / "tiny"), num_pages=PAGES) as served:
        yield served.up(1, 1)


def prefill_of(served: Served) -> PrefillNode:
    (node,) = (node for node in served.nodes.values() if isinstance(node, PrefillNode))
    return node


def decode_of(served: Served) -> DecodeNode:
    (node,) = (node for node in served.nodes.values() if isinstance(node, DecodeNode))
    return node


def queued(served: Served) -> Stream:
    served.held.update(served.nodes)
    stream = served.ask(**BODY)
    wait(lambda: served.dispatcher.admission.num_waiting)
    return stream


def prefilling(served: Served) -> Stream:
    stream = served.ask(**BODY)
    served.run(lambda: any(job.num_computed for job in prefill_of(served).scheduler.computing))
    return stream


def offered(served: Served) -> Stream:
    """Decode claims and then pulls nothing."""
    stream = served.ask(**BODY)
    decode = decode_of(served)
    served.run(lambda: decode.scheduler.reserved)
    served.held.update(name for name in served.nodes if name.startswith("decode"))
    served.run(lambda: prefill_of(served).scheduler.handing)
    return stream


def pulling(served: Served) -> Stream:
    stream = served.ask(**BODY)
    inbound = decode_of(served).handoff._transfers
    served.run(lambda: any(each._offered and not each.is_whole for each in inbound.values()))
    return stream


def pulled(served: Served) -> Stream:
    """The pages are here, checked and acknowledged; the node has not come to admit the unit."""
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
    served.run(lambda: stream.num_tokens >= 6)
    return stream


def preempted(served: Served) -> Stream:
    """Two sequences of 40 and up to 60 tokens do not fit: the younger one has to go."""
    stream = served.ask(**BODY)
    served.run(lambda: decode_of(served).scheduler.preempted)
    return stream


def moving(served: Served) -> Stream:
    """Its node is dead, and the next one has not answered yet."""
    stream = served.ask(**BODY)
    served.run(lambda: stream.num_tokens >= 6)
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


@pytest.mark.parametrize("how", ["the client leaves", "somebody cancels it", "its time is over"])
@pytest.mark.parametrize("phase", PHASES)
def test_nothing_is_computed_and_all_is_free(
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
    elif how == "somebody cancels it":
        served.call(lambda: served.dispatcher.abort(request, "by the test"))
    else:
        request.deadline = time.monotonic()
    wait(lambda: request.is_over)
    served.held.clear()
    served.run(lambda: not any(node.unacked for node in served.dispatcher.registry.nodes.values()))
    served.check_books()
    assert "dropped a frame" not in caplog.text
    assert not any(node.stats().dropped_frames for node in served.nodes.values())
    assert any(heard) or phase is queued, "no node was told"
    stream.join()
    expected = {"somebody cancels it": ["cancelled"], "its time is over": ["timeout"]}.get(how, [])
    assert [error["code"] for error in stream.errors] == expected


def watch(node: PrefillNode | DecodeNode, rid: str, monkeypatch: pytest.MonkeyPatch) -> list[Cancel]:
    """Each Cancel that the node hears: when it has heard one, its next step can compute nothing of the request."""
    heard: list[Cancel] = []
    handle = node._handle

    def check(message: Any) -> None:
        handle(message)
        if isinstance(message, Cancel) and message.rid == rid:
            heard.append(message)
            assert (rid, message.attempt) not in attempts_to_compute(node)

    monkeypatch.setattr(node, "_handle", check)
    return heard


def wait(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def attempts_to_compute(node: PrefillNode | DecodeNode) -> list[tuple[str, int]]:
    """Of jobs and sequences that a next step may compute for."""
    if isinstance(node, PrefillNode):
        return [(job.rid, job.attempt) for job in (*node.scheduler.waiting, *node.scheduler.computing)]
    return [(sequence.unit.rid, sequence.unit.attempt) for sequence in node.scheduler]
