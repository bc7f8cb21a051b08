"""Times of `baton plan` from the reports of other benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from measure_times import Pool, pool_of, times_of
from published_configs import PUBLISHED, write_config

from baton.deploy.simulation.times import ChunkPoint, HandoffPoint, MixedPoint, RoundPoint, read
from baton.engine.checkpoint.read_config import read_model_config

ENGINE: dict[str, Any] = {
    "model": "8b",
    "dtype": "bfloat16",
    "device": "G",
    "commit": "c1",
    "date": "2026-01-01",
    "decode": [{"batch": 1, "step_ms": 4.0}, {"batch": 8, "step_ms": 4.5}],
    "mixed": [{"batch": 1, "longest": 15360, "step_ms": 4.5}, {"batch": 8, "longest": 15360, "step_ms": 5.0}],
    "small-prompts": [{"tokens": 64, "wall_ms": 5.0}, {"tokens": 1024, "wall_ms": 24.0}],
    "prefill": [
        {"prompts": 1, "tokens": 1024, "ms": 25.0},
        {"prompts": 1, "tokens": 8192, "ms": 212.0},
        {"prompts": 16, "tokens": 2048, "ms": 760.0},
    ],
    "turns": [{"tokens": 256, "prefix": 15360, "ms": 12.5}],
    "joint": [
        {"batch": 8, "tokens": 64, "steps": 0, "is_mixed": True, "round_ms": 4.5, "joint_ms": 5.0},
        {"batch": 8, "tokens": 64, "steps": 5, "is_mixed": True, "round_ms": 7.5, "joint_ms": 9.0},
        {"batch": 64, "tokens": 64, "steps": 0, "is_mixed": False, "round_ms": 7.0, "joint_ms": 12.0},
    ],
}
SYSTEMS = {64: {"ttft_ms_p50": 9.0, "itl_ms_p50": 6.0}, 1024: {"ttft_ms_p50": 29.0, "itl_ms_p50": 9.0}}


def test_reports_become_times(tmp_path: Path) -> None:
    times = times_of(ENGINE, SYSTEMS, 131072, Pool(1000, 7))
    assert times.rounds == (RoundPoint(1, 1088, 4.0), RoundPoint(8, 1088, 4.5), RoundPoint(1, 15424, 4.5))
    assert times.chunks == (
        ChunkPoint(64, 5.0),
        ChunkPoint(1024, 24.0),
        ChunkPoint(8192, 212.0),
        ChunkPoint(8192, 190.0, prompts=4),
        ChunkPoint(256, 12.5, history=15360),
    )
    assert times.handoffs == (HandoffPoint(64, 2.0), HandoffPoint(1024, 5.0)) and times.router_ms == 5.0
    assert times.joints == (MixedPoint(8, 64, 0.5),)
    assert "c1" in times.sources[0] and times.context_len == 131072
    assert (times.pool_tokens, times.tail_sequences) == (1000, 7)
    (tmp_path / "t.json").write_bytes(msgspec.json.encode(times))
    assert read(tmp_path / "t.json") == times


def test_the_pool_holds_what_weights_and_work_leave(tmp_path: Path) -> None:
    llama = read_model_config(write_config(tmp_path, PUBLISHED["Llama-3.1-8B"]))
    assert pool_of(100 << 30, 16 << 30, llama) == Pool(pytest.approx((90 - 16 - 3) * (1 << 13), rel=1e-3), None)
    assert pool_of(1 << 30, 16 << 30, llama) == Pool(1, None)


def test_the_pool_of_gpt_oss_holds_more_tokens_with_tail_pages(tmp_path: Path) -> None:
    """Half of its layers see a window. Without tail pages a token takes 48 KiB."""
    pool = pool_of(80 << 30, 14 << 30, read_model_config(write_config(tmp_path, PUBLISHED["gpt-oss-20b"])))
    without = ((72 - 14 - 3) << 30) // (48 << 10)
    assert 1.5 < pool.tokens / without < 1.7
    assert pool.tail_sequences is not None and pool.tail_sequences > 1000


@pytest.mark.parametrize(
    ("name", "size", "kept", "of_one", "tokens"),
    [
        ("Qwen3.5-35B-A3B", 36, 20_480, 571_146_240, 480_000),
        ("Qwen3-Next-80B-A3B", 82, 24_576, 685_375_488, 15_000),
        ("Kimi-Linear-48B-A3B", 50, 8_064, 587_530_240, 860_000),
    ],
)
def test_states_take_most_of_a_pool_and_long_texts_fit_beside_them(
    name: str, size: int, kept: int, of_one: int, tokens: int, tmp_path: Path
) -> None:
    """One of four tail pages of 64 tokens that a sequence holds has states of 42 to 76 MB and 64 rows. `size`: of all
    weights, GB. Chunks of 8,192 tokens leave few tail pages for sequences of Qwen3-Next."""
    pool = pool_of(141 * 10**9, size * 10**9, read_model_config(write_config(tmp_path, PUBLISHED[name])))
    assert pool.tail_sequences is not None and pool.tail_bytes == of_one
    used = pool.tokens * kept + pool.tail_sequences * of_one
    assert used == pytest.approx(0.9 * 141e9 - size * 1e9 - (3 << 30), rel=0.02) and pool.tokens > tokens


@pytest.mark.parametrize(
    ("name", "num_gpus", "size", "kept", "tail"),
    [("Flash", 2, 159, 6_880, 95_872), ("Pro", 8, 857, 9_848, 137_920)],
)
def test_the_pool_of_deepseek_v4_is_that_of_a_rank(
    name: str, num_gpus: int, size: int, kept: int, tail: int, tmp_path: Path
) -> None:
    """Each rank has all entries and tail pages, so the ranks divide the weights alone. `size`: of all weights, GB."""
    config = read_model_config(write_config(tmp_path, PUBLISHED[f"DeepSeek-V4-{name}"]))
    pool = pool_of(141 * 10**9, size * 10**9 // num_gpus, config)
    assert pool.tail_sequences is not None and pool.tail_sequences > 64 and pool.tokens % 128 == 0
    used = pool.tokens * kept + pool.tail_sequences * 3 * 128 * tail
    assert used == pytest.approx(0.9 * 141e9 - size * 1e9 / num_gpus - (3 << 30), rel=0.02)
