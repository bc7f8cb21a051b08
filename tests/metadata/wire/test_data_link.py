"""Messages that open a data link: their bounds, and what older peers get of them."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest

from baton.metadata.wire.data_link import CudaWelcome, LinkHello, LinkWelcome
from baton.metadata.wire.frames import encode, unseal
from baton.metadata.wire.messages import to_decode_decoder, to_prefill_decoder

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


def test_a_peer_of_protocol_5_gets_no_inbox_and_no_cuda_welcome(sample: Any) -> None:
    plain = msgpack.unpackb(unseal(encode(sample(LinkHello, inbox=INBOX, protocol=5), 5)))
    assert plain["type"] == "link_hello" and not {"inbox", "protocol"} & set(plain)
    with pytest.raises(AssertionError, match="CudaWelcome"):
        encode(sample(CudaWelcome), 5)
