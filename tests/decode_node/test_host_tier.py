"""Nodes with a host tier: what comes back from it gives the same text as what is computed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drafters
import msgspec
import pytest
from node_pair import ROUTER_EPOCH, NodePair, node_pairs, params
from thinned import thinned

from baton.engine.state.pages import Owner
from baton.engine.state.prefix_cache import PrefixCache
from baton.engine.tiers.page_files import MAGIC, PageHeader
from baton.metadata.wire.membership import Flush

PAGE_SIZE = 4
SETTINGS: dict[str, Any] = {"page_size": PAGE_SIZE, "chunk_tokens": 16}
MakePair = Callable[..., NodePair]


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    with quick_pairs() as make:
        yield make


@contextmanager
def quick_pairs() -> Iterator[MakePair]:
    """Start pairs whose tiers are always sooner than computing, whatever this machine measures."""
    with node_pairs() as start:

        def make(model: Path, **options: Any) -> NodePair:
            pair = start(model, **options)
            for node in (pair.prefill, pair.decode):
                if node.cache.tier is not None:
                    node.cache.tier.compute_token_s = lambda: 1.0
            return pair

        yield make


def run_all(pair: NodePair, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Run all prompts one after the other. Return the tokens of each."""
    texts: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        rid = f"r{len(pair.results)}"
        pair.submit(rid, prompt, params(6, seed=index, temperature=float(index % 2)), **options)
        result = pair.run()[rid, 0]
        assert result.failed is None, result.failed
        texts.append(result.ids)
    return texts


