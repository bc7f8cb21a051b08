"""A frame is a message with a checksum, and a bad frame raises only ProtocolError."""

from __future__ import annotations

import msgspec
import pytest

from baton.metadata.errors import ProtocolError
from baton.metadata.wire.frames import decode_frame, encode, seal, unseal
from baton.metadata.wire.messages import Cancelled, Claim, to_prefill_decoder, to_router_decoder
from baton.metadata.wire.request import GenerationRequest, SamplingParams, Unit

MESSAGE = Cancelled(rid="r", attempt=1)


def test_a_frame_is_read_back() -> None:
    assert decode_frame(to_router_decoder, encode(MESSAGE)) == MESSAGE


def test_a_sealed_body_is_read_back_and_a_changed_one_is_not() -> None:
    assert unseal(seal(b"body")) == b"body" and unseal(seal(b"")) == b""
    for position in range(len(seal(b"body"))):
        damaged = bytearray(seal(b"body"))
        damaged[position] ^= 1
        assert unseal(bytes(damaged)) is None
    assert unseal(b"short") is None


@pytest.mark.parametrize("frame", [b"", b"\x00" * 7, seal(b""), seal(b"\xff"), seal(b"\x81\xa4type\xa1?")])
def test_a_bad_frame_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_frame(to_router_decoder, frame)


@pytest.mark.parametrize("protocol", [None, 4])
def test_a_renamed_field_keeps_its_name_on_the_wire(protocol: int | None) -> None:
    message = Claim(unit=Unit("r", 0, 0), num_cached_pages=3)
    frame = encode(message, protocol)
    assert msgspec.msgpack.decode(unseal(frame) or b"")["have"] == 3
    assert decode_frame(to_prefill_decoder, frame) == message


def test_cache_salt_is_named_salt_on_the_wire() -> None:
    request = GenerationRequest(prompt_ids=b"", params=SamplingParams(max_tokens=1), cache_salt="tenant")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request))["salt"] == "tenant"
