"""The start of the ranks of a node: what cannot work is refused before, and a rank that fails ends the start."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import settings
from forked import forked_ranks
from rank_functions import vanish

from baton.decode_node.config import DecodeConfig
from baton.engine.config import EngineConfig
from baton.engine.ranks import ranked_engine
from baton.engine.ranks.executor import RankExecutor
from baton.engine.ranks.ranked_engine import RankedEngine, check_group, check_ranks
from baton.engine.work import BatchRow, Recompute
from baton.metadata.errors import ConfigError, RankLost


def test_a_node_refuses_a_number_of_ranks_before_they_start(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("llama")
    drafter: dict[str, Any] = settings("standalone", model, tmp_path)
    config = DecodeConfig(model=str(model), device="cpu", tp=2, **drafter)
    check_ranks(config, 2)
    with pytest.raises(ConfigError, match=rf"the model in {model} has 4 query heads, which 3 ranks cannot divide"):
        check_ranks(config, 3)
    draft = Path(drafter["draft_model"]) / "config.json"
    draft.write_text(draft.read_text().replace('"intermediate_size": 128', '"intermediate_size": 127'))
    with pytest.raises(ConfigError, match=r"the drafter in \S+ has 127 hidden units, which 2 ranks cannot divide"):
        check_ranks(config, 2)


def test_a_group_refuses_a_model_that_its_ranks_cannot_divide(checkpoint: Callable[..., Path]) -> None:
    llama, mixture = str(checkpoint("llama")), str(checkpoint("qwen3_moe", intermediate_size=96))
    check_group(EngineConfig(model=llama, device="cpu", dp_attention=8))  # more ranks than heads
    with pytest.raises(ConfigError, match=rf"the model in {llama} has 128 hidden units, which 3 ranks cannot divide"):
        check_group(EngineConfig(model=llama, device="cpu", dp_attention=3))
    check_group(EngineConfig(model=mixture, device="cpu", dp_attention=3))
    with pytest.raises(ConfigError, match=rf"{mixture} has 48 hidden units of an expert, which 32 ranks cannot"):
        check_group(EngineConfig(model=mixture, device="cpu", dp_attention=32))


def test_too_few_gpus_are_refused(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranked_engine, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"--tp 2 needs 2 GPUs, and this node sees 1 GPU"):
        check_ranks(DecodeConfig(model=str(checkpoint("llama"))), 2)
    with pytest.raises(ConfigError, match=r"--dp-attention 4 needs 4 GPUs, and this node sees 1 GPU"):
        check_group(EngineConfig(dp_attention=4))


def test_a_start_that_fails_says_why_and_leaves_no_rank(checkpoint: Callable[..., Path]) -> None:
    """All ranks fail at once here, and the error is that of rank 0."""
    config = DecodeConfig(model=str(checkpoint("llama")), device="cpu", threads=1, num_pages=2)
    with forked_ranks(), pytest.raises(ConfigError, match="num_pages 2 is too small"):
        RankedEngine(config, 2, num_slots=2)
    assert not multiprocessing.active_children()


@pytest.mark.timing
def test_a_rank_that_ends_before_it_meets_the_others_ends_the_start_at_once(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group would wait for it for START_TIMEOUT_S."""
    monkeypatch.setattr(ranked_engine, "run_rank", vanish)
    monkeypatch.setattr(ranked_engine, "START_TIMEOUT_S", 60.0)
    config = DecodeConfig(model=str(checkpoint("llama")), device="cpu", threads=1, num_pages=16, speculative="none")
    begun = time.monotonic()
    words = r"^rank 1 \(process \d+\) ended with exit code -9; all ranks were ended"
    with forked_ranks(), pytest.raises(RankLost, match=words):
        RankedEngine(config, 2, num_slots=2)
    assert time.monotonic() - begun < 50


def test_the_error_of_a_rank_is_in_that_of_the_node(checkpoint: Callable[..., Path]) -> None:
    """Rank 1 cannot do its work, here because it gets none. Rank 0 waits for it in the work, and ends at once."""
    config = DecodeConfig(model=str(checkpoint("llama")), device="cpu", threads=1, num_pages=16, speculative="none")
    with forked_ranks(), RankedEngine(config, 2, num_slots=2, name="decode-0") as ranked:
        [pid] = ranked.processes.pids
        ranked.processes.send(1, b"\xff")
        work = Recompute([BatchRow([1, 2, 3], 0, [1])], [[1, 2, 3, 4]])
        words = rf"rank 1 \(process {pid}\) ended with exit code 1: ProtocolError: a frame of 1 bytes holds no work"
        with pytest.raises(RankLost, match=words):
            RankExecutor(ranked).submit(work)
        assert not multiprocessing.active_children()
