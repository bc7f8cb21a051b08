"""Real nodes in the process of the test, made as `baton prefill` and `baton decode` make them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from forked import forked_ranks
from thread_ranks import ThreadRanks

from baton.decode_node.config import DecodeConfig
from baton.decode_node.main import parts_on as decode_parts_on
from baton.decode_node.node import DecodeNode
from baton.decode_node.parts import DecodeParts
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.handoffs import make_client, make_server
from baton.engine.ranks.ranked_engine import RankedEngine, start_ranks
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.graphs import graph_sizes
from baton.engine.startup import load_engine, make_endpoint, make_membership
from baton.metadata.bus.membership import Membership
from baton.metadata.bus.sockets import new_epoch
from baton.metadata.handoff.client import HandoffClient
from baton.metadata.handoff.server import HandoffServer
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.main import parts_on as prefill_parts_on
from baton.prefill_node.node import PrefillNode
from baton.prefill_node.parts import PrefillParts

_NO_BOUND_S = 1e6  # unless a test gives a bound: the length of chunks must not depend on this machine's times


def start_prefill(
    name: str, config: PrefillConfig, *, lease_s: float, ranks: ExitStack | None = None, **more: Any
) -> PrefillNode:
    """Start a prefill node that says hello. `more`: its settings. The caller closes its membership and handoff, and
    then `ranks`, which a node with several ranks needs."""
    ranked = _ranked_prefill(name, config, ranks)
    engine, epoch = load_engine(config) if ranked is None else ranked.engine, new_epoch()
    end = make_endpoint(config, name, engine, None, epoch)
    handoff = make_server(end, "127.0.0.1", lease_s, None if ranked is None else ranked.processes)
    membership = make_membership(config, name, "prefill", engine, None, epoch, handoff.address)
    if ranked is None:
        sizes = config.max_running, config.chunk(engine.device.type)
        parts = PrefillParts.on_one(Prompts(engine), engine.cache, *sizes)
    else:
        parts = prefill_parts_on(ranked, config)
    return _started(membership, handoff, lambda: PrefillNode(parts, membership, handoff, **more))


def start_decode(name: str, config: DecodeConfig, *, ranks: ExitStack | None = None, **more: Any) -> DecodeNode:
    """Start a decode node in the same way as `start_prefill`."""
    ranked = _ranked(name, config, config.max_running, ranks)
    engine, epoch = load_engine(config) if ranked is None else ranked.engine, new_epoch()
    end = make_endpoint(config, name, engine, None, epoch)
    handoff = make_client(end, None if ranked is None else ranked.processes)
    membership = make_membership(config, name, "decode", engine, None, epoch, "")
    chunk = config.chunk(engine.device.type)
    if ranked is None:
        executor = DeviceExecutor(engine, config.max_running, graph_sizes(engine.kv, config.max_running))
        parts = DecodeParts.on_one(executor, engine.cache, chunk)
    else:
        parts = decode_parts_on(ranked, config)
    max_gap_s = config.max_gap_s or _NO_BOUND_S
    return _started(
        membership, handoff, lambda: DecodeNode(parts, membership, handoff, chunk, max_gap_s=max_gap_s, **more)
    )


def _ranked_prefill(name: str, config: PrefillConfig, ranks: ExitStack | None) -> RankedEngine | None:
    """Return the ranks of a prefill node that has several. If they have sequences of their own on CPUs, they are
    threads, so that the decode node beside this one can have processes."""
    if config.dp_attention == 1 or config.device == "cuda":
        return _ranked(name, config, 0, ranks)
    assert ranks is not None, "nobody would end the ranks"
    return cast(RankedEngine, ranks.enter_context(ThreadRanks(config.dp_attention, config, num_slots=0)))


def _ranked(
    name: str, config: PrefillConfig | DecodeConfig, num_slots: int, ranks: ExitStack | None
) -> RankedEngine | None:
    """Return the ranks of a node that has several. A process can be rank 0 of one such node at a time."""
    if config.num_ranks == 1:
        return None
    assert ranks is not None, "nobody would end the ranks"
    with forked_ranks():
        return ranks.enter_context(start_ranks(config, num_slots=num_slots, name=name))


def _started(membership: Membership, handoff: HandoffServer | HandoffClient, make: Callable[[], Any]) -> Any:
    """Return the node. Its warm-up may raise."""
    with ExitStack() as stack:
        stack.callback(handoff.close)
        stack.callback(membership.close)
        node = membership.member = make()
        stack.pop_all()
    membership.start()
    return node
