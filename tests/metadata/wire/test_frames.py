"""A frame is a message with a checksum, and a bad frame raises only ProtocolError."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from baton.metadata.bus.hub import Hub
from baton.metadata.bus.link import Link
from baton.metadata.bus.sockets import DRAIN_LIMIT
from baton.metadata.errors import ProtocolError
from baton.metadata.wire.data_link import Claim, to_prefill_decoder
from baton.metadata.wire.frames import HelloRefused, decode_frame, decode_to_router, encode, seal, unseal
from baton.metadata.wire.membership import Hello, Refusal
from baton.metadata.wire.messages import Cancelled, ToNode, ToRouter, to_router_decoder
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
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


RANGES = f"versions {PROTOCOL_MAX + 1}..{PROTOCOL_MAX + 3} of the node, {PROTOCOL_MIN}..{PROTOCOL_MAX} of the router"
NEWER = {"protocol_min": PROTOCOL_MIN, "protocol_max": PROTOCOL_MAX + 3}
APART = {"protocol_min": PROTOCOL_MAX + 1, "protocol_max": PROTOCOL_MAX + 3}


def plain(hello: Hello) -> dict[str, Any]:
    return {"type": "hello"} | msgspec.to_builtins(hello, builtin_types=(bytes,))


def framed(value: Any) -> bytes:
    return seal(msgspec.msgpack.encode(value))


def grown(value: Any) -> Any:
    """Add fields of a future protocol on every level."""
    if isinstance(value, dict):
        return {key: grown(item) for key, item in value.items()} | {"from_the_future": {"a": [1, None]}}
    if isinstance(value, list | tuple):
        return [grown(item) for item in value]
    return value


def lists_only(hello: dict[str, Any]) -> dict[str, Any]:
    """Return the grown Hello, but with the original tables of names."""
    more = grown(hello)
    for name in ("special_tokens", "defaults"):
        more["model"][name] = hello["model"][name]
    return more


@pytest.mark.parametrize("seed", range(20))
def test_a_newer_node_with_a_common_protocol_is_read(sample: Any, seed: int) -> None:
    hello = sample(Hello, seed, **NEWER)
    assert decode_to_router(framed(lists_only(plain(hello)))) == hello


def unreadable(hello: dict[str, Any]) -> dict[str, Any]:
    return hello | {"role": "router", "layout": 7, "capacity": None}


@pytest.mark.parametrize("change", [lists_only, unreadable])
def test_a_newer_node_without_a_common_protocol_is_refused_with_both_ranges(
    sample: Any, change: Callable[..., Any]
) -> None:
    hello = sample(Hello, node_id="p7", epoch="e", **APART)
    with pytest.raises(HelloRefused, match=RANGES) as got:
        decode_to_router(framed(change(plain(hello))))
    assert got.value.peer == b"p7:e"


def test_unknown_values_are_refused_by_name(sample: Any) -> None:
    hello = plain(sample(Hello, **NEWER))
    hello["layout"]["target"]["dtype"] = "float4"
    with pytest.raises(HelloRefused, match=r"cannot be read .*float4.*layout.target.dtype"):
        decode_to_router(framed(hello))


def test_bounds_hold_for_newer_nodes_too(sample: Any) -> None:
    hello = plain(sample(Hello, **NEWER)) | {"data_address": "x" * 257}
    with pytest.raises(HelloRefused, match=r"length <= 256"):
        decode_to_router(framed(hello))


def test_unknown_fields_of_a_node_that_is_not_newer_are_an_error(sample: Any) -> None:
    hello = plain(sample(Hello, protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX))
    with pytest.raises(ProtocolError, match="unknown field") as got:
        decode_to_router(framed(grown(hello)))
    assert not isinstance(got.value, HelloRefused)


@pytest.mark.parametrize(
    "frame",
    [
        framed({"type": "cancelled", "rid": "r", "attempt": 0, "from_the_future": 1}),
        framed({"type": "hello"} | APART),  # names no node
        framed({"type": "hello", "node_id": "n", "epoch": "e" * 65} | APART),
        framed({"type": "hello", "node_id": "n", "epoch": "e", "protocol_min": -1, "protocol_max": 99}),
        framed([1]),
        encode(Cancelled(rid="r", attempt=0))[:-1],
        b"",
    ],
)
def test_only_a_newer_hello_is_read_leniently(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as got:
        decode_to_router(frame)
    assert not isinstance(got.value, HelloRefused)


async def test_a_refusal_goes_only_to_the_connection_of_its_node(sample: Any) -> None:
    got: list[ToRouter] = []
    hub = Hub("tcp://127.0.0.1:*", "e0", None, lambda _, message: got.append(message), lambda _: None)
    hub.start()
    links = {name: Link(hub.address, name, "e", None) for name in ("p7", "liar")}
    try:
        hello = framed(lists_only(plain(sample(Hello, node_id="p7", epoch="e", **APART))))
        for link in links.values():
            link.socket.send(hello)
        heard: dict[str, list[ToNode]] = {name: [] for name in links}
        async with asyncio.timeout(10):
            while not heard["p7"] or hub.dropped_frames < 2:
                await asyncio.sleep(0.01)
                for name, link in links.items():
                    heard[name] += link.receive(DRAIN_LIMIT)
        assert heard == {"p7": [Refusal(router_epoch="e0", reason=f"protocol {RANGES}")], "liar": []}
        assert not got
    finally:
        for link in links.values():
            link.close()
        hub.close()


@pytest.mark.parametrize("name", ["é" * 128, "🎈" * 128])
def test_a_name_too_long_for_a_routing_id_does_not_stop_the_router(sample: Any, name: str) -> None:
    """The name once raised another error than a malformed frame, which ended the router's reading."""
    hello = lists_only(plain(sample(Hello, **APART))) | {"node_id": name, "epoch": "e" * 64}
    with pytest.raises(HelloRefused) as refused:
        decode_to_router(framed(hello))
    assert refused.value.peer == f"{name}:{'e' * 64}".encode()
