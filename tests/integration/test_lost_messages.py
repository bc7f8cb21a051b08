"""Every kind of message between real nodes and a real router is lost once, or comes twice, on a connection that stands.

Streams go on with the same tokens, and everything they held becomes free."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from faulty_process import FaultyProcess
from served import Served, Stream
from thinned import thinned

from baton.metadata.handoff.client import ANSWER_S, HandoffClient

LOST_S = ANSWER_S + 5.0  # the longest that one lost message may delay a stream
ORPHAN_S = 2.0  # promise P4: the longest that anything is held for a cancelled request
BODY: dict[str, Any] = {"prompt": list(range(5, 45)), "max_tokens": 30, "ignore_eos": True, "temperature": 0, "n": 2}
COMING = ("reserve", "prefill", "link_welcome", "offer", "pages", "router_beat")
GOING = ("reserved", "prefill_done", "link_hello", "claim", "pull", "renew", "ack", "tokens", "admitted", "beat")
MESSAGES = [*(("in", tag) for tag in COMING), *(("out", tag) for tag in GOING)]
OF_LOCAL = [("in", "compute"), ("out", "reserved"), ("out", "tokens"), ("out", "prefill_done")]
OF_CANCELS = [("in", "cancel"), ("in", "revoke"), ("out", "cancelled"), ("out", "drop"), ("out", "revoke_ack")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    with Served(model, num_pages=200, transport="zmq", lease_s=1.0) as served:
        yield served.up(2, 2)


@pytest.fixture(scope="module")
def right(served: Served) -> Stream:
    stream = served.ask(**BODY)
    served.finish(stream)
    return stream


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: Served) -> Iterator[FaultyProcess]:
    """Faults on the side of the nodes. Their data links are opened again first, so that they have the faults too."""
    for node in served.nodes.values():
        if isinstance(node.handoff, HandoffClient):
            for epoch in list(node.handoff._links.by_epoch):
                node.handoff.close_peer(epoch)
    process = FaultyProcess(monkeypatch, tmp_path)
    yield process
    process.plan()


def spoil(process: FaultyProcess, kind: str, way: str, tag: str) -> None:
    process.plan(frames={kind: 1.0}, tags=(tag,), most=1, weights={"in": 0.0, "out": 0.0, way: 1.0})


@pytest.mark.parametrize(  # all are lost; every third is doubled
    ("way", "tag", "kind"),
    thinned(
        [(*message, kind) for message in MESSAGES for kind in ("drop", "duplicate")],
        lambda i, way, tag, kind: kind == "drop" or i % 6 == 1,
    ),
)
def test_a_message_lost_or_doubled_changes_no_token(
    process: FaultyProcess, served: Served, right: Stream, way: str, tag: str, kind: str
) -> None:
    spoil(process, kind, way, tag)
    stream = served.ask(**BODY)
    served.finish(stream, timeout_s=LOST_S)
    assert (stream.ids, stream.finish, stream.errors) == (right.ids, right.finish, [])
    if tag not in ("renew", "router_beat", "beat"):  # the stream may end before these are sent
        assert process.noted() == [(kind, f"{way}:{tag}", 0)]
    served.check_books()


@pytest.mark.timing
@pytest.mark.parametrize(("way", "tag"), OF_CANCELS)
def test_a_lost_message_of_a_cancel_leaves_nothing_behind(
    process: FaultyProcess, served: Served, way: str, tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(process, "drop", way, tag)
    stream = served.ask(**BODY)
    served.run(lambda: any(node.tickets() for node in served.nodes.values()))
    stream.leave()
    served.run(lambda: not served.call(lambda: served.dispatcher.requests))
    served.run(lambda: not served.held_by_nodes(), ORPHAN_S)
    served.check_books()
    assert "dropped a frame" not in caplog.text
    served.run(lambda: not served.call(lambda: served.dispatcher.cancels.num_unacked))


def test_prompt_logprobs_arrive_though_their_message_was_lost(process: FaultyProcess, served: Served) -> None:
    spoil(process, "drop", "out", "prefill_done")
    stream = served.ask(**BODY | {"n": 1, "echo": True, "logprobs": 1})
    served.finish(stream, timeout_s=LOST_S)
    assert not stream.errors and len(stream.logprobs[0]) == 40 + 30
    assert process.noted() == [("drop", "out:prefill_done", 0)]
    served.check_books()


def test_a_message_about_a_local_prompt_lost_or_doubled_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = FaultyProcess(monkeypatch, tmp_path)
    with Served(make_checkpoint(tmp_path / "tiny"), router={"local_prefill": "always"}) as served:
        served.up(0, 1)
        body = BODY | {"echo": True, "logprobs": 1}
        right = served.ask(**body)
        served.finish(right)
        assert len(right.logprobs[0]) == len(right.logprobs[1]) == 40 + 30
        for kind, (way, tag) in itertools.product(("drop", "duplicate"), OF_LOCAL):
            spoil(process, kind, way, tag)
            stream = served.ask(**body)
            served.finish(stream, timeout_s=LOST_S)
            assert (stream.ids, stream.finish, stream.errors) == (right.ids, right.finish, []), (kind, tag)
            for choice, logprobs in right.logprobs.items():
                assert stream.logprobs[choice] == pytest.approx(logprobs, abs=1e-3), (kind, tag)
            assert process.noted() == [(kind, f"{way}:{tag}", 0)]
            served.check_books()


def test_a_damaged_tokenizer_is_asked_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("baton.router.nodes.registry.TOKENIZER_S", 0.3)
    process = FaultyProcess(monkeypatch, tmp_path)
    process.plan(frames={"flip": 1.0}, tags=("tokenizer",), most=2)
    with Served(make_checkpoint(tmp_path / "tiny")) as served:
        served.up(1, 1)
    assert process.noted() == [("flip", "out:tokenizer", 0)] * 2
