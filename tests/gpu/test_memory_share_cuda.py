"""A node's pools on a GPU take the share of its memory that is left, and no more in service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.decode_node.config import DecodeConfig
from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.prompts.prompts import Prompts
from baton.engine.rounds.device_executor import executor_of
from baton.engine.startup import load_engine
from baton.engine.state.memory_share import RESERVE
from baton.kernels.operations import preferring
from baton.metadata.errors import ConfigError
from baton.prefill_node.config import PrefillConfig

MAX_RUNNING = 8
GRAPHS = 64 << 20  # bytes by which all graphs may take more than the largest


def config_of(kind: type[EngineConfig], model: Path, share: float) -> EngineConfig:
    return kind(
        model=str(model),
        device="cuda",
        memory_share=share,
        transport="cuda",  # otherwise a host with less memory than the GPU bounds the pools
        max_running=MAX_RUNNING,
        tune=False,
        speculative="none",
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_takes_its_share_and_no_more(role: str, checkpoint: Callable[..., Path]) -> None:
    total = torch.cuda.mem_get_info()[1]
    share = 0.05
    with preferring("triton"):
        if role == "decode":
            config = config_of(DecodeConfig, checkpoint("llama"), share)
            engine = load_engine(config, lambda engine: executor_of(engine, MAX_RUNNING).rehearse(expects_prompts=True))
            executor_of(engine, MAX_RUNNING).warm_up(expects_prompts=True)
        else:
            config = config_of(PrefillConfig, checkpoint("llama"), share)
            engine = load_engine(config, lambda engine: Prompts(engine).warm_up())
            Prompts(engine).warm_up()
    held = torch.cuda.max_memory_reserved() + engine.pool_bytes
    assert share * total - 2 * RESERVE < held <= share * total - RESERVE + GRAPHS
    assert engine.kv[:, -1].count_nonzero() == 0, "the last page is there"


def test_a_share_that_is_too_small_names_one_that_is_not(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"no page of KV fits.*use --memory-share 0\.\d\d or more"):
        load_engine(config_of(DecodeConfig, checkpoint("llama"), 0.001))


def test_pages_beyond_the_device_are_refused(checkpoint: Callable[..., Path]) -> None:
    """By the GPU, or before by a host that has less memory than the GPU."""
    free = torch.cuda.mem_get_info()[0]
    model = str(checkpoint("llama"))
    page_bytes = Engine(EngineConfig(model=model, device="cuda", num_pages=3)).pool_bytes // 3
    too_many = int(1.2 * free) // page_bytes
    with pytest.raises(ConfigError, match=r"num_pages \d+ need .* [GM]B free; use \d+ pages or fewer|\d+ pages need"):
        Engine(EngineConfig(model=model, device="cuda", num_pages=too_many))
