"""Pools that take what a GPU has left: how many pages, and an engine whose pools are made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo

from baton.engine.config import EngineConfig
from baton.engine.device_executor import DeviceExecutor
from baton.engine.engine import Engine
from baton.engine.memory_share import RESERVE, Memory, num_pages, rehearsal
from baton.engine.pages import Owner
from baton.engine.rounds import Rounds
from baton.metadata.errors import ConfigError

GIB = 1 << 30
PAGE = 2 << 20
ALONE = Memory(total=140 * GIB, free=120 * GIB, held=17 * GIB, peak=20 * GIB, host=256 * GIB)


def test_pages_take_the_share_less_what_else_needs_memory() -> None:
    assert num_pages(ALONE, 0.9, PAGE) == (int(0.9 * 140 * GIB) - 20 * GIB - RESERVE) // PAGE


def test_two_nodes_of_one_gpu_take_half_each_in_any_order() -> None:
    """The first has measured before the second has any memory, the second after."""
    first = num_pages(ALONE, 0.45, PAGE)
    beside = ALONE._replace(free=ALONE.free - 20 * GIB - first * PAGE)
    assert num_pages(beside, 0.45, PAGE) == first


def test_what_other_processes_hold_is_left_alone() -> None:
    crowded = ALONE._replace(free=30 * GIB)
    found = num_pages(crowded, 0.9, PAGE)
    assert found == (30 * GIB - 3 * GIB - RESERVE) // PAGE, "working memory of 3 GiB comes back after measuring"


def test_the_mirror_fits_in_the_host() -> None:
    assert num_pages(ALONE._replace(host=10 * GIB), 0.9, PAGE) == 9 * GIB // PAGE


def test_a_share_that_leaves_no_page_is_refused_with_one_that_leaves_some() -> None:
    with pytest.raises(ConfigError, match=r"take 20\.0 GiB.*memory_share 0\.10 of this GPU is 14\.0 GiB") as refused:
        num_pages(ALONE, 0.1, PAGE)
    advised = float(str(refused.value).split("--memory-share ")[1].split()[0])
    assert num_pages(ALONE, advised, PAGE) >= 3 > 0.1 / advised


def test_a_full_gpu_is_refused_with_what_others_hold() -> None:
    with pytest.raises(ConfigError, match=r"other processes hold 119\.0 of 140\.0 GiB.*--memory-share 0\.45 each"):
        num_pages(ALONE._replace(free=4 * GIB), 0.9, PAGE)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0, and at most 1"):
        EngineConfig(memory_share=share)


def test_the_first_pools_hold_one_chunk() -> None:
    config = rehearsal(EngineConfig(chunk_tokens=100, page_size=16), torch.device("cuda"))
    assert config.num_pages is not None and (config.num_pages - 1) * 16 > 100
    assert config.chunk_tokens == 100


NAMES = ("standalone", "eagle3", "mtp3-deepseek", "frozen-kv-mtp", "ngram")


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_serves_the_same_text_over_pools_that_were_made_again(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = target_of(name, checkpoint)
    prompt = [each % 400 for each in range(3, 40)]

    def text(solo: Solo) -> tuple[list[int], list[int]]:
        sequence = solo.start(prompt, params(40, seed=1, temperature=1.0))
        for _ in range(6):
            solo.round([sequence], solo.rounds.shape.num_steps)
        return sequence.token_ids, sequence.num_accepted

    drafting: dict[str, Any] = settings(name, model, tmp_path)
    expected = text(Solo(model, num_pages=40, **drafting))
    solo = Solo(model, num_pages=12, **drafting)
    solo.engine.resize(40)
    solo.executor = DeviceExecutor(solo.engine, 4)  # block tables are as long as the pool allows
    solo.rounds = Rounds(solo.executor)
    assert solo.engine.pool.num_usable == 39 and solo.engine.kv.shape[1] == 40
    assert solo.engine.card.context_len == solo.engine.context_len == 39 * solo.engine.pool.page_size
    assert text(solo) == expected


def test_pages_in_use_are_not_taken_away(checkpoint: Callable[..., Path]) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint("llama")), device="cpu", threads=1, num_pages=8))
    engine.pool.allocate(1, Owner.REQUEST)
    with pytest.raises(AssertionError):
        engine.resize(20)