@pytest.mark.parametrize("is_local", [False, True])
def test_a_second_pass_over_three_times_the_pool_computes_only_what_is_new(
    is_local: bool, checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    rng = random.Random(1)
    prompts = [rng.choices(range(50), k=40) for _ in range(12)]
    computed: list[int] = []
    texts: list[list[list[int]]] = []
    for tier in ({}, {"host_cache_gb": 0.01}):
        node = {**SETTINGS, **tier, "num_pages": 41}
        pair = make_pair(checkpoint("llama"), prefill=node, decode=node)
        texts += [run_all(pair, prompts, is_local=is_local)]
        member = pair.decode if is_local else pair.prefill
        before = member.stats().computed_tokens
        texts += [run_all(pair, prompts, is_local=is_local)]
        computed.append(member.stats().computed_tokens - before)
    assert all(each == texts[0] for each in texts)
    num_last = 3 if is_local else 4  # a decode node computes the last token in a round
    assert computed[1] == 12 * num_last < computed[0] / 8, computed


TIER: dict[str, Any] = {"host_cache_gb": 0.02}
MODELS = ["llama", "gpt_oss", "qwen3_next", "deepseek_v2", "eagle3", "standalone", "mtp-deepseek", "eagle3-on-gpt-oss"]


def conversations(num: int, num_turns: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of several conversations in turns. Each goes on behind the one before, and all begin alike."""
    rng = random.Random(seed)
    start = rng.choices(range(1, 50), k=9)
    texts = [list(start) for _ in range(num)]
    prompts: list[list[int]] = []
    for _ in range(num_turns):
        for text in texts:
            text += rng.choices(range(1, 50), k=rng.randint(3, 19))
            prompts.append(list(text))
    return prompts


def play(pair: NodePair, prompts: list[list[int]], step: Callable[[], object] = lambda: None) -> dict[Any, list[int]]:
    """Submit the prompts, a few at a time, with all kinds of requests, and call `step` before each step of the nodes.
    Return the tokens of each choice."""
    for index, prompt in enumerate(prompts):
        sampling = params(9, temperature=float(index % 2), seed=index)
        pair.submit(f"r{index}", prompt, sampling, n=1 + (index % 5 == 0), is_local=index % 3 == 0)
        while len(pair._waiting) > 2 or (index == len(prompts) - 1 and not pair.is_done):
            step()
            pair.step()
    assert all(result.failed is None for result in pair.results.values()), pair.results
    return {key: result.ids for key, result in pair.results.items()}


class Evictions:
    """Evicts pages of both nodes of a pair at random moments."""

    def __init__(self, pair: NodePair) -> None:
        self._pair, self._rng = pair, random.Random(3)

    def __call__(self) -> None:
        rng = self._rng
        for cache in (self._pair.prefill.cache, self._pair.decode.cache):
            if rng.random() < 0.2:
                cache.evict(rng.randint(1, 30))
            if cache.pool.num_tails and rng.random() < 0.1:
                cache.pool.release(cache.allocate_tails(rng.randint(0, cache.available_tails), Owner.REQUEST))


GATE = {("llama", 0.0005), ("qwen3_next", 0.02), ("eagle3-on-gpt-oss", 0.0005)}


@pytest.mark.parametrize(
    ("name", "host_cache_gb"),
    thinned(itertools.product(MODELS, [0.0005, 0.02]), lambda _, *cell: cell in GATE),
)
def test_evictions_at_every_moment_change_no_token(
    name: str, host_cache_gb: float, checkpoint: Callable[..., Path], tmp_path: Path, make_pair: MakePair
) -> None:
    is_drafter = name in drafters.ALL
    model = drafters.target_of(name, checkpoint) if is_drafter else checkpoint(name)
    speculation = drafters.settings(name, model, tmp_path) if is_drafter else {}
    prompts = conversations(4, 4)
    common = SETTINGS | speculation
    expected = play(make_pair(model, prefill=common, decode=common | {"num_pages": 400}), prompts)
    tight = common | {"num_pages": 48, "host_cache_gb": host_cache_gb}
    pair = make_pair(model, prefill=tight, decode=tight)
    assert play(pair, prompts, Evictions(pair)) == expected
    assert min(num_restored(pair)) > 0


@pytest.mark.parametrize(
    ("role", "ranks"),
    thinned([("decode", {"tp": 2}), ("prefill", {"tp": 2}), ("decode", {"dp_attention": 2})], lambda i, *_: i == 0),
)
def test_ranks_store_and_restore_their_parts_of_the_same_pages(
    role: str, ranks: dict[str, int], checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    model, prompts = checkpoint("llama"), conversations(4, 4)
    expected = play(make_pair(model, prefill=SETTINGS, decode=SETTINGS | {"num_pages": 400}), prompts)
    tight = SETTINGS | TIER | {"num_pages": 48}
    pair = make_pair(model, **{"prefill": tight, "decode": tight, role: tight | ranks})
    assert play(pair, prompts, Evictions(pair)) == expected
    assert min(num_restored(pair)) > 0


def num_restored(pair: NodePair) -> list[int]:
    """Return how many pages each node got back from its tier."""
    figures = [node.stats().host for node in (pair.prefill, pair.decode)]
    return [each.num_restored for each in figures if each is not None]


def test_preempted_sequences_come_back_from_the_tier(checkpoint: Callable[..., Path], make_pair: MakePair) -> None:
    rng = random.Random(0)
    prompts = [rng.choices(range(50), k=10) for _ in range(12)]
    computed: list[int] = []
    texts: list[dict[Any, list[int]]] = []
    for tier in ({}, TIER):
        pair = make_pair(checkpoint("llama"), prefill=SETTINGS, decode={**SETTINGS, **tier, "num_pages": 20})
        for index, prompt in enumerate(prompts):
            pair.submit(f"r{index}", prompt, params(20, temperature=float(index % 2), seed=index))
        ended = [result.ended for result in pair.run().values()]
        preemptions = [each for end in ended if end is not None for each in end.preemptions]
        assert len(preemptions) > 3
        assert (sum(each.num_restored for each in preemptions) > 0) == bool(tier)
        texts.append({key: result.ids for key, result in pair.results.items()})
        computed.append(pair.decode.stats().computed_tokens)
    assert texts[0] == texts[1]
    assert computed[1] < computed[0] / 2, computed


def test_a_flush_leaves_nothing_in_any_tier_and_salts_share_nothing(
    checkpoint: Callable[..., Path], make_pair: MakePair
) -> None:
    node = {**SETTINGS, **TIER, "num_pages": 41}
    pair = make_pair(checkpoint("llama"), prefill=node, decode=node)
    prompt = list(range(1, 40))

    def num_cached(rid: str, salt: str) -> int:
        pair.submit(rid, prompt, params(4), cache_salt=salt)
        ended = pair.run()[rid, 0].ended
        assert ended is not None
        return ended.num_cached

    assert num_cached("first", "a") == 0
    pair.prefill.cache.evict(40)
    pair.decode.cache.evict(40)
    report = pair.inspect("prefill")
    assert report.pool.cache == 0 and report.host_tier is not None and report.host_tier.pages.cache == 9
    assert num_cached("other", "b") == 0
    assert num_cached("same", "a") == 36
    assert pair.done["same"].times.num_restored == 36
    assert pair.results["same", 0].ended.num_restored == 36, "the decode node had the pages, too"
    for name in ("prefill", "decode"):
        pair.send(name, Flush(router_epoch=ROUTER_EPOCH, query=0))
        pair.step_until(lambda: pair.ledgers and pair.ledgers[-1].query == 0)
        pair.ledgers.clear()
        report = pair.inspect(name)
        assert report.pool.cache == 0 and report.host_tier is not None and report.host_tier.pages.cache == 0
    assert num_cached("flushed", "a") == 0


FILED: list[tuple[str, bool, int]] = [  # model, whether the decode node computes, its ranks
    ("llama", False, 1),
    ("qwen3_next", True, 1),
    ("llama", True, 1),
    ("llama", True, 2),
    ("gpt_oss", False, 2),
]


@pytest.mark.parametrize(("name", "is_local", "tp"), thinned(FILED, lambda i, *_: i in (0, 1, 3)))
def test_conversations_go_on_after_a_restart_by_files(
    name: str, is_local: bool, tp: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, prompts = checkpoint(name), conversations(4, 2)[4:]
    longer = [[*prompt, 7, 8, 9, 10, 11] for prompt in prompts]
    plain = SETTINGS | {"num_pages": 60}
    tiered = plain | {"host_cache_gb": 0.05, "disk_cache": str(tmp_path / "files"), "tp": tp}

    def run(settings: dict[str, Any], cases: list[list[int]]) -> tuple[list[list[int]], int]:
        """Return the texts, and how many tokens the node that computes prompts has computed."""
        role = "decode" if is_local else "prefill"
        with quick_pairs() as make:
            pair = make(model, **{"prefill": plain, "decode": plain, role: settings})
            member = pair.decode if is_local else pair.prefill
            settle(member.cache)
            texts = run_all(pair, cases, is_local=is_local)
            num_computed = member.stats().computed_tokens
            member.cache.evict(60)
            settle(member.cache)
            member.cache.close()
        return texts, num_computed

    expected, num_whole = run(plain, longer)
    run(tiered, prompts)
    damaged = last_page(tmp_path / "files")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")  # in the part of the last rank
    texts, num_computed = run(tiered, longer)
    assert texts == expected
    assert num_computed < num_whole / 2


def last_page(directory: Path) -> Path:
    """Return the file of a page that no other page is behind."""
    files = sorted(directory.glob("*/*.page"))
    contents = [file.read_bytes()[len(MAGIC) + 16 :] for file in files]  # behind the digest
    headers = [data[4 : 4 + int.from_bytes(data[:4], "big")] for data in contents]
    parents = {msgspec.msgpack.decode(header, type=PageHeader).parent for header in headers}
    return next(file for file in files if bytes.fromhex(file.stem) not in parents)


def settle(cache: PrefixCache) -> None:
    """Let the disk tier, if there is one, do all that it was asked for."""
    disk = None if cache.tier is None else cache.tier.disk
    while disk is not None and not (disk.thread.is_idle and not disk.thread._events and not disk._found):
        cache.tend()
