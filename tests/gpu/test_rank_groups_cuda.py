"""Groups of ranks on CUDA: output is that of a CPU without speculation, or of transformers. The ranks share one GPU, or
have one each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import drafters
import pytest
import torch
from cluster import Cluster
from gpu_nodes import SPECULATIONS
from matrix import CELLS, PAGE_SIZE, Plain, run_cell
from node_pair import NodePair
from own_mtp import with_qwen_mtp
from ties import Reference
from tokenizers import Tokenizer

from baton.engine.ranks import ranked_engine

DEMO = Path(__file__).parents[2] / "deploy" / "demo"


@pytest.fixture(params=["one-gpu", "two-gpus"])
def _devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two ranks share a GPU, which nodes refuse, if there is one."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    if request.param == "two-gpus":
        if torch.cuda.device_count() < 2:
            pytest.skip("one GPU")
        return
    orders = ranked_engine.orders
    monkeypatch.setattr(ranked_engine, "orders", lambda num_gpus, _: orders(num_gpus, [0, 0]))
    monkeypatch.setattr(ranked_engine, "check_devices", lambda *_: None)


@pytest.fixture(scope="module")
def plain() -> Callable[[], Plain]:
    """The reference, on the CPU."""
    return functools.cache(lambda: Plain.of(DEMO))


@pytest.mark.usefixtures("_devices")
@pytest.mark.parametrize("transport", ["cuda", "local"])
@pytest.mark.parametrize("name", ["none", "eagle3"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_output_is_that_of_the_cpu(
    prefill: int, decode: int, name: str, transport: str, plain: Callable[[], Plain]
) -> None:
    """The other rank of the group joins every step."""
    reference = plain()
    both: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": PAGE_SIZE, "num_pages": 160}
    both |= {"max_running": 4, "chunk_tokens": 64, "transport": transport, **SPECULATIONS[name]}
    ours, theirs = {**both, "dp_attention": prefill}, {**both, "dp_attention": decode}
    with closing(NodePair(DEMO, prefill=ours, decode=theirs)) as pair:
        for cell in CELLS[:2]:
            run_cell(pair, cell, reference.cases, "mixed")
        pair.check_books()
        stats = pair.decode.rounds.stats
    assert name == "none" or stats.num_drafted > stats.num_accepted > 0, stats


@pytest.mark.usefixtures("_devices")
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", [drafters.STREAM_MTP, "mtp-of-glm-dsa", "mtp-of-mimo", "mtp-of-qwen3-next"])
def test_state_of_each_kind_between_unequal_ranks(
    name: str, prefill: int, decode: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Entries, index keys, windows and states, with drafts by the model's own layer. Tensor-parallel ranks."""
    if name == "mtp-of-qwen3-next":
        model, drafts = (
            with_qwen_mtp(checkpoint("qwen3_next"), tmp_path / "model"),
            {"speculative": "mtp", "draft_steps": 3},
        )
    else:
        model = drafters.target_of(name, checkpoint)
        drafts = drafters.settings(name, model, tmp_path, steps=3)
    reference = Plain.of(model)
    both: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": PAGE_SIZE, "num_pages": 190}
    both |= {"max_running": 10, "chunk_tokens": 7, "transport": "cuda", "tune": False, **drafts}
    with closing(NodePair(model, prefill={**both, "tp": prefill}, decode={**both, "tp": decode})) as pair:
        for cell in CELLS[::4]:
            run_cell(pair, cell, reference.cases)
        pair.check_books()
        assert pair.decode.stats().num_drafted > 0


class GpuCluster(Cluster):
    ready_s = 240.0  # kernels that no process has compiled before, and graphs of all ranks
    gpu_share = 0.6  # the reference is in this process


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("transport", ["cuda", "zmq"])
def test_processes_of_both_roles_on_two_gpus(transport: str, tmp_path: Path) -> None:
    """They rehearse and fit their pools. The second time, prompts are found in the prefix caches of the ranks."""
    reference = Reference(DEMO, device="cuda")
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    prompts = [tokenizer.encode(text * count).ids for text in ("x = 1\n", "def main(") for count in (1, 9, 30)]
    fields = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    flags = ["--device", "cuda", "--dtype", "float32", "--transport", transport, "--dp-attention", "2"]
    with GpuCluster(tmp_path, DEMO) as running, ThreadPoolExecutor(len(prompts)) as threads:
        running.start(node_flags=[*flags, "--max-running", "4", "--speculative", "eagle3", "--no-draft-adaptive"])
        for _ in range(2):
            answers = list(threads.map(lambda prompt: running.complete(prompt, **fields), prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                theirs = reference.generate(prompt, 40)
                reference.assert_greedy(prompt, answer["choices"][0]["token_ids"], theirs)
        books = running.ledger()["nodes"]
    stats = [books[f"decode-0{rank}"]["stats"] for rank in ("", "/rank-1")]
    assert not any(each["checksum_failures"] for each in stats) and all(each["bytes_moved"] > 0 for each in stats)
    assert reference.num_ties <= 1
