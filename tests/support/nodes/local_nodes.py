"""Real nodes in the process of the test, made as `baton prefill` and `baton decode` make them."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from forked import forked_ranks
from thread_ranks import ThreadRanks

from baton.decode_node import pacing
from baton.decode_node.config import DecodeConfig
from baton.decode_node.node import DecodeNode
from baton.engine.config import EngineConfig
from baton.engine.engine import MIN_LEASE_S, Engine
from baton.engine.pace.step_times import ChunkCosts
from baton.engine.prompts.prompts import Prompts
from baton.engine.ranks.executor import RankExecutor, RankPrompts
from baton.engine.ranks.handoffs import make_client, make_server
from baton.engine.ranks.ranked_engine import RankedEngine, start_ranks
from baton.engine.rounds.device_executor import executor_of
from baton.engine.startup import load_engine, make_endpoint, make_membership
from baton.metadata.bus.membership import DataLinks, Membership
from baton.metadata.bus.sockets import new_epoch
from baton.prefill_node.config import PrefillConfig
from baton.prefill_node.main import make_scheduler
from baton.prefill_node.node import PrefillNode

_CHUNK_S = 0.02  # of the longest chunk, if it is not measured
_NO_BOUND_S = 1e6  # unless a test gives a bound: the length of chunks must not depend on this machine's times


def start_prefill(
    name: str, config: PrefillConfig, *, lease_s: float, ranks: ExitStack | None = None, **more: Any
) -> PrefillNode:
    """Start a prefill node that says hello. `more`: its settings. The caller closes its membership and handoff, and
    then `ranks`, which a node with several ranks needs."""
    ranked = _ranked(name, config, 0, ranks)
    engine, epoch = _engine(config, ranked, 0, ranks), new_epoch()
    end = make_endpoint(config, name, engine, None, epoch)
    exchanges, processes = engine.cache.enabled, None if ranked is None else ranked.processes
    handoff = make_server(end, "127.0.0.1", lease_s, processes, engine.cache if exchanges else None)
    client = make_client(end, processes) if exchanges else None
    membership = make_membership(config, name, "prefill", engine, None, epoch, handoff.address, borrows=exchanges)
    prompts = Prompts(engine) if ranked is None or engine.group_steps is not None else RankPrompts(ranked)
    scheduler, measures = make_scheduler(config, engine), engine.group_steps is None
    return _started(
        membership,
        DataLinks(handoff, client),
        lambda: PrefillNode(prompts, scheduler, membership, handoff, client, measures_sharing=measures, **more),
    )


def start_decode(name: str, config: DecodeConfig, *, ranks: ExitStack | None = None, **more: Any) -> DecodeNode:
    """Start a decode node in the same way as `start_prefill`."""
    ranked = _ranked(name, config, config.max_running, ranks)
    engine, epoch = _engine(config, ranked, config.max_running, ranks), new_epoch()
    end = make_endpoint(config, name, engine, None, epoch)
    exchanges, processes = engine.cache.enabled, None if ranked is None else ranked.processes
    handoff = make_client(end, processes)
    server = make_server(end, "127.0.0.1", engine.lease_s, processes, engine.cache) if exchanges else None
    address = "" if server is None else server.address
    membership = make_membership(config, name, "decode", engine, None, epoch, address, borrows=exchanges)
    chunk = config.chunk(engine.device.type)
    is_own = ranked is None or engine.group_steps is not None
    executor = executor_of(engine, config.max_running) if is_own else RankExecutor(ranked)
    max_gap_s = config.max_gap_s or _NO_BOUND_S
    with _known_costs() if config.max_gap_s is None else nullcontext():
        return _started(
            membership,
            DataLinks(handoff, server),
            lambda: DecodeNode(executor, engine.cache, membership, handoff, chunk, server, max_gap_s=max_gap_s, **more),
        )


def _known_costs() -> Any:
    """Let decode nodes know the times of chunks. To measure them takes much of a start, and nothing depends on them
    while gaps have no bound."""
    return patch.object(pacing, "measure_costs", lambda *_: ChunkCosts({16: 0.001, 512: 0.02}))


warm: set[str] = set()  # models that an engine of this process has run


@contextmanager
def _warm_up_once(config: EngineConfig) -> Iterator[None]:
    """Let engines on CPUs whose model this process has run before begin without a warm-up, which takes two fifths of
    the start of a pair of nodes."""

    def know(engine: Engine, chunk_tokens: int) -> None:
        engine.lease_s, engine.longest_chunk = MIN_LEASE_S, (chunk_tokens, _CHUNK_S)

    is_warm = config.model in warm and config.device == "cpu"
    with patch.object(Engine, "warm_up", know) if is_warm else nullcontext():
        yield
    warm.add(config.model)


def _ranked(
    name: str, config: PrefillConfig | DecodeConfig, num_slots: int, ranks: ExitStack | None
) -> RankedEngine | None:
    """Return the ranks in other processes of a node that has some. A process can be rank 0 of one such node at a time.
    The ranks of a group are threads on CPUs."""
    if config.num_ranks == 1 or (config.dp_attention > 1 and config.device != "cuda"):
        return None
    assert ranks is not None, "nobody would end the ranks"
    with forked_ranks():
        return ranks.enter_context(start_ranks(config, num_slots=num_slots, name=name, serve=join_for_ever))


def _engine(
    config: PrefillConfig | DecodeConfig, ranked: RankedEngine | None, num_slots: int, ranks: ExitStack | None
) -> Engine:
    """Return the engine of a node, or of rank 0 of a group whose other ranks join its steps, and have no requests."""
    if ranked is not None:
        return ranked.engine
    if config.dp_attention == 1:
        with _warm_up_once(config):
            return load_engine(config)
    assert ranks is not None, "nobody would end the ranks"
    return ranks.enter_context(ThreadRanks(config.dp_attention, config, num_slots=num_slots, leads=True)).engines[0]


def join_for_ever(config: EngineConfig, rank: int, name: str, engine: Engine) -> None:
    """Join the steps of rank 0, in the process of another rank, until the group ends."""
    del rank, name
    if isinstance(config, DecodeConfig):
        executor_of(engine, config.max_running).warm_up(expects_prompts=config.expect_prompts)
    else:
        Prompts(engine).warm_up()
    steps = engine.group_steps
    assert steps is not None
    while not steps.board.has_ended:
        if not steps.join():
            steps.sleep(lambda descriptors: select.select(descriptors, [], [], 0.1))


def _started(membership: Membership, links: DataLinks, make: Callable[[], Any]) -> Any:
    """Return the node. Its warm-up may raise."""
    with ExitStack() as stack:
        stack.callback(links.close)
        stack.callback(membership.close)
        node = membership.member = make()
        stack.pop_all()
    membership.start()
    return node
