"""Nodes on GPUs agree on a transport, and copy to the host only the pages that travel through it."""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import faulty
import msgpack
import msgspec
import pytest
import torch
from fake_device import FakeDevice
from handoff_nodes import SCHEMA, make_client, make_row, make_server, named, peer_of, same_pages, spin, unit

from baton.engine.config import EngineConfig
from baton.engine.device import kind_of
from baton.engine.startup import transports
from baton.metadata.bus.addresses import host_identity
from baton.metadata.errors import ConfigError, OutOfMemory, TransferError
from baton.metadata.handoff.descriptor_inbox import new_token, send_descriptors
from baton.metadata.handoff.pull_link import HELLO_S
from baton.metadata.handoff.schema.schema import blocks_per_page
from baton.metadata.handoff.tickets import TicketEnded, TicketFailed
from baton.metadata.handoff.transfer import Arrived, Revoked, TransferFailed
from baton.metadata.handoff.transports.cuda import CudaTransport
from baton.metadata.wire import data_link
from baton.metadata.wire.frames import encode, unseal
from baton.metadata.wire.protocol import PROTOCOL_MAX, PROTOCOL_MIN
from baton.metadata.wire.request import unpack_ids

ALL = ("cuda", "local", "zmq")


class GpuPair:
    """Both nodes on FakeDevices."""

    def __init__(self, transports: tuple[str, ...] = ALL, **server_settings: Any) -> None:
        self.server, self.source = make_server(has_gpu=True, **server_settings)
        self.client, self.target = make_client(has_gpu=True, transports=transports)
        self.theirs: FakeDevice = self.source[0].device
        self.ours: FakeDevice = self.target[0].device

    @property
    def transport(self) -> Any:
        return self.client._links.by_epoch[self.server.end.epoch].transport

    def offer(self) -> None:
        self.server.open(unit(), 2)
        self.server.offer(unit(), [0, 1], [5, 6], [1, 1])
        self.server.finish(unit(), make_row(SCHEMA))

    def claim(self) -> None:
        self.client.claim(unit(), peer_of(self.server), 0, [9, 8])

    def spin(self) -> Any:
        """Poll both nodes until the transfer ends. Return its last event."""
        ends = (Arrived, TransferFailed)
        events = spin([self.server, self.client], lambda events: any(isinstance(each, ends) for each in events))
        return next(each for each in events if isinstance(each, ends))

    def close(self) -> None:
        for node in (self.client, self.server, *self.source, *self.target):
            node.close()


@pytest.fixture
def pair() -> Iterator[GpuPair]:
    pair = GpuPair()
    yield pair
    pair.ours.run()
    pair.close()


def test_the_best_common_transport_is_used_and_no_page_comes_to_the_host(pair: GpuPair) -> None:
    pair.offer()
    pair.claim()
    assert pair.spin().times.transport == "cuda"
    assert same_pages(pair.target, [9, 8], pair.source, [5, 6])
    assert pair.theirs.called("store") == pair.ours.called("load") == []
    assert pair.theirs.called("digest") == [5, 6] and pair.ours.called("expect") == [9, 8]
    assert not any(memory.pages.any() for memory in (*pair.ours.memory, *pair.theirs.memory))


@pytest.mark.parametrize("is_claimed_first", [True, False])
@pytest.mark.parametrize("name", ["local", "zmq"])
def test_pages_come_to_the_host_for_a_link_that_needs_them_there(name: str, is_claimed_first: bool) -> None:
    pair = GpuPair((name,))
    if is_claimed_first:
        pair.claim()
        spin([pair.server, pair.client], lambda _: pair.server._book._parked)
    pair.offer()
    assert pair.theirs.called("store") == ([5, 6] if name == "local" and is_claimed_first else [])
    if not is_claimed_first:
        pair.claim()
    assert pair.spin().times.transport == name
    assert sorted(pair.theirs.called("store")) == [5, 6] and pair.ours.called("load") == [9, 8]
    assert same_pages(pair.target, [9, 8], pair.source, [5, 6])
    pair.close()


