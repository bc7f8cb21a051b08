"""Every message survives the wire; nothing else is accepted; the bytes of older protocols stay readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import golden
import msgpack
import msgspec
import pytest

from baton.metadata.errors import ProtocolError, RequestError
from baton.metadata.wire import data_link
from baton.metadata.wire import messages as m
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN, Message, fields_since
from baton.metadata.wire.request import (
    MAX_BATCH,
    GenerationRequest,
    SamplingParams,
    Unit,
    choice_seed,
    pack_ids,
    unpack_ids,
)

DIRECTIONS = {
    "to_router": (m.ToRouter, m.to_router_decoder),
    "to_node": (m.ToNode, m.to_node_decoder),
    "to_prefill": (data_link.ToPrefill, data_link.to_prefill_decoder),
    "to_decode": (data_link.ToDecode, data_link.to_decode_decoder),
}
CASES = [
    pytest.param(kind, name, id=kind.__name__) for name, (union, _) in DIRECTIONS.items() for kind in get_args(union)
]


@pytest.mark.parametrize(("kind", "direction"), CASES)
def test_round_trip_and_wrong_directions(kind: type, direction: str, sample: Any) -> None:
    for seed in range(20):
        message = sample(kind, seed)
        frame = msgspec.msgpack.encode(message)
        assert DIRECTIONS[direction][1].decode(frame) == message
        for other, (_, decoder) in DIRECTIONS.items():
            if other != direction:
                with pytest.raises(msgspec.ValidationError):
                    decoder.decode(frame)


@pytest.mark.parametrize(("kind", "direction"), CASES)
def test_plain_msgpack_reads_and_writes_the_same(kind: type, direction: str, sample: Any) -> None:
    message = sample(kind, 1)
    plain = msgpack.unpackb(msgspec.msgpack.encode(message), strict_map_key=False)
    assert plain["type"] == message.__struct_config__.tag
    assert set(plain) == {"type", *message.__struct_encode_fields__}
    assert DIRECTIONS[direction][1].decode(msgpack.packb(plain)) == message


@pytest.mark.parametrize(("kind", "direction"), CASES)
def test_unknown_and_missing_fields_are_refused(kind: type, direction: str, sample: Any) -> None:
    decoder = DIRECTIONS[direction][1]
    plain = msgpack.unpackb(msgspec.msgpack.encode(sample(kind, 2)), strict_map_key=False)
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        decoder.decode(msgpack.packb({**plain, "from_the_future": 1}))
    fields = msgspec.structs.fields(kind)
    for field in fields:
        if field.required:
            less = {key: value for key, value in plain.items() if key != field.encode_name}
            with pytest.raises(msgspec.ValidationError, match="missing required field"):
                decoder.decode(msgpack.packb(less))


@pytest.mark.parametrize(("kind", "direction"), CASES)
def test_truncated_frames_are_refused(kind: type, direction: str, sample: Any) -> None:
    frame = msgspec.msgpack.encode(sample(kind, 3))
    for length in range(len(frame)):
        with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
            DIRECTIONS[direction][1].decode(frame[:length])


@pytest.mark.parametrize(("kind", "direction"), CASES)
def test_no_flipped_bit_and_no_missing_byte_passes(kind: type, direction: str, sample: Any) -> None:
    message, decoder = sample(kind, 4), DIRECTIONS[direction][1]
    frame = encode(message)
    assert decode_frame(decoder, frame) == message
    damaged = [frame[:length] for length in range(len(frame))]
    for place in range(len(frame)):
        flipped = bytearray(frame)
        flipped[place] ^= 1 << place % 8
        damaged.append(bytes(flipped))
    for bad in damaged:
        with pytest.raises(ProtocolError, match="do not fit their checksum"):
            decode_frame(decoder, bad)


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for union, _ in DIRECTIONS.values() for kind in get_args(union)]
    assert len(tags) == len(set(tags))


def test_bounds_are_enforced(sample: Any) -> None:
    unit = Unit("r", 0, 0)

    def refused(decoder: Any, message: Any) -> None:
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode(message))

    refused(m.to_router_decoder, m.Cancelled(rid="", attempt=0))
    refused(m.to_router_decoder, m.Cancelled(rid="r" * 129, attempt=0))
    refused(m.to_router_decoder, m.Cancelled(rid="r", attempt=-1))
    refused(m.to_router_decoder, m.Failed(Unit("r", 128, 0), "c", "m", True))
    refused(m.to_router_decoder, m.Failed(unit, "c", "m" * 4097, True))
    many = bytes(4 * (MAX_BATCH + 1))
    refused(m.to_router_decoder, m.Tokens((unit,) * (MAX_BATCH + 1), many, many, b""))
    refused(data_link.to_prefill_decoder, data_link.Renew((unit,) * (MAX_BATCH + 1)))
    request = GenerationRequest(b"", SamplingParams(max_tokens=1))
    refused(m.to_node_decoder, m.Prefill("e" * 65, "r", 0, (0,), request, None))
    refused(m.to_node_decoder, m.Prefill("e", "r", 0, (MAX_BATCH,), request, None))
    for params in (
        SamplingParams(max_tokens=0),
        SamplingParams(max_tokens=1, temperature=-1.0),
        SamplingParams(max_tokens=1, top_p=1.5),
        SamplingParams(max_tokens=1, num_logprobs=21),
        SamplingParams(max_tokens=1, draft_steps=-1),
        SamplingParams(max_tokens=1, draft_steps=16),
    ):
        refused(m.to_node_decoder, m.Prefill("e", "r", 0, (0,), GenerationRequest(b"", params), None))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (m.Prefill, {"choices": ()}),
        (m.Prefill, {"choices": (1, 0, 1)}),
        (m.Reserve, {"choices": (2, 2)}),
        (m.Prefill, {"request": {"prompt_ids": b"abc", "params": {"max_tokens": 1}}}),
        (m.Prefill, {"request": {"prompt_ids": b"", "params": {"max_tokens": 1}, "received_ids": b"12345"}}),
        (m.Tokens, {"firsts": b""}),
        (m.Tokens, {"counts": bytes(4000)}),
        (m.Tokens, {"ids": b"abc"}),
        (m.Tokens, {"firsts": b"abc", "counts": b"abc"}),
    ],
)
def test_columns_and_choices_that_do_not_go_together_are_refused(kind: type, changes: Any, sample: Any) -> None:
    """The decoder refuses them, because a node would fail on them later."""
    decoder = m.to_router_decoder if kind is m.Tokens else m.to_node_decoder
    plain = msgspec.to_builtins(sample(kind, 1), builtin_types=(bytes,))
    assert decoder.decode(msgspec.msgpack.encode(plain)) == sample(kind, 1)
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(plain | changes))


def test_a_prompt_must_be_one_that_the_model_can_run() -> None:
    def request(prompt: list[int], received: list[int]) -> GenerationRequest:
        return GenerationRequest(pack_ids(prompt), SamplingParams(max_tokens=1), pack_ids(received))

    assert request([0, 9], [5]).token_ids(10, 3) == ([0, 9], [5])
    for prompt, received in (([], []), ([], [1]), ([0, 1], [2, 3]), ([10], []), ([-1], []), ([1], [10]), ([1], [-5])):
        with pytest.raises(RequestError):
            request(prompt, received).token_ids(10, 3)


def test_ids_are_little_endian_int32() -> None:
    ids = [0, 1, 258, 2**31 - 1, -1]
    assert pack_ids(ids) == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
    assert unpack_ids(pack_ids(ids)) == ids
    assert unpack_ids(b"") == []
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"\0\0\0")


def test_each_choice_has_its_own_fixed_seed() -> None:
    assert choice_seed(7, 0) == 7
    seeds = {choice_seed(seed, choice) for seed in range(8) for choice in range(128)}
    assert len(seeds) == 8 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert choice_seed(7, 3) == choice_seed(7, 3)


def test_a_column_takes_few_bytes_beyond_its_ids() -> None:
    units = tuple(Unit(f"request-{i}", 0, 0) for i in range(256))
    ones = pack_ids([1] * 256)
    assert len(msgspec.msgpack.encode(m.Tokens(units, ones, ones, ones))) < 256 * (12 + 18) + 100


FILES = {
    int(path.stem.removeprefix("protocol_")): json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "golden").glob("protocol_*.json"))
}

# classes have these names now; their tags on the wire stay
RENAMED = {"Beat": "Heartbeat", "Room": "CapacityFreed", "RouterBeat": "RouterHeartbeat"}

GONE = {"DeviceWelcome"}  # for a transport, cuda_ipc, that no decode node of this release names

OLDER_FRAMES = [
    pytest.param(protocol, case, id=f"{protocol}-{case['kind']}-{number}")
    for protocol, cases in FILES.items()
    for number, case in enumerate(cases)
    if case["kind"] not in GONE
]


def with_newer(value: Any, protocol: int) -> Any:
    """Return the value with something in every field that came after the protocol."""
    if isinstance(value, msgspec.Struct):
        newer, filled = fields_since(type(value)), golden.full(type(value))
        changes = {
            name: getattr(filled, name) if newer.get(name, 0) > protocol else with_newer(getattr(value, name), protocol)
            for name in value.__struct_fields__
        }
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(with_newer(item, protocol) for item in value)
    if isinstance(value, dict):
        return {key: with_newer(item, protocol) for key, item in value.items()}
    return value


@pytest.mark.parametrize(("protocol", "case"), OLDER_FRAMES)
def test_bytes_of_an_older_protocol_are_read_and_written_again(protocol: int, case: dict[str, Any]) -> None:
    frame = bytes.fromhex(case["frame"])
    message = decode_frame(golden.DECODERS[case["direction"]], frame)
    assert type(message).__name__ == RENAMED.get(case["kind"], case["kind"])
    assert message == msgspec.json.decode(json.dumps(case["says"]), type=golden.DIRECTIONS[case["direction"]])
    assert encode(message, protocol) == frame
    assert encode(with_newer(message, protocol), protocol) == frame


@pytest.mark.parametrize(("protocol", "case"), OLDER_FRAMES)
def test_the_protocol_before_has_the_same_bytes(protocol: int, case: dict[str, Any]) -> None:
    """Protocol 5 added a message and no field, so protocol 4 has no file of its own."""
    if protocol != 5 or PROTOCOL_MIN > 4:
        pytest.skip("this protocol has a file of its own, or is not spoken any more")
    frame = bytes.fromhex(case["frame"])
    message = decode_frame(golden.DECODERS[case["direction"]], frame)
    assert encode(with_newer(message, 4), 4) == frame


@pytest.mark.parametrize("protocol", FILES)
def test_every_message_of_the_protocol_is_there(protocol: int) -> None:
    kinds: list[type[Message]] = [kind for union in golden.DIRECTIONS.values() for kind in get_args(union)]
    known = {kind.__name__ for kind in kinds if kind.since <= protocol}
    assert {RENAMED.get(case["kind"], case["kind"]) for case in FILES[protocol]} - GONE == known


@pytest.mark.parametrize("case", [case for case in FILES[5] if case["kind"] in GONE])
def test_a_removed_message_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_frame(golden.DECODERS[case["direction"]], bytes.fromhex(case["frame"]))


def test_every_older_protocol_but_4_has_its_bytes() -> None:
    assert set(FILES) == set(range(max(5, PROTOCOL_MIN), PROTOCOL_MAX))
