"""Every part of the benchmark of one GPU runs from end to end on a CPU and compares what it generates.

The figures mean nothing on a CPU. The test finds parts that are broken before they run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_adaptive
import bench_gpu
import bench_joint
import bench_sequences
import pytest
import torch
from harness import tables
from planted import PLANTED, write_planted
from planted_eagle3 import write_planted_eagle3
from planted_models import small
from roofline import Limits
from synthetic import ARCHITECTURES, FP8_BLOCKS, with_layers, write_random_prediction_layer
from tensor_files import write_config, write_tokenizer

from baton.engine.config import EngineConfig
from baton.engine.engine import Engine
from baton.engine.rounds.device_executor import DeviceExecutor
from baton.engine.rounds.rounds import Rounds

LIMITS = Limits(1e12, 1e12)


def adaptive(engine: Engine, rounds: Rounds, kind: str) -> dict[str, Any]:
    return {"kind": kind} | bench_gpu.adaptive(engine, rounds, 2, bench_gpu.params_of(kind))


Part = Callable[[Engine, Rounds], dict[str, Any]]
PARTS: dict[str, Part] = {
    "decode": lambda _, rounds: bench_gpu.decode(rounds.executor, rounds, 2, LIMITS),
    "mixed": lambda engine, rounds: bench_gpu.mixed(engine, rounds, 2, LIMITS),
    "joint": lambda engine, rounds: bench_gpu.joint(engine, rounds, 2, 16, rounds.shape.with_steps(0)),
    "contexts": lambda engine, rounds: bench_gpu.context(engine, rounds, 300, LIMITS),
    "prefill": lambda engine, _: bench_gpu.prefill(engine, LIMITS, 2, 24),
    "long": lambda engine, _: bench_gpu.long_prompt(engine, LIMITS, 40),
    "small-prompts": lambda engine, _: bench_gpu.small_prompt(engine, 16),
    "turns": lambda engine, _: bench_gpu.turn(engine, 16),
}
DRAFTING: dict[str, Part] = {
    "sampling": lambda engine, rounds: bench_gpu.sampling(engine, rounds, 2, rounds.shape),
    "rounds": lambda engine, rounds: bench_gpu.speculate(engine, rounds, 2),
    "adaptive": lambda engine, rounds: adaptive(engine, rounds, "greedy"),
}
WITH_TOP_P: dict[str, Part] = {"adaptive with top_p": lambda engine, rounds: adaptive(engine, rounds, "top_p")}
HEAD: dict[str, Any] = {"speculative": "eagle3", "draft_steps": 3}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(bench_gpu, "best_s", lambda run, _: run() or 1.0)
    monkeypatch.setattr(bench_gpu, "NUM_STEPS", 8)
    monkeypatch.setattr(bench_sequences, "CHUNK", 16)
    monkeypatch.setattr(bench_gpu, "CHUNK", 16)
    monkeypatch.setattr(bench_adaptive, "NUM_NEW", 12)
    for module in (bench_adaptive, bench_joint, bench_sequences):
        monkeypatch.setattr(module, "CONTEXT", 48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planted")
    write_planted_eagle3(path / "eagle3", write_planted(path, small()), 0.8)
    return path


def run(part: str, model: Path, **settings: Any) -> dict[str, Any]:
    config = EngineConfig(
        model=str(model), device="cpu", threads=1, num_pages=300, context_len=1280, prefix_cache=False, **settings
    )
    engine = Engine(config)
    rounds = Rounds(DeviceExecutor(engine, 2, buckets=(2,)))
    rounds.executor.warm_up()
    return (PARTS | DRAFTING | WITH_TOP_P)[part](engine, rounds)


@pytest.mark.parametrize("part", [*PARTS, *(pytest.param(part, marks=pytest.mark.whole) for part in DRAFTING)])
def test_a_part_runs_and_its_row_fits_the_tables(part: str, model: Path) -> None:
    head: dict[str, Any] = {"speculative": "none"}
    if part in DRAFTING:
        head = HEAD | {"draft_model": str(model / "eagle3")}
    row = run(part, model, **head)
    if part == "small-prompts":  # compares nothing, and lacks the device's figures
        return
    assert row["checked_tokens"] > 0
    report = {"model": "small", "drafter": "the head" if part in DRAFTING else None, "topk": 1}
    table = tables({"engine": report | {"num_layers": 4, "hidden_size": 256, part: [row]}})
    assert ("the head" if part in DRAFTING else "small") in table, table


@pytest.mark.parametrize("part", ["decode", "prefill"])
@pytest.mark.parametrize(("architecture", "fields"), [("gpt-oss-20b", {}), ("llama-3.1-8b", FP8_BLOCKS)])
def test_quantized_weights_that_are_made_are_measured(
    architecture: str, fields: dict[str, Any], part: str, tmp_path: Path
) -> None:
    config = write_config(tmp_path, small(architecture, **fields) | PLANTED)
    write_tokenizer(tmp_path, config.vocab_size)
    row = run(part, tmp_path, speculative="none", load_format="planted:maker")
    assert row["checked_tokens"] > 0 and row["x_floor"] > 0


@pytest.mark.whole
def test_adaptive_drafting_is_measured_with_other_kinds_of_sampling(model: Path) -> None:
    row = run("adaptive with top_p", model, **HEAD, draft_model=str(model / "eagle3"))
    assert row["kind"] == "top_p" and row["checked_tokens"] == 0, "sampled text is not the planted one"
    assert sum(row["rounds_by_steps"].values()) > 0


@pytest.mark.whole
def test_entries_and_a_prediction_layer_are_measured_with_forced_acceptance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 128, "q_lora_rank": 128, "o_groups": 2}
    sizes |= {"o_lora_rank": 128, "index_n_heads": 4, "n_routed_experts": 6, "moe_intermediate_size": 128}
    fields = with_layers(ARCHITECTURES["deepseek-v4-flash"] | sizes | {"vocab_size": 1024}, 4)
    config = write_config(tmp_path, fields)
    write_tokenizer(tmp_path, config.vocab_size)
    write_random_prediction_layer(tmp_path / "mtp", fields)
    drafting: dict[str, Any] = {"speculative": "mtp", "draft_steps": 3, "draft_model": str(tmp_path / "mtp")}
    monkeypatch.setattr(bench_sequences.round_module, "accept_chain", bench_sequences.round_module.accept_chain)
    bench_sequences.force_acceptance([1.0, 1.0, 0.0], torch.device("cpu"))
    row = run("rounds", tmp_path, **drafting, load_format="dummy")
    assert [row[f"k{steps}_tokens_a_round"] for steps in (1, 2, 3)] == [2, 3, 3]
    row = run("contexts", tmp_path, **drafting, load_format="dummy")
    kept = 4 * (128 // 4 + 128 // 4 + 1)  # bytes per token: an index key and an entry of 4 tokens, an entry of 128
    tail = 4 * (128 * 128 * 5 + 24 * 4 * (128 + 128) + 18 * 2 * 128)  # keys of five layers, inputs, sums
    assert row["MB"] == 3 * (128 * kept + tail) / 1e6 and row["latents_MB"] == 4 * 2 * 576 * 300 / 1e6
