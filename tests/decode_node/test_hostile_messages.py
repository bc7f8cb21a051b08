"""Messages from a router that come twice or ask for the impossible: the nodes go on, and their books balance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from node_pair import ROUTER_EPOCH, NodePair, Result, params

from baton.metadata.wire.frames import encode, seal
from baton.metadata.wire.messages import Compute, Dispatch, Prefill, Reserve
from baton.metadata.wire.node_info import Peer
from baton.metadata.wire.request import GenerationRequest, SamplingParams, pack_ids


@pytest.fixture
def pair(checkpoint: Callable[..., Path]) -> Iterator[NodePair]:
    pair = NodePair(checkpoint("llama"), prefill={"page_size": 4}, decode={"page_size": 4})
    with closing(pair):
        yield pair
        pair.submit("last", [1, 2, 3], params(2))
        assert pair.run()["last", 0].ended is not None, "the nodes have stopped serving"
        pair.check_books()


def test_dispatches_that_come_twice_run_once(pair: NodePair) -> None:
    send = pair.send

    def send_twice(node: str, message: Any) -> None:
        for _ in range(1 + isinstance(message, Dispatch)):
            send(node, message)

    pair.submit("once", [1, 2, 3, 4, 5], params(6), n=2)
    expected = [pair.run()["once", choice].ids for choice in (0, 1)]
    pair.send = send_twice
    pair.submit("twice", [1, 2, 3, 4, 5], params(6), n=2)
    assert [pair.run()["twice", choice].ids for choice in (0, 1)] == expected
    pair.submit("alone", [1, 2, 3, 4, 5], params(6), n=2, is_local=True)
    assert [pair.run()["alone", choice].ids for choice in (0, 1)] == expected


HOSTILE = {  # prompt ids, received ids
    "no tokens": ([], []),
    "no prompt": ([], [1]),
    "negative": ([-1, 2], []),
    "beyond the vocabulary": ([1, 1 << 30], []),
    "negative received": ([1], [-7]),
    "beyond, received": ([1], [1 << 30]),
    "beyond the context": ([1] * (1 << 17), []),
}


@pytest.mark.parametrize("kind", [Prefill, Reserve, Compute])
def test_prompts_that_no_model_can_run_fail_without_harm(
    pair: NodePair, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = "prefill" if kind is Prefill else "decode"
    answers: list[Any] = []
    monkeypatch.setattr(pair, "_granted", answers.append)
    peer = Peer(node_id="other", epoch="e", data_address="tcp://127.0.0.1:1")
    for rid, (prompt, received) in HOSTILE.items():
        pair.results[rid, 0] = Result()
        request = GenerationRequest(pack_ids(prompt), SamplingParams(max_tokens=4), pack_ids(received))
        pair.send(node, kind(ROUTER_EPOCH, rid, 0, (0,), request, *([] if kind is Compute else [peer])))
    num_answers = len(HOSTILE) if node == "decode" else 0
    pair.step_until(lambda: all(pair.results[rid, 0].failed for rid in HOSTILE) and len(answers) == num_answers)
    failed = [pair.results[rid, 0].failed for rid in HOSTILE]
    assert {(each.code, each.retryable) for each in failed if each} == {("invalid_request_error", False)}
    for rid in HOSTILE:
        del pair.results[rid, 0]
    monkeypatch.undo()


def test_malformed_frames_are_counted(pair: NodePair) -> None:
    whole = encode(Prefill(ROUTER_EPOCH, "r", 0, (0,), GenerationRequest(bytes(4), SamplingParams(max_tokens=1)), None))
    for frames in ([b""], [seal(b"\xc1")], [seal(b"\x91" * 5000)], [whole[:-1]], [whole, whole], [b"x"] * 500):
        for name in ("prefill", "decode"):
            pair._socket.send_multipart([pair._ids[name], *frames])
    pair.step_until(lambda: all(node.stats().dropped_frames == 6 for node in (pair.prefill, pair.decode)))
