"""`baton decode`: load the model, join the router, pull the pages of prompts and generate."""

from __future__ import annotations

from functools import partial

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.ranks.executor import RankExecutor
from ..engine.ranks.handoffs import make_client, make_server
from ..engine.ranks.processes import RankProcesses
from ..engine.ranks.ranked_engine import RankedEngine, start_ranks
from ..engine.rounds.device_executor import executor_of
from ..engine.rounds.executor import Executor
from ..engine.startup import address_for_peers, check_bind_host, load_engine, load_keys, make_endpoint, node_id, serve
from ..metadata.bus.addresses import address_of_rank
from ..metadata.bus.descriptors import raise_limit
from ..metadata.bus.membership import Membership
from ..metadata.bus.sockets import new_epoch
from .config import DecodeConfig
from .node import DecodeNode


def run(config: DecodeConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status. Raises ConfigError and ModelError before it serves, and
    RankLost."""
    name = node_id(config, "decode")
    check_bind_host(config)
    raise_limit()
    rehearsal = partial(_rehearse, config)
    if config.num_ranks == 1:
        return _serve(config, 0, name, load_engine(config, rehearsal))
    with start_ranks(config, num_slots=config.max_running, name=name, serve=serve_rank, rehearse=rehearsal) as ranked:
        return _serve(config, 0, name, ranked.engine, ranked)


def serve_rank(config: EngineConfig, rank: int, name: str, engine: Engine) -> None:
    """Run the node of rank 1 or above of a group, until the group leaves."""
    assert isinstance(config, DecodeConfig), config
    raise_limit()
    _serve(config, rank, name, engine)


def _rehearse(config: DecodeConfig, engine: Engine) -> None:
    executor_of(engine, config.max_running).rehearse(expects_prompts=config.expect_prompts)


def _serve(config: DecodeConfig, rank: int, name: str, engine: Engine, ranked: RankedEngine | None = None) -> int:
    """Run a node, which is a rank of a group if `ranked` has nodes."""
    epoch, keys = new_epoch(), load_keys(config)
    ranks: RankProcesses | None = None if ranked is None else ranked.processes
    end = make_endpoint(config, name, engine, keys, epoch)
    handoff, exchanges = make_client(end, ranks), engine.cache.enabled
    address = address_of_rank(config.bind_host, rank)
    server = make_server(end, address, engine.lease_s, ranks, engine.cache) if exchanges else None

    def make_node(membership: Membership) -> DecodeNode:
        is_tensor_parallel = ranked is not None and engine.group_steps is None
        executor: Executor = (
            RankExecutor(ranked)
            if ranked is not None and is_tensor_parallel
            else executor_of(engine, config.max_running)
        )
        return DecodeNode(
            executor,
            engine.cache,
            membership,
            handoff,
            config.chunk(engine.device.type),
            server,
            is_adaptive=config.draft_adaptive,
            expects_prompts=config.expect_prompts,
            max_gap_s=config.max_gap_s,
        )

    data_address = "" if server is None else address_for_peers(config, server.address)
    return serve(config, name, "decode", engine, keys, epoch, data_address, make_node, ranks, borrows=exchanges)
