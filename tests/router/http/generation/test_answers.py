"""Answers that are sent whole, and streams that nodes make wait. test_sse.py and test_completions.py test others."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import Unavailable
from baton.router.http.generation import answers
from baton.router.http.generation.answers import WholeAnswer, usage_of
from baton.router.http.server import sse
from baton.router.requests.delta import Delta

from ...conftest import System


class FakeFormat:
    def usage_of(self, requests: Any) -> Any:
        return None

    def whole(self, outputs: Any, usage: Any) -> bytes:
        return b" | ".join(delta.text.encode() for _, delta in outputs)


def request() -> Any:
    made = SimpleNamespace()
    made.sequences = [_Hashable(request=made) for _ in range(2)]
    return made


class _Hashable(SimpleNamespace):
    __hash__ = object.__hash__


async def test_deltas_are_joined_in_the_order_of_sequences() -> None:
    answer_format: Any = FakeFormat()
    answer = WholeAnswer(answer_format)
    requests = [request(), request()]
    submitted: list[Any] = []
    answer.start(requests, submitted.append)
    assert submitted == requests
    sequences = [sequence for each in requests for sequence in each.sequences]
    for text in "ab":
        for number, sequence in reversed(list(enumerate(sequences))):
            answer.on_delta(sequence, Delta(f"{text}{number}", [1], [], None, None))
    for each in requests:
        answer.on_done(each)
    response: Any = await answer.answer(requests, {"x-request-id": "mine"})
    assert response.body == b"a0b0 | a1b1 | a2b2 | a3b3"
    assert response.headers["x-request-id"] == "mine"


async def test_the_first_error_is_raised() -> None:
    answer_format: Any = FakeFormat()
    answer = WholeAnswer(answer_format)
    requests = [request(), request()]
    answer.start(requests, lambda _: None)
    answer.on_done(requests[0])
    for words in ("first", "second"):
        answer.on_error(requests[1], Unavailable(words))
    with pytest.raises(Unavailable, match="first"):
        await answer.answer(requests, {})


ROUTES: dict[str, tuple[dict[str, Any], bytes, bytes]] = {  # body, what breaks a silence, and what ends a failure
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hello"}]},
        sse.COMMENT,
        b'"type":"timeout_error"',
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
        b'event: ping\ndata: {"type":"ping"}\n\n',
        b"event: error\n",
    ),
    "/v1/responses": ({"input": "hello"}, sse.COMMENT, b"event: response.failed\n"),
}


@pytest.mark.timing
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_stream_that_waits_is_opened_and_never_silent(
    make_system: Callable[..., System], monkeypatch: pytest.MonkeyPatch, *, is_taken: bool
) -> None:
    """Nodes have taken the request, or have not for too long. Its failure is the last event, in each API's shape."""
    monkeypatch.setattr(answers, "LOOK_S", 0.05 if is_taken else 10)
    monkeypatch.setattr(answers, "LONGEST_WAIT_S", 10 if is_taken else 0.05)
    monkeypatch.setattr(sse, "SILENCE_S", 0.05)
    system = make_system(router={"request_timeout_s": 0.6}).up()
    system.behaviour.answer_prefill = lambda node, message: True
    system.behaviour.answer_compute = lambda node, message: True
    if not is_taken:
        system.behaviour.answer_reserve = lambda node, message: True
    for path, (body, keep_alive, failure) in ROUTES.items():
        data = json.dumps({"model": "fake", "stream": True, **body}).encode()
        asked = urllib.request.Request(system.router.url + path, data, {"Content-Type": "application/json"})
        began = time.monotonic()
        with urllib.request.urlopen(asked, timeout=10) as response:
            assert response.status == 200 and time.monotonic() - began < 0.5
            raw = response.read()
        assert raw.startswith(keep_alive) and raw.count(keep_alive) >= 3 and failure in raw, raw
        if path == "/v1/responses":
            assert raw.index(b"event: response.created\n") < raw.index(failure)
    system.router.wait_idle()


def test_a_failure_before_the_headers_has_its_status(make_system: Callable[..., System]) -> None:
    system = make_system(router={"request_timeout_s": 0.3}).up()
    system.behaviour.answer_prefill = lambda node, message: True
    system.behaviour.answer_compute = lambda node, message: True
    for path, (body, _, _) in ROUTES.items():
        assert system.router.request("POST", path, {"model": "fake", "stream": True, **body})[0] == 504
    system.router.wait_idle()


REQUEST: Any = SimpleNamespace(
    prompt_ids=[7, 8], num_generated=3, num_cached=None, num_rounds=2, num_accepted=1, num_drafted=4
)


def test_usage_counts_a_shared_prompt_once() -> None:
    usage = usage_of([REQUEST])
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 3, 5)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert usage.speculation is not None
    assert usage.speculation.accept_length == 1.5
