"""Both nodes run the Triton kernels in Triton's interpreter, with chunks, a prefix hit, joins and a preemption.

CUDA graphs are left out: the functions that they capture run directly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import drafters
import pytest
import triton_device
from heads import write_head
from matrix import PAGE_SIZE
from node_pair import NodePair, params
from thinned import thinned

from baton.engine.engine import Engine
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.kernels.operations import preferring

pytestmark = pytest.mark.skipif(
    not triton_device.IS_INTERPRETED, reason="a GPU runs the kernels themselves (tests/gpu)"
)

PROMPTS = [[17, 4, 250, 33, 99, 8, 301, 12, 76], [5, 6, 7], [17, 4, 250, 33, 99, 8, 9, 9, 9, 9]]


def outputs(model: Path, **settings: Any) -> list[list[int]]:
    both = {"page_size": PAGE_SIZE, "num_pages": 64, "max_running": 4, "chunk_tokens": 8, **settings}
    with closing(NodePair(model, prefill=both, decode=both, overlaps=True)) as pair:
        for index, prompt in enumerate(PROMPTS):
            pair.submit(f"{index}", prompt, params(3, temperature=float(index % 2), seed=index))
        pair.step_until(lambda: len(pair.decode.scheduler.running) > 1)
        pair.decode.settle()
        if pair.decode.scheduler.running:
            pair.decode.scheduler.preempt(pair.decode.scheduler.running[-1])
        results = pair.run(500)
        pair.check_books()
        assert pair.decode.stats().preemptions > 0
        return [results[f"{index}", 0].ids for index in range(len(PROMPTS))]


@pytest.mark.timeout(600)  # the interpreter is slow on a busy machine
@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    thinned([("heads", "auto"), ("latents", "auto"), ("heads", "fp8"), ("indexers", "auto")], lambda i, *_: i == 1),
)
def test_output_is_that_of_the_cpu_kernels(
    kind: str, kv_dtype: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "indexers":
        model = checkpoint("glm_moe_dsa", index_topk=4)
    else:
        model = (
            checkpoint("deepseek_v3", q_lora_rank=48) if kind == "latents" else drafters.target_of("eagle3", checkpoint)
        )
    head = write_head(tmp_path / "eagle3", "eagle3", model)
    settings: dict[str, Any] = {"speculative": "eagle3", "draft_model": str(head), "draft_steps": 2}
    expected = outputs(model, kv_dtype=kv_dtype)
    monkeypatch.setattr(DeviceExecutor, "warm_up", lambda self, progress, **_: None)
    monkeypatch.setattr(Engine, "capture_prompts", lambda self, progress: None)
    with preferring("triton"):
        assert outputs(model, **settings, kv_dtype=kv_dtype) == expected
