"""`baton prefill`: load the model, join the router, compute prompts and serve their pages."""

from __future__ import annotations

from ..engine.engine import Engine
from ..engine.prompts.executor import PromptExecutor
from ..engine.prompts.prompts import Prompts
from ..engine.ranks.executor import RankPrompts
from ..engine.ranks.handoffs import make_server
from ..engine.ranks.own_work_executor import OwnWorkExecutor
from ..engine.ranks.own_work_prompts import OwnWorkPrompts
from ..engine.ranks.processes import RankProcesses
from ..engine.ranks.ranked_engine import RankedEngine, start_ranks
from ..engine.startup import load_engine, load_keys, make_endpoint, node_id, serve
from ..metadata.bus.addresses import address_of_rank, any_port_of, parse_address
from ..metadata.bus.curve import KeyPair
from ..metadata.bus.descriptors import raise_limit
from ..metadata.bus.membership import Membership
from ..metadata.bus.sockets import new_epoch
from ..metadata.errors import ConfigError
from .config import PrefillConfig
from .node import PrefillNode
from .parts import PrefillParts

_WILDCARDS = ("0.0.0.0", "::", "*")


def run(config: PrefillConfig) -> int:
    """Run until SIGTERM or SIGINT and return the exit status. Raises ConfigError and ModelError before it serves, and
    RankLost."""
    name = node_id(config, "prefill")
    if parse_address(any_port_of(config.bind_host)).host in _WILDCARDS:
        raise ConfigError(
            f"bind_host {config.bind_host} is a wildcard: give the address at which decode nodes reach this node"
        )
    ends = (address_of_rank(config.bind_host, rank) for rank in (0, config.tp - 1))
    keys = load_keys(config, *map(any_port_of, ends))
    raise_limit()
    if config.num_ranks == 1:
        engine = load_engine(config, _rehearse)
        return _serve(config, name, keys, engine, _parts(config, engine, Prompts(engine)))
    with start_ranks(config, num_slots=0, name=name, rehearse=_rehearse) as ranked:
        return _serve(config, name, keys, ranked.engine, parts_on(ranked, config), ranked.processes)


def parts_on(ranked: RankedEngine, config: PrefillConfig) -> PrefillParts:
    """Return the parts of a node with several ranks."""
    engine = ranked.engine
    if engine.num_pools == 1:
        return _parts(config, engine, RankPrompts(ranked))
    sizes = config.max_running, config.chunk(engine.device.type)
    return PrefillParts.on_ranks(OwnWorkPrompts(OwnWorkExecutor(ranked)), engine.caches, *sizes)


def _parts(config: PrefillConfig, engine: Engine, prompts: PromptExecutor) -> PrefillParts:
    """Return the parts of a node with one pool. Prompts of a pool in FP8 have no tails: no library attends to such
    pages, so a chunk behind them takes long, and the first token would come later than the second one gains."""
    sizes = config.max_running, config.chunk(engine.device.type)
    return PrefillParts.on_one(prompts, engine.cache, *sizes, has_tails=config.kv_dtype != "fp8")


def _rehearse(engine: Engine) -> None:
    Prompts(engine).warm_up()


def _serve(
    config: PrefillConfig,
    name: str,
    keys: KeyPair | None,
    engine: Engine,
    parts: PrefillParts,
    ranks: RankProcesses | None = None,
) -> int:
    epoch = new_epoch()
    end = make_endpoint(config, name, engine, keys, epoch)
    handoff = make_server(end, config.bind_host, engine.lease_s, ranks)

    def make_node(membership: Membership) -> PrefillNode:
        return PrefillNode(parts, membership, handoff)

    return serve(config, name, "prefill", engine, keys, epoch, handoff.address, make_node, ranks)
