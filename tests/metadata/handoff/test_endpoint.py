"""The hello of a data link, and the reasons why two nodes cannot hand over."""

from __future__ import annotations

import msgspec
import pytest
from handoff_nodes import DRAFT_SCHEMA, FINGERPRINTS, SCHEMA, make_memory

from baton.metadata.bus.addresses import host_identity
from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff.endpoint import Endpoint, can_use

END = Endpoint(
    node_id="n0",
    epoch="e0",
    schema=SCHEMA,
    fingerprints=FINGERPRINTS,
    memory=make_memory(SCHEMA, 2),
    transports=["local", "zmq"],
)


def test_a_hello_says_what_the_node_is() -> None:
    hello = END.hello("baton-" + "0" * 32)
    assert (hello.node_id, hello.epoch, hello.layout, hello.transports) == ("n0", "e0", SCHEMA, ("local", "zmq"))
    assert (hello.target_fingerprint, hello.draft_fingerprint) == FINGERPRINTS
    assert (hello.host, hello.inbox) == (host_identity(), "baton-" + "0" * 32)


def test_two_nodes_alike_can_hand_over() -> None:
    assert END.objections(END.hello(""), ["zmq"]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_fingerprint": "0"}, [f"target weights: {FINGERPRINTS[0]} here, 0 there"]),
        ({"draft_fingerprint": "0"}, ["draft weights: None here, 0 there"]),
        ({"transports": ("cuda",)}, ["transports: local, zmq here, cuda there (same host)"]),
        ({"transports": ("local",), "host": "h"}, ["transports: local, zmq here, local there (another host)"]),
        (
            {"target_fingerprint": "0", "transports": ("cuda",)},
            [
                f"target weights: {FINGERPRINTS[0]} here, 0 there",
                "transports: local, zmq here, cuda there (same host)",
            ],
        ),
    ],
)
def test_an_objection_names_both_values(changes: dict[str, object], words: list[str]) -> None:
    assert END.objections(msgspec.structs.replace(END.hello(""), **changes), ("local", "zmq")) == words


def test_unlike_schemas_are_objections() -> None:
    reasons = END.objections(msgspec.structs.replace(END.hello(""), layout=DRAFT_SCHEMA), ("local", "zmq"))
    assert reasons and any("algorithm" in reason for reason in reasons)


def test_a_transport_must_be_ours_and_reach_the_peer() -> None:
    hello = END.hello("")
    assert can_use("local", ("local",), hello, hello.host) and can_use("zmq", ("zmq",), hello, "elsewhere")
    assert not can_use("zmq", ("local",), hello, hello.host)
    assert not can_use("local", ("local",), hello, "elsewhere")


def test_without_keys_there_is_no_allow_list() -> None:
    assert END.allow_list is None
    keys = KeyPair.generate()
    fields = ("node_id", "epoch", "schema", "fingerprints", "memory", "transports")
    end = Endpoint(**{name: getattr(END, name) for name in fields}, keys=keys)
    assert end.allow_list is keys.allow_list
