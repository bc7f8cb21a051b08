"""First tokens: one message for all choices of a prompt, which can be sent again."""

from __future__ import annotations

from baton.metadata.wire.request import Ended, TokenLogprobs, Unit, unpack_ids
from baton.prefill_node import outbox
from baton.prefill_node.outbox import FirstToken, Outbox

from .conftest import MakeRequest

ENDED = Ended(reason="stop", stop_id=9, num_prompt=5, num_generated=3, num_cached=4)


def test_one_message_has_all_choices(make_request: MakeRequest) -> None:
    request = make_request("r", 7, n=2, received=2)
    one, two = request.choices
    logprobs = TokenLogprobs(-0.5, (8,), (-0.5,))
    choices = [FirstToken(one, 8, logprobs, None), FirstToken(two, 9, None, ENDED)]
    tokens = Outbox().first_tokens(request, choices)
    assert tokens.units == (one, two)
    assert (unpack_ids(tokens.firsts), unpack_ids(tokens.counts), unpack_ids(tokens.ids)) == ([2, 2], [1, 1], [8, 9])
    assert (tokens.logprobs, tokens.ended) == ({0: (logprobs,)}, {1: ENDED})


def test_a_message_is_sent_again_while_the_router_lacks_its_token(make_request: MakeRequest) -> None:
    box, request = Outbox(), make_request("r", 7, received=2)
    (unit,) = request.choices
    tokens = box.first_tokens(request, [FirstToken(unit, 8, None, None)])
    assert box.again(unit, 0) is box.again(unit, 2) is tokens
    assert box.again(unit, 3) is None, "a later token is the decode node's"
    assert box.again(Unit("other", 0, 0), 0) is None


def test_the_oldest_messages_are_forgotten(make_request: MakeRequest) -> None:
    box, request = Outbox(), make_request("r", 4)
    units = [Unit("r", choice, 0) for choice in range(outbox._KEPT + 1)]
    for unit in units:
        box.first_tokens(request, [FirstToken(unit, 8, None, None)])
    assert box.again(units[0], 0) is None
    assert box.again(units[1], 0) is not None
