"""Messages that open a data link: their bounds, and what older peers get of them."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from baton.metadata.wire.data_link import (
    CudaWelcome,
    LinkHello,
    LinkWelcome,
    RankHello,
    RanksWelcome,
    RankWelcome,
    to_decode_decoder,
    to_prefill_decoder,
)
from baton.metadata.wire.frames import encode, unseal

INBOX = "baton-" + "0f" * 16


def test_a_lease_has_bounds(sample: Any) -> None:
    for lease_s in (0.05, 1e4):
        welcome = sample(LinkWelcome, lease_s=lease_s)
        assert to_decode_decoder.decode(msgspec.msgpack.encode(welcome)) == welcome
    for lease_s in (-1.0, 0.0, 0.049, 1e10, float("inf"), float("nan")):
        with pytest.raises(msgspec.ValidationError):
            to_decode_decoder.decode(msgspec.msgpack.encode(sample(LinkWelcome, lease_s=lease_s)))


@pytest.mark.parametrize("inbox", ["", INBOX])
def test_an_inbox_has_a_name_that_baton_makes(inbox: str, sample: Any) -> None:
    hello = sample(LinkHello, inbox=inbox)
    assert to_prefill_decoder.decode(msgspec.msgpack.encode(hello)) == hello


@pytest.mark.parametrize("inbox", ["baton-x", "tmp", INBOX + "0", INBOX.upper(), "../" + INBOX])
def test_another_name_of_an_inbox_is_refused(inbox: str, sample: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="inbox"):
        to_prefill_decoder.decode(msgspec.msgpack.encode(sample(LinkHello, inbox=inbox)))


def test_a_hello_names_at_least_one_transport(sample: Any) -> None:
    with pytest.raises(msgspec.ValidationError, match="transports"):
        to_prefill_decoder.decode(msgspec.msgpack.encode(sample(LinkHello, transports=())))


def test_a_rank_is_one_of_its_node(sample: Any) -> None:
    for changes in ({"rank": 2, "size": 3}, {"source_rank": 0, "source_size": 1}):
        hello = msgspec.structs.replace(sample(RankHello), **changes)
        assert to_prefill_decoder.decode(msgspec.msgpack.encode(hello)) == hello
    plain = msgpack.unpackb(msgspec.msgpack.encode(sample(RankHello)))
    for changes in ({"rank": 2, "size": 2}, {"source_rank": 1, "source_size": 1}, {"rank": -1}, {"size": 0}):
        with pytest.raises(msgspec.ValidationError):
            to_prefill_decoder.decode(msgpack.packb(plain | changes))


@pytest.mark.parametrize("kind", [RankHello, RankWelcome, RanksWelcome])
def test_a_peer_of_protocol_5_gets_no_message_about_ranks(kind: Any, sample: Any) -> None:
    with pytest.raises(AssertionError, match=kind.__name__):
        encode(sample(kind), 5)


def test_a_peer_of_protocol_5_gets_no_inbox_and_no_cuda_welcome(sample: Any) -> None:
    plain = msgpack.unpackb(unseal(encode(sample(LinkHello, inbox=INBOX, protocol=5), 5)))
    assert plain["type"] == "link_hello" and not {"inbox", "protocol"} & set(plain)
    with pytest.raises(AssertionError, match="CudaWelcome"):
        encode(sample(CudaWelcome), 5)
