"""The hello of a data link, and the reasons why two nodes cannot hand over."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from handoff_nodes import DRAFT_SCHEMA, FINGERPRINTS, SCHEMA, make_memory

from baton.metadata.bus.addresses import host_identity
from baton.metadata.bus.curve import KeyPair
from baton.metadata.handoff.endpoint import Endpoint, usable
from baton.metadata.handoff.schema.kv_layout import Shard
from baton.metadata.wire.protocol import PROTOCOL_MAX

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
        (
            {"target_fingerprint": "0 mxfp4"},
            [f"target weights: {FINGERPRINTS[0]} (not quantized) here, 0 (mxfp4) there"],
        ),
        ({"draft_fingerprint": "0"}, ["draft weights: None here, 0 there"]),
        ({"transports": ("cuda",)}, ["transports: local, zmq here, cuda there (same host)"]),
        ({"transports": ("local",), "host": "h"}, ["transports: local, zmq here, local there (no shared memory)"]),
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
    assert usable(("zmq", "local"), hello, hello.host) == ["local", "zmq"], "in the decode node's order"
    assert usable(("zmq", "local"), hello, "elsewhere") == ["zmq"]
    assert usable(("local",), hello, "elsewhere") == []


def test_ranks_are_used_exactly_if_a_node_has_several() -> None:
    """A decode node of one rank says the same to every prefill node."""
    alone = msgspec.structs.replace(END.hello(""), protocol=PROTOCOL_MAX)
    first = msgspec.structs.replace(_rank(0, 2).hello(""), protocol=PROTOCOL_MAX)
    assert first.transports == ("ranks",)
    assert usable(("local", "zmq", "ranks"), alone, alone.host) == ["local", "zmq"]
    assert usable(("ranks",), alone, alone.host) == ["ranks"]
    assert usable(("local", "zmq", "ranks"), first, first.host) == usable(("ranks",), first, first.host) == ["ranks"]
    assert usable(("cuda", "ranks"), alone, alone.host) == [], "it may not come in by another door"


@pytest.mark.parametrize("protocol", [0, 5])
def test_a_node_with_ranks_and_a_peer_that_knows_none_refuse_each_other(protocol: int) -> None:
    old = f"protocol {max(protocol, 4)} of the link, ranks need 6; the decode node or the router is older"
    from_one = msgspec.structs.replace(END.hello(""), protocol=protocol)
    from_two = msgspec.structs.replace(_rank(0, 2).hello(""), protocol=protocol)
    assert _rank(0, 2).objections(from_one, ["ranks"]) == [f"ranks: 2 here, {old}"]
    assert END.objections(from_two, ["local", "zmq", "ranks"]) == [f"ranks: 1 here, {old}"]
    assert END.objections(from_two, ["local", "zmq"]) == [f"ranks: 1 here, {old}"]


def test_the_hello_of_a_rank_says_whose_heads_it_wants() -> None:
    hello = _rank(1, 3).rank_hello("", Shard(0, 2))
    assert (hello.rank, hello.size, hello.source_rank, hello.source_size) == (1, 3, 0, 2)
    assert hello.transports == ("local", "zmq") and hello.layout == SCHEMA


def _rank(rank: int, size: int) -> Endpoint:
    return dataclasses.replace(END, shard=Shard(rank, size))


def test_without_keys_there_is_no_allow_list() -> None:
    assert END.allow_list is None
    keys = KeyPair.generate()
    fields = ("node_id", "epoch", "schema", "fingerprints", "memory", "transports")
    end = Endpoint(**{name: getattr(END, name) for name in fields}, keys=keys)
    assert end.allow_list is keys.allow_list
