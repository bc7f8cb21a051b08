"""`baton decode`: load the model, join the router, pull the pages of prompts and generate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..engine.engine import Engine
from ..engine.ranks.executor import RankExecutor
from ..engine.ranks.handoffs import make_client
from ..engine.ranks.own_work_executor import OwnWorkExecutor
from ..engine.ranks.processes import RankProcesses
from ..engine.ranks.ranked_engine import RankedEngine, start_ranks
from ..engine.rounds.device_executor import DeviceExecutor
from ..engine.rounds.graphs import graph_sizes
from ..engine.startup import load_engine, load_keys, make_endpoint, node_id, serve
from ..metadata.bus.curve import KeyPair
from ..metadata.bus.membership import Membership
from ..metadata.bus.sockets import new_epoch
from .config import DecodeConfig
from .node import DecodeNode
from .parts import DecodeParts


def run(config: DecodeConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status. Raises ConfigError and ModelError before it serves, and
    RankLost."""
    name = node_id(config, "decode")
    keys = load_keys(config)
    if config.num_ranks > 1:
        rehearsal = partial(_rehearse, config)
        with start_ranks(config, num_slots=config.max_running, name=name, rehearse=rehearsal) as ranked:
            return _serve(config, name, keys, ranked.engine, lambda: parts_on(ranked, config), ranked.processes)
    engine = load_engine(config, partial(_rehearse, config))
    chunk = config.chunk(engine.device.type)
    return _serve(
        config, name, keys, engine, lambda: DecodeParts.on_one(_make_executor(config, engine), engine.cache, chunk)
    )


def _make_executor(config: DecodeConfig, engine: Engine) -> DeviceExecutor:
    return DeviceExecutor(engine, config.max_running, graph_sizes(engine.kv, config.max_running))


def _rehearse(config: DecodeConfig, engine: Engine) -> None:
    _make_executor(config, engine).rehearse(expects_prompts=config.expect_prompts)


def parts_on(ranked: RankedEngine, config: DecodeConfig) -> DecodeParts:
    """Return the parts of a node with several ranks."""
    engine, chunk = ranked.engine, config.chunk(ranked.engine.device.type)
    if engine.num_pools == 1:
        return DecodeParts.on_one(RankExecutor(ranked), engine.cache, chunk)
    executor = OwnWorkExecutor(ranked, graph_sizes(engine.kv, ranked.num_slots))
    return DecodeParts.on_ranks(executor.queues, engine.caches, chunk)


def _serve(
    config: DecodeConfig,
    name: str,
    keys: KeyPair | None,
    engine: Engine,
    make_parts: Callable[[], DecodeParts],
    ranks: RankProcesses | None = None,
) -> int:
    epoch = new_epoch()
    handoff = make_client(make_endpoint(config, name, engine, keys, epoch), ranks)

    def make_node(membership: Membership) -> DecodeNode:
        return DecodeNode(
            make_parts(),
            membership,
            handoff,
            config.chunk(engine.device.type),
            is_adaptive=config.draft_adaptive,
            expects_prompts=config.expect_prompts,
            max_gap_s=config.max_gap_s,
        )

    return serve(config, name, "decode", engine, keys, epoch, "", make_node, ranks)
