"""Pools that take what a GPU has left: how many pages, and an engine whose pools are made again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafters import settings, target_of
from node_pair import params
from solo import Solo

from baton.engine import engine as engines
from baton.engine import startup
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.rounds import Rounds
from baton.engine.state.memory_share import RESERVE, Memory, memory_to_start, num_pages, rehearsal_pages
from baton.engine.state.pages import Owner
from baton.metadata.errors import ConfigError, OutOfMemory
from baton.metadata.handoff.schema.kv_layout import KvLayout
from baton.metadata.wire.node_info import PoolLayout

GIB = 1 << 30
PAGE = 2 << 20
DRIVER = GIB // 2
ALONE = Memory(total=140 * GIB, free=123 * GIB - DRIVER, held=17 * GIB, peak=20 * GIB, host=256 * GIB)


def bytes_of(num_pages: int) -> int:
    return num_pages * PAGE


def test_pages_take_the_share_less_what_else_needs_memory() -> None:
    assert num_pages(ALONE, 0.9, bytes_of) == (int(0.9 * 140 * GIB) - 20 * GIB - RESERVE) // PAGE


def test_two_nodes_of_one_gpu_take_half_each_in_any_order() -> None:
    """The first has measured before the second has any memory, the second after."""
    first = num_pages(ALONE, 0.45, bytes_of)
    beside = ALONE._replace(free=ALONE.free - DRIVER - 20 * GIB - first * PAGE)
    assert num_pages(beside, 0.45, bytes_of) == first


def test_what_other_processes_hold_or_need_later_is_left_alone() -> None:
    """A neighbour holds less than it needs while it captures graphs, or serves little."""
    crowded = ALONE._replace(free=30 * GIB)
    found = num_pages(crowded, 0.9, bytes_of)
    assert found == (30 * GIB - 3 * GIB - 14 * GIB) // PAGE, "working memory of 3 GiB comes back after measuring"


def test_a_node_may_be_given_the_whole_gpu() -> None:
    found = num_pages(ALONE, 1.0, bytes_of) * PAGE
    assert found == pytest.approx(140 * GIB - 20 * GIB - RESERVE - DRIVER, abs=PAGE)


def test_the_mirror_fits_in_the_nodes_share_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    """So two nodes that share a GPU do not fill the host together. Without a mirror nothing of the host is needed."""
    assert num_pages(ALONE._replace(host=10 * GIB), 0.45, bytes_of) == int(4.5 * GIB) // PAGE
    assert "the host's memory bounds the pools to 2304 of" in caplog.text
    assert num_pages(ALONE._replace(host=None), 0.45, bytes_of) == num_pages(ALONE, 0.45, bytes_of)


def test_a_share_that_leaves_no_page_is_refused_with_one_that_leaves_some() -> None:
    with pytest.raises(ConfigError, match=r"take 21\.5 GB.*memory_share 0\.10 of this GPU is 15\.0 GB") as refused:
        num_pages(ALONE, 0.1, bytes_of)
    advised = float(str(refused.value).split("--memory-share ")[1].split()[0])
    assert num_pages(ALONE, advised, bytes_of) >= 3 > 0.1 / advised


def test_a_full_gpu_is_refused_with_what_others_hold() -> None:
    words = r"other processes and the driver hold 127\.8 GB of the 150\.3 GB.*--memory-share 0\.45 each"
    with pytest.raises(ConfigError, match=words):
        num_pages(ALONE._replace(free=4 * GIB), 0.9, bytes_of)


def test_a_gpu_that_is_too_small_is_refused_as_such() -> None:
    small = ALONE._replace(total=20 * GIB, free=3 * GIB - DRIVER)
    for share in (0.45, 0.9, 1.0):
        with pytest.raises(ConfigError, match=r"this GPU has 21\.5 GB: it is too small for the model"):
            num_pages(small, share, bytes_of)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0, and at most 1"):
        EngineConfig(memory_share=share)


def test_the_first_pools_hold_one_chunk() -> None:
    assert (rehearsal_pages(100, 16) - 1) * 16 > 100


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 140 GiB, of which 3 GiB are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (3 * GIB, 140 * GIB))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), OutOfMemory("a round")])
@pytest.mark.usefixtures("on_gpu")
def test_a_start_without_memory_is_refused_in_words(error: Exception) -> None:
    words = (
        r"out of memory before the node could serve: 3\.2 GB of 150\.3 GB are free; lower chunk_tokens.*--memory-share"
    )
    with pytest.raises(ConfigError, match=words), memory_to_start():
        raise error


@pytest.mark.usefixtures("on_gpu")
def test_loading_and_making_the_node_are_parts_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(startup, "Engine", fails)
    with pytest.raises(ConfigError, match="out of memory before the node could serve"):
        startup.load_engine(EngineConfig(device="cpu", threads=1))
    monkeypatch.setattr(startup, "make_membership", lambda *_, **__: SimpleNamespace())
    with pytest.raises(ConfigError, match="out of memory before the node could serve"):
        startup.serve(EngineConfig(), "d", "decode", None, None, "e", "", fails)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_gpu")
def test_pools_that_do_not_fit_name_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engines, "pool_zeros", full)
    layouts = [KvLayout.of(PoolLayout(24, 8, 128, "bfloat16"), 1024)]  # 96 MiB per page
    with pytest.raises(ConfigError, match=r"num_pages 64 need 6\.4 GB.*3\.2 GB free; use 32 pages or fewer"):
        engines._on_gpu(layouts, [64], torch.device("cuda"), is_given=True)
    with pytest.raises(ConfigError, match=r"needs 6\.4 GB.*--memory-share 0\.45 each") as refused:
        engines._on_gpu(layouts, [64], torch.device("cuda"), is_given=False)
    assert "num_pages" not in str(refused.value) and "num-pages" not in str(refused.value)


@pytest.mark.parametrize("given", [None, 50])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_pools_are_fitted_only_if_the_work_of_service_can_be_rehearsed(
    given: int | None, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without our kernels a round is many operations of torch, whose memory nobody has measured."""
    made, fitted = list[Any](), list[Any]()

    def make(config: EngineConfig, *_: object, num_pages: int | None) -> Any:
        made.append((config.num_pages, num_pages))
        speculation, pool = SimpleNamespace(describe=str), SimpleNamespace(num_usable=1, page_size=16)
        card, device = SimpleNamespace(name="m"), torch.device("cuda")
        parts = {"speculation": speculation, "pool": pool, "card": card, "device": device}
        return SimpleNamespace(model_dir=Path(), dtype_name="float32", warm_up=int, **parts)

    monkeypatch.setattr(startup, "Engine", make)
    monkeypatch.setattr(startup, "use_threads", lambda _: None)
    monkeypatch.setattr(startup, "choose_device", torch.device)
    monkeypatch.setattr(startup, "captures", lambda _: has_kernels)
    monkeypatch.setattr(startup, "tune_products", lambda *_, **__: None)
    monkeypatch.setattr(startup, "fit_pools", lambda *_: fitted.append(1))
    config = EngineConfig(device="cuda", num_pages=given)
    startup.load_engine(config)
    fits = has_kernels and given is None
    assert made == [(given, rehearsal_pages(config.chunk("cuda"), 16) if fits else None)]
    assert len(fitted) == fits


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