def test_checksums_for_several_offers_are_computed_at_once(pair: GpuPair) -> None:
    pair.server.open(unit(), 2)
    pair.server.digest([5, 6], [1, 1])
    pair.server.offer(unit(), [0], [5], [1])
    pair.server.offer(unit(), [1], [6], [1], make_row(SCHEMA))
    pair.claim()
    assert isinstance(pair.spin(), Arrived)
    assert [pages for what, pages in pair.theirs.calls if what == "digest"] == [[5, 6]]


@pytest.mark.parametrize("failing", [1, 2])
def test_if_mapping_fails_the_next_best_transport_is_used(
    pair: GpuPair, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: Any) -> None:
        raise TransferError("out of peers")

    monkeypatch.setattr(pair.ours, "map", fail)
    if failing == 2:
        monkeypatch.setattr("baton.metadata.handoff.transports.local.LocalTransport.open", fail)
    pair.offer()
    pair.claim()
    assert pair.spin().times.transport == ("local", "zmq")[failing - 1]
    assert same_pages(pair.target, [9, 8], pair.source, [5, 6])


def test_pools_that_cannot_be_shared_are_not_offered_for_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "can_be_mapped", False)
    pair = GpuPair()
    pair.offer()
    pair.claim()
    assert pair.spin().times.transport == "local" and not pair.ours.mappings
    pair.close()


def test_no_page_of_a_gpu_is_mapped_from_another_host(pair: GpuPair) -> None:
    there = {"host": "elsewhere", "inbox": "baton-" + "0" * 32}
    pair.client._links.hello = msgspec.structs.replace(pair.client._links.hello, **there)
    pair.offer()
    pair.claim()
    assert pair.spin().times.transport == "zmq" and not pair.ours.mappings


def test_the_loop_comes_back_while_the_device_copies(pair: GpuPair) -> None:
    pair.ours.is_slow = True
    pair.offer()
    pair.claim()
    spin([pair.server, pair.client], lambda _: pair.ours.called("gather"))
    assert pair.client.poll() == [] and pair.client.wait_s() == 0.0
    pair.ours.run()
    assert named(pair.client.poll(), Arrived) and pair.ours.num_waits == 0


def test_a_revoked_ticket_is_given_back_when_the_device_is_done(pair: GpuPair) -> None:
    pair.ours.is_slow = True
    pair.offer()
    pair.claim()
    spin([pair.server, pair.client], lambda _: pair.ours.called("gather"))
    pair.server.revoke(unit(), False, "no more")
    spin([pair.server, pair.client], lambda events: not pair.server.tickets())
    assert pair.ours.num_waits == 1


def test_a_closed_life_is_unmapped_at_once(pair: GpuPair) -> None:
    pair.offer()
    pair.claim()
    pair.spin()
    [mapping] = pair.ours.mappings
    pair.client.close_peer(pair.server.end.epoch)
    assert mapping.is_closed


def test_an_older_node_gets_no_message_that_it_does_not_know(pair: GpuPair) -> None:
    """The older node names `cuda_ipc`, which no longer exists, and has no inbox."""
    hello = msgspec.structs.replace(
        pair.client._links.hello, transports=("cuda_ipc", "local", "zmq"), host=host_identity(), inbox=""
    )
    peers = pair.server._links.peers
    answer = peers.meet(b"old", hello, ())
    newer = peers.meet(b"new", msgspec.structs.replace(pair.client._links.hello, protocol=PROTOCOL_MAX), ())
    assert (type(answer), type(newer)) == (data_link.LinkWelcome, data_link.CudaWelcome)
    plain = msgpack.unpackb(unseal(encode(answer, PROTOCOL_MIN)) or b"")
    assert set(plain) == {
        *("type", "node_id", "epoch", "transport", "lease_s", "num_pages", "pid", "fds", "sizes"),
    }


