"""The bytes of an older protocol, as its own code made them: read as what they said, written again byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from golden import DECODERS, DIRECTIONS, full

from baton.metadata.errors import ProtocolError
from baton.metadata.wire.frames import decode_frame, encode
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN, Message, fields_since

FILES = {
    int(path.stem.removeprefix("protocol_")): json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "golden").glob("protocol_*.json"))
}
# classes have these names now; their tags on the wire stay
RENAMED = {"Beat": "Heartbeat", "Room": "CapacityFreed", "RouterBeat": "RouterHeartbeat"}
GONE = {"DeviceWelcome"}  # for a transport, cuda_ipc, that no decode node of this release names
CASES = [
    pytest.param(protocol, case, id=f"{protocol}-{case['kind']}-{number}")
    for protocol, cases in FILES.items()
    for number, case in enumerate(cases)
    if case["kind"] not in GONE
]


def with_newer(value: Any, protocol: int) -> Any:
    """The value with something in every field that came after the protocol."""
    if isinstance(value, msgspec.Struct):
        newer, filled = fields_since(type(value)), full(type(value))
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


@pytest.mark.parametrize(("protocol", "case"), CASES)
def test_the_bytes_of_an_older_protocol(protocol: int, case: dict[str, Any]) -> None:
    frame = bytes.fromhex(case["frame"])
    message = decode_frame(DECODERS[case["direction"]], frame)
    assert type(message).__name__ == RENAMED.get(case["kind"], case["kind"])
    assert message == msgspec.json.decode(json.dumps(case["says"]), type=DIRECTIONS[case["direction"]])
    assert encode(message, protocol) == frame
    assert encode(with_newer(message, protocol), protocol) == frame


@pytest.mark.parametrize(("protocol", "case"), CASES)
def test_the_protocol_before_has_the_same_bytes(protocol: int, case: dict[str, Any]) -> None:
    """Protocol 5 brought a message and no field; 4 has no file of its own."""
    if protocol != 5 or PROTOCOL_MIN > 4:
        pytest.skip("this protocol has a file of its own, or is not spoken any more")
    frame = bytes.fromhex(case["frame"])
    message = decode_frame(DECODERS[case["direction"]], frame)
    assert encode(with_newer(message, 4), 4) == frame


@pytest.mark.parametrize("protocol", FILES)
def test_every_message_of_the_protocol_is_there(protocol: int) -> None:
    kinds: list[type[Message]] = [kind for union in DIRECTIONS.values() for kind in get_args(union)]
    known = {kind.__name__ for kind in kinds if kind.since <= protocol}
    assert {RENAMED.get(case["kind"], case["kind"]) for case in FILES[protocol]} - GONE == known


@pytest.mark.parametrize("case", [case for case in FILES[5] if case["kind"] in GONE])
def test_a_message_that_is_gone_is_none_of_this_protocol(case: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_frame(DECODERS[case["direction"]], bytes.fromhex(case["frame"]))


def test_every_older_protocol_but_4_has_its_bytes() -> None:
    assert set(FILES) == set(range(max(5, PROTOCOL_MIN), PROTOCOL_MAX))
