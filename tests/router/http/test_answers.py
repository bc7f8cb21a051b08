"""Answers that are sent whole. test_sse.py and test_completions.py test streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.metadata.errors import Unavailable
from baton.router.http.answers import WholeAnswer
from baton.router.request import Delta


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