@pytest.mark.parametrize("inbox", ["nobody listens", "none", "another socket"])
def test_without_descriptors_pages_go_by_way_of_the_host(pair: GpuPair, inbox: str) -> None:
    """Neither node waits for a missing inbox or for descriptors that do not come."""
    names = {"nobody listens": "baton-" + "0" * 32, "none": "", "another socket": "baton-" + "1" * 32}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind("\0" + names["another socket"])
        pair.client._links.hello = msgspec.structs.replace(pair.client._links.hello, inbox=names[inbox])
        pair.offer()
        pair.claim()
        assert pair.spin().times.transport == "local"
    assert same_pages(pair.target, [9, 8], pair.source, [5, 6])


@pytest.mark.parametrize("can_map", [True, False])
def test_a_prefill_node_in_a_long_step_is_greeted_several_times(
    pair: GpuPair, can_map: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are all equal. A different one would end the link, or send descriptors that are never taken."""
    if not can_map:
        monkeypatch.setattr(pair.ours, "map", lambda *_: _raise(TransferError("no")))
    pair.offer()
    pair.claim()
    until = time.monotonic() + 2.5 * HELLO_S
    while time.monotonic() < until:
        assert pair.client.poll() == []
        time.sleep(0.02)
    assert pair.spin().times.transport == ("cuda" if can_map else "local")
    spin([pair.server, pair.client], lambda _: pair.client.dropped.num_stale == 2)
    assert pair.client.dropped.count == 0 and pair.transport is not None


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize("protocol", [0, 4, 5])
def test_a_hello_of_an_older_protocol_that_names_an_inbox_ends_nothing(pair: GpuPair, protocol: int) -> None:
    """No release sends such a hello. The welcome for its transport cannot be written in that protocol."""
    hello = msgspec.structs.replace(pair.client._links.hello, protocol=protocol)
    answer = pair.server._links.peers.meet(b"liar", hello, ())
    assert type(answer) is data_link.LinkWelcome and answer.transport == "local"


def test_descriptors_for_a_link_that_is_over_do_not_stay_open(pair: GpuPair) -> None:
    """Open descriptors would keep the memory of a dead prefill node allocated."""
    pair.offer()
    pair.claim()
    pair.spin()
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    sent = [shared.descriptor for shared in pair.theirs.shared]
    send_descriptors(pair.client._links.hello.inbox, new_token(), sent)
    pair.client._links._inbox._look()  # type: ignore[union-attr]
    assert len(list(Path("/proc/self/fd").iterdir())) == before + len(sent)
    pair.client.close_peer(pair.server.end.epoch)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_without_the_descriptors_another_transport_is_used(pair: GpuPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.metadata.handoff.transports.cuda.send_descriptors", lambda *_: None)
    pair.offer()
    pair.claim()
    assert pair.spin().times.transport == "local"


def test_closing_leaves_no_descriptor_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        pair = GpuPair()
        pair.offer()
        pair.claim()
        pair.spin()
        pair.close()
        del pair
        gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2  # ZeroMQ closes a little later


@pytest.mark.parametrize(("here", "there"), [(True, False), (False, True)])
def test_nodes_on_cpu_and_gpu_refuse_each_other_in_words(here: bool, there: bool) -> None:
    server, source = make_server(has_gpu=here)
    client, target = make_client(has_gpu=there, transports=("zmq",))
    client.claim(unit(), peer_of(server), 0, [3, 4])
    events = spin([server, client], lambda events: named(events, TransferFailed))
    names = {True: "multilinear64", False: "xxh3_64"}
    [failed] = named(events, TransferFailed)
    assert failed.is_refused and f"checksum: {names[here]} here, {names[there]} there" in failed.reason
    for node in (client, server, *source, *target):
        node.close()


def test_a_flipped_bit_on_the_device_is_found_and_pulled_again(
    pair: GpuPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(faulty.Plan(pages={"flip": 1.0}, most=1)))
    faults = faulty.Faults(tmp_path / "plan.json")
    monkeypatch.setattr(CudaTransport, "step", faulty._spoiling(CudaTransport.step, faults))
    pair.offer()
    pair.claim()
    assert isinstance(pair.spin(), Arrived) and pair.client.num_checksum_failures == 1
    assert same_pages(pair.target, [9, 8], pair.source, [5, 6])
    noted = [json.loads(line) for line in (tmp_path / "plan.faults").read_text().splitlines()]
    assert [each["kind"] for each in noted] == ["page flip"]


class _Engine:
    """The attributes of an engine that `transports` reads."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.kind = kind_of(self.device)


def test_transports_are_named_best_first() -> None:
    on_cpu, on_gpu = _Engine("cpu"), _Engine("cuda")
    assert transports(EngineConfig(), on_cpu) == ("local", "zmq")  # type: ignore[arg-type]
    assert transports(EngineConfig(), on_gpu) == ALL  # type: ignore[arg-type]
    assert transports(EngineConfig(transport="zmq"), on_gpu) == ("zmq",)  # type: ignore[arg-type]
    with_keys = EngineConfig(keys="a.key"), EngineConfig(keys="a.key", plain_pages=True)
    assert [transports(each, on_cpu) for each in with_keys] == [  # type: ignore[arg-type]
        ("local", "aes", "zmq"),
        ("local", "plain", "aes", "zmq"),
    ]
    for transport, words in (
        ("aes", "--keys FILE"),
        ("plain", "--plain-pages on both nodes"),
        ("nixl", "--plain-pages on both nodes"),
    ):
        with pytest.raises(ConfigError, match=f"transport {transport} needs {words}"):
            transports(EngineConfig(transport=transport), on_cpu)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transport cuda needs device cuda, this node is on cpu"):
        transports(EngineConfig(transport="cuda"), on_cpu)  # type: ignore[arg-type]


def test_many_pages_are_offered_in_several_messages(pair: GpuPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message holds the checksums of two pages. The last message has the row."""
    monkeypatch.setattr("baton.metadata.handoff.transfer.OFFER_BYTES", 2 * 8 * blocks_per_page(SCHEMA) + 1)
    sent: list[Any] = []
    links = pair.server._links
    send = links.send
    monkeypatch.setattr(
        links, "send", lambda holder, message, data=None: (sent.append(message), send(holder, message, data))
    )
    pair.server.open(unit(), 5)
    pair.server.offer(unit(), range(5), [5, 6, 7, 8, 9], [1] * 5)
    pair.server.finish(unit(), make_row(SCHEMA))
    pair.client.claim(unit(), peer_of(pair.server), 0, [1, 2, 3, 4, 10])
    assert isinstance(pair.spin(), Arrived)
    offers = named(sent, data_link.Offer)
    assert [unpack_ids(offer.indices) for offer in offers] == [[0, 1], [2, 3], [4]]
    assert [offer.row is not None for offer in offers] == [False, False, True]
    assert same_pages(pair.target, [1, 2, 3, 4, 10], pair.source, [5, 6, 7, 8, 9])


# --- out of memory ---


class Full:
    """Lets a method of a FakeDevice run out of memory for these pages, or for more pages than so many."""

    def __init__(self, device: FakeDevice, name: str, *, pages: Sequence[int] = (), most: int = 1000) -> None:
        self.num_failures = 0
        method = getattr(device, name)

        def limited(*args: Any) -> Any:
            if len(args[-1]) > most or set(args[-1]).intersection(pages):
                self.num_failures += 1
                raise OutOfMemory("the device has no memory left for this")
            return method(*args)

        setattr(device, name, limited)


def hand_over_two(pair: GpuPair) -> list[Any]:
    """Hand pages 5 and 6 over into 9 and 8, and pages 3 and 4 into 7 and 2. Revoke what fails at the prefill node.
    Return the events until both tickets have ended."""
    units = unit("r"), unit("s")
    for each, sources, targets in zip(units, ([5, 6], [3, 4]), ([9, 8], [7, 2]), strict=True):
        pair.client.claim(each, peer_of(pair.server), 0, targets)
        pair.server.open(each, 2)
        pair.server.offer(each, [0, 1], sources, [1, 1])
        pair.server.finish(each, make_row(SCHEMA))

    def are_over(events: list[Any]) -> bool:
        for each in named(events, TicketFailed):
            pair.server.revoke(each.unit, finished=False, reason=each.reason)
        return len(named(events, TicketEnded)) == 2 and not pair.client.tickets()

    return spin([pair.server, pair.client], are_over)


@pytest.mark.parametrize(
    ("transport", "name", "pages"),
    [("zmq", "store", [5]), ("local", "store", [6]), ("cuda", "digest", [5]), ("zmq", "digest", [6])],
)
def test_a_ticket_for_which_the_prefill_node_has_no_memory_fails_alone(
    transport: str, name: str, pages: list[int]
) -> None:
    pair = GpuPair((transport,))
    full = Full(pair.theirs, name, pages=pages)
    pair.server.digest([3, 4, 5, 6], [1] * 4)
    events = hand_over_two(pair)
    assert full.num_failures and {(each.unit.rid, each.reason) for each in named(events, TicketFailed)} == {
        ("r", "the device has no memory left for this")
    }
    assert [each.unit.rid for each in named(events, Revoked)] == ["r"] and not named(events, TransferFailed)
    assert [each.unit.rid for each in named(events, Arrived)] == ["s"]
    assert {each.unit.rid: each.how for each in named(events, TicketEnded)} == {"r": "revoked", "s": "acked"}
    assert same_pages(pair.target, [7, 2], pair.source, [3, 4])
    pair.close()


def test_a_failed_ticket_is_a_reason_to_poll_at_once(pair: GpuPair) -> None:
    Full(pair.theirs, "digest", pages=[5])
    pair.server.open(unit(), 2)
    assert pair.server.wait_s() != 0.0
    pair.server.offer(unit(), [0], [5], [1])
    assert pair.server.wait_s() == 0.0
    assert [type(each) for each in pair.server.poll()] == [TicketFailed] and pair.server.wait_s() != 0.0


@pytest.mark.parametrize(
    ("transport", "name", "limits"),
    [("zmq", "load", {"pages": [8]}), ("local", "load", {"pages": [9]}), ("cuda", "gather", {"most": 2})],
)
def test_a_transfer_for_which_the_decode_node_has_no_memory_fails_alone(
    transport: str, name: str, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is no memory for a copy of two units' pages, one unit gives way."""
    pair = GpuPair((transport,))
    full = Full(pair.ours, name, **limits)
    launch = CudaTransport._launch

    def launch_together(self: CudaTransport) -> bool:
        """Wait for the pages of both units, as long as both are there."""
        return (len(self._queue) == 4 or len(pair.client.tickets()) < 2) and launch(self)

    monkeypatch.setattr(CudaTransport, "_launch", launch_together)
    events = hand_over_two(pair)
    assert full.num_failures == 1
    [failed] = named(events, TransferFailed)
    assert (failed.unit.rid, failed.code, failed.is_refused) == ("r", "out_of_memory", False)
    assert "no memory left for this" in failed.reason
    assert [each.unit.rid for each in named(events, Arrived)] == ["s"]
    assert {each.unit.rid: each.how for each in named(events, TicketEnded)} == {"r": "dropped", "s": "acked"}
    assert same_pages(pair.target, [7, 2], pair.source, [3, 4])
    pair.close()


def test_what_a_copy_brought_before_one_without_memory_lands(pair: GpuPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer whose copy is done arrives in the step in which the next copy finds no memory."""
    pair.ours.is_slow = True
    units = unit("r"), unit("s")
    for each, targets in zip(units, ([9, 8], [7, 2]), strict=True):
        pair.client.claim(each, peer_of(pair.server), 0, targets)
        pair.server.open(each, 2)
    pair.server.offer(units[0], [0, 1], [5, 6], [1, 1], make_row(SCHEMA))
    spin([pair.server, pair.client], lambda _: pair.ours.called("gather") == [9, 8])
    Full(pair.ours, "gather", pages=[7])
    pair.server.offer(units[1], [0, 1], [3, 4], [1, 1], make_row(SCHEMA))
    spin([pair.server], lambda _: True)
    pair.ours.run()
    events = spin([pair.server, pair.client], lambda _: not pair.client.tickets())
    assert [type(each) for each in events if isinstance(each, Arrived | TransferFailed)] == [Arrived, TransferFailed]
    assert same_pages(pair.target, [9, 8], pair.source, [5, 6])
