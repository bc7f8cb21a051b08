"""`baton prefill`: load the model, join the router, compute prompts and serve their pages."""

from __future__ import annotations

from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.prompts.executor import PromptExecutor
from ..engine.prompts.prompts import Prompts
from ..engine.ranks.executor import RankPrompts
from ..engine.ranks.handoffs import make_client, make_server
from ..engine.ranks.processes import RankProcesses
from ..engine.ranks.ranked_engine import RankedEngine, start_ranks
from ..engine.startup import check_bind_host, load_engine, load_keys, make_endpoint, node_id, serve
from ..metadata.bus.addresses import address_of_rank
from ..metadata.bus.descriptors import raise_limit
from ..metadata.bus.membership import Membership
from ..metadata.bus.sockets import new_epoch
from .config import PrefillConfig
from .node import PrefillNode
from .scheduler import PrefillScheduler


def run(config: PrefillConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status. Raises ConfigError and ModelError before it serves, and
    RankLost."""
    name = node_id(config, "prefill")
    check_bind_host(config)
    raise_limit()
    if config.num_ranks == 1:
        return _serve(config, 0, name, load_engine(config, _rehearse))
    with start_ranks(config, num_slots=0, name=name, serve=serve_rank, rehearse=_rehearse) as ranked:
        return _serve(config, 0, name, ranked.engine, ranked)


def serve_rank(config: EngineConfig, rank: int, name: str, engine: Engine) -> None:
    """Run the node of rank 1 or above of a group, until the group leaves."""
    assert isinstance(config, PrefillConfig), config
    raise_limit()
    _serve(config, rank, name, engine)


def _rehearse(engine: Engine) -> None:
    Prompts(engine).warm_up()


def make_scheduler(config: PrefillConfig, engine: Engine) -> PrefillScheduler:
    """Return the scheduler of a node. Prompts of a pool in FP8 have no tails: no library attends to such pages, so a
    chunk behind them takes long, and the first token would come later than the second one gains. Ranks of a group have
    none either: a step takes as long as the longest chunk of all ranks."""
    has_tails = config.kv_dtype != "fp8" and engine.group_steps is None
    return PrefillScheduler(
        engine.cache,
        config.max_running,
        config.chunk(engine.device.type),
        has_tails=has_tails,
        tail_window=engine.tail_window,
        has_draft_tails=engine.has_draft_tails,
    )


def _serve(config: PrefillConfig, rank: int, name: str, engine: Engine, ranked: RankedEngine | None = None) -> int:
    """Run a node, which is a rank of a group if `ranked` has nodes."""
    epoch, keys = new_epoch(), load_keys(config)
    ranks: RankProcesses | None = None if ranked is None else ranked.processes
    end = make_endpoint(config, name, engine, keys, epoch)
    exchanges = engine.cache.enabled
    address, cache = address_of_rank(config.bind_host, rank), engine.cache if exchanges else None
    handoff = make_server(end, address, engine.lease_s, ranks, cache)
    client = make_client(end, ranks) if exchanges else None

    def make_node(membership: Membership) -> PrefillNode:
        is_tensor_parallel = ranked is not None and engine.group_steps is None
        prompts: PromptExecutor = RankPrompts(ranked) if ranked is not None and is_tensor_parallel else Prompts(engine)
        # a rank of a group does not measure: a step takes as long as the longest chunk of all ranks
        measures_sharing = engine.group_steps is None
        scheduler = make_scheduler(config, engine)
        return PrefillNode(prompts, scheduler, membership, handoff, client, measures_sharing=measures_sharing)

    return serve(config, name, "prefill", engine, keys, epoch, handoff.address, make_node, ranks, borrows=exchanges)
