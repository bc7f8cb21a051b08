"""Nodes whose ranks hand over their own heads: damage on one rank is repaired, and its death ends its node alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faulty import Plan, Strike, run_rank
from faulty_process import FaultyProcess
from node_pair import NodePair, node_pairs, params
from rank_nodes import heads_schema, rank_end
from thinned import every

from baton.engine.ranks import ranked_engine
from baton.engine.ranks.handoffs import make_client, make_server
from baton.engine.ranks.processes import RankProcesses
from baton.metadata.errors import ConfigError, RankLost
from baton.metadata.handoff.schema.kv_layout import Shard

PROMPT_LEN, CHUNK, PAGE_SIZE = 60, 7, 4
DAMAGE = Plan(pages={"flip": 1.0}, most=1)


class Ranks:
    """The faults of this process, which is rank 0 of one node and the only rank of the other, and of rank 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.own = FaultyProcess(monkeypatch, directory)
        self._path = directory / "rank.plan"
        self.plan(1, Plan())
        monkeypatch.setattr(ranked_engine, "run_rank", partial(run_rank, str(self._path)))

    def plan(self, rank: int, plan: Plan) -> None:
        """Set the faults of a rank from now on."""
        if rank == 0:
            self.own.plan(**msgspec.structs.asdict(plan))
            return
        aside = self._path.with_suffix(".new")
        aside.write_bytes(msgspec.json.encode(plan))
        aside.rename(self._path)
        time.sleep(0.05)  # a process reads its plan every 20 ms


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ranks:
    return Ranks(monkeypatch, tmp_path)


def settings(tp: int, transport: str) -> dict[str, Any]:
    """Return settings of a node. Without a prefix cache, each prompt is handed over whole."""
    sizes = {"page_size": PAGE_SIZE, "num_pages": 64, "chunk_tokens": CHUNK}
    return {"tp": tp, "transport": transport, "speculative": "none", "prefix_cache": False, **sizes}


def prompt_of(pair: NodePair) -> list[int]:
    rng = random.Random(2)
    return [rng.randrange(pair.decode.executor.vocab_size) for _ in range(PROMPT_LEN)]


def answer(pair: NodePair, rid: str) -> list[int]:
    """Run a request alone, and return its tokens."""
    pair.submit(rid, prompt_of(pair), params(10))
    return pair.run()[rid, 0].ids


@pytest.mark.parametrize(
    ("sizes", "rank", "transport"),
    every([((1, 2), 0, "local"), ((1, 2), 1, "local"), ((1, 2), 1, "zmq"), ((2, 1), 0, "zmq")], 2, first=1),
    ids=str,
)
def test_a_page_that_is_damaged_on_one_rank_is_pulled_again(
    sizes: tuple[int, int], rank: int, transport: str, ranks: Ranks, checkpoint: Callable[..., Path]
) -> None:
    with node_pairs() as start:
        prefill, decode = (settings(tp, transport) for tp in sizes)
        pair = start(checkpoint("llama"), prefill=prefill, decode=decode)
        clean = answer(pair, "clean")
        assert len(clean) == 10 and pair.decode.handoff.num_checksum_failures == 0
        ranks.plan(rank, DAMAGE)
        assert answer(pair, "damaged") == clean
        assert pair.decode.handoff.num_checksum_failures == 1


@pytest.mark.parametrize("transport", every(["local", "zmq"], 2))  # the test below has the other one
def test_the_death_of_a_decode_rank_in_the_middle_of_a_pull_ends_the_decode_node_alone(
    transport: str, ranks: Ranks, checkpoint: Callable[..., Path]
) -> None:
    with node_pairs(checks_books=False) as start:
        pair = start(checkpoint("llama"), prefill=settings(1, transport), decode=settings(2, transport))
        answer(pair, "clean")
        ranks.plan(1, Plan(rank_strike=Strike(1, "pull", skip=4)))
        pair.submit("r", prompt_of(pair), params(10))
        with pytest.raises(RankLost, match=r"^rank 1 \(process \d+\) ended with exit code -9; all ranks were ended"):
            pair.step_until(lambda: pair.is_done)
        assert pair.prefill.tickets() and not pair.results["r", 0].ids[1:], "the pull had ended before"
        pair.prefill.handoff.close_peer(pair.decode.handoff.end.epoch)  # as the router asks when the node is gone
        while pair.prefill.tickets() or not pair.prefill.is_idle:
            pair.prefill.step()
        ledger = pair.prefill.cache.ledger()
        assert ledger.request == ledger.ticket == 0, ledger


def test_the_death_of_a_prefill_rank_in_the_middle_of_a_pull_ends_the_prefill_node_alone(
    ranks: Ranks, checkpoint: Callable[..., Path]
) -> None:
    with node_pairs(checks_books=False) as start:
        pair = start(checkpoint("llama"), prefill=settings(2, "zmq"), decode=settings(1, "zmq"))
        answer(pair, "clean")
        ranks.plan(1, Plan(rank_strike=Strike(1, "in:pull", skip=1)))
        pair.submit("r", prompt_of(pair), params(10))
        with pytest.raises(RankLost, match=r"^rank 1 \(process \d+\) ended with exit code -9; all ranks were ended"):
            pair.step_until(lambda: pair.is_done)
        assert pair.results["r", 0].ended is None, "the pull had ended before"
        while (failed := pair.results["r", 0].failed) is None:
            pair.decode.step()
            pair._receive()
        assert failed.retryable and failed.code == "transfer_error" and not pair.decode.tickets(), failed
        ledger = pair.decode.cache.ledger()
        assert ledger.request == ledger.ticket == ledger.cache_referenced == 0, ledger


def test_ranks_need_memory_that_processes_share() -> None:
    end = rank_end(heads_schema(4), Shard(0, 2), "prefill")
    end.memory[0].close()
    with pytest.raises(ConfigError, match="no memory that processes share, which the ranks of a node need"):
        make_server(end, "127.0.0.1", 1.0, object.__new__(RankProcesses))


@pytest.mark.parametrize("ranks", [None, object.__new__(RankProcesses)], ids=["one rank", "all heads on rank 0"])
def test_if_rank_0_has_all_heads_no_other_rank_takes_part(ranks: RankProcesses | None) -> None:
    source, target = (rank_end(heads_schema(4), Shard(0, 1), role) for role in ("prefill", "decode"))
    server, client = make_server(source, "127.0.0.1", 1.0, ranks), make_client(target, ranks)
    assert server.sockets() == [server.socket] and client.sockets() == []
    server.close()
    client.close()
