"""`baton decode`: load the model, join the router, pull the pages of prompts and generate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..engine.device_executor import DeviceExecutor
from ..engine.engine import Engine
from ..engine.executor import Executor
from ..engine.graphs import graph_sizes
from ..engine.rank_executor import RankExecutor
from ..engine.rank_handoffs import make_client
from ..engine.rank_processes import RankProcesses
from ..engine.ranked_engine import RankedEngine, check_ranks
from ..engine.startup import load_engine, load_keys, make_endpoint, node_id, serve
from ..metadata.bus.curve import KeyPair
from ..metadata.bus.membership import Membership
from ..metadata.bus.sockets import new_epoch
from .config import DecodeConfig
from .node import DecodeNode


def run(config: DecodeConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status. Raises ConfigError and ModelError before it serves, and
    RankLost."""
    name = node_id(config, "decode")
    keys = load_keys(config)
    if config.tp > 1:
        check_ranks(config, config.tp)
        rehearsal = partial(_rehearse, config)
        with RankedEngine(config, config.tp, num_slots=config.max_running, name=name, rehearse=rehearsal) as ranked:
            return _serve(config, name, keys, ranked.engine, lambda: RankExecutor(ranked), ranked.processes)
    engine = load_engine(config, partial(_rehearse, config))
    return _serve(config, name, keys, engine, lambda: _make_executor(config, engine))


def _make_executor(config: DecodeConfig, engine: Engine) -> DeviceExecutor:
    return DeviceExecutor(engine, config.max_running, graph_sizes(engine.kv, config.max_running))


def _rehearse(config: DecodeConfig, engine: Engine) -> None:
    _make_executor(config, engine).rehearse(expects_prompts=config.expect_prompts)


def _serve(
    config: DecodeConfig,
    name: str,
    keys: KeyPair | None,
    engine: Engine,
    make_executor: Callable[[], Executor],
    ranks: RankProcesses | None = None,
) -> int:
    epoch = new_epoch()
    handoff = make_client(make_endpoint(config, name, engine, keys, epoch), ranks)

    def make_node(membership: Membership) -> DecodeNode:
        return DecodeNode(
            make_executor(),
            engine.cache,
            membership,
            handoff,
            config.max_running,
            config.chunk(engine.device.type),
            is_adaptive=config.draft_adaptive,
            expects_prompts=config.expect_prompts,
            max_gap_s=config.max_gap_s,
        )

    return serve(config, name, "decode", engine, keys, epoch, "", make_node, ranks)
