"""Hyper-connection models against plain torch, from the same files."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_heads import Plain, TargetRows

from baton.engine.checkpoint.model_config import ModelConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.models.decoder import DecoderStack
from baton.engine.models.hyper_llama import HyperStack
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.metadata.errors import ModelError

PAGE_SIZE, NUM_PAGES, VOCAB_SIZE, STREAMS, SIZE = 4, 60, 512, 4, 32
TOLERANCE = 2e-4
CHUNKS = [(40,), (1, 5, 13, 1, 1, 1, 17, 1), (3,) * 13 + (1,)]
Checkpoint = Callable[..., Path]


@pytest.fixture
def target_dir(checkpoint: Checkpoint) -> Path:
    return checkpoint("hyper_llama", hidden_size=SIZE, num_hidden_layers=3, hc_mult=STREAMS)


class Run:
    """Our model and its KV, full of NaN; one sequence."""

    def __init__(self, model_dir: Path, **changes: Any) -> None:
        self.config = dataclasses.replace(read_model_config(model_dir), **changes)
        self.model = load_model(model_dir, self.config, torch.float32, "cpu")
        self.kv = pool(self.config)
        self.pages = random.Random(0).sample(range(1, NUM_PAGES), 30)

    def forward(self, ids: Sequence[int], chunks: Sequence[int], aux_layers: tuple[int, ...] = ()) -> list[Any]:
        """TargetStates of each chunk."""
        states, position = [], 0
        for num in chunks:
            rows = [BatchRow(ids[position : position + num], position, self.pages)]
            batch = ForwardBatch.build(rows, PAGE_SIZE, "cpu")
            states.append(self.model.forward_with_aux(batch, ModelPools(self.kv), aux_layers))
            position += num
        return states


def pool(config: ModelConfig) -> torch.Tensor:
    shape = (config.num_layers, NUM_PAGES, 2, config.num_kv_heads, PAGE_SIZE, config.head_dim)
    return torch.full(shape, float("nan"))


def prompt(num: int = 40) -> list[int]:
    return random.Random(1).choices(range(VOCAB_SIZE), k=num)


@torch.inference_mode()
def oracle(target_dir: Path, ids: Sequence[int]) -> tuple[Plain, TargetRows]:
    target = Plain(target_dir)
    return target, target.target_rows(ids)


@pytest.mark.parametrize("chunks", CHUNKS, ids=["whole", "odd", "threes"])
def test_the_paged_forward_equals_the_plain_one(target_dir: Path, chunks: tuple[int, ...]) -> None:
    """Logits, the handoff state and the auxiliary states."""
    ids, run = prompt(), Run(target_dir)
    assert isinstance(run.model.stack, HyperStack)
    target, rows = oracle(target_dir, ids)
    states = run.forward(ids, chunks, aux_layers=(3, 0, 2))
    close(torch.cat([each.handoff for each in states]), rows.handoff)
    assert rows.handoff.shape[-1] == run.model.handoff_hidden_size == STREAMS * SIZE
    close(torch.cat([run.model.logits(each.final) for each in states]), target.logits(rows.final))
    for at, layer in enumerate((3, 0, 2)):
        close(torch.cat([each.aux[at] for each in states]), rows.residuals[layer])


def test_mixed_batches_equal_the_plain_forward(target_dir: Path) -> None:
    ids, run = prompt(), Run(target_dir)
    _, rows = oracle(target_dir, ids)
    first, second = run.pages[:10], run.pages[10:20]
    batches = [
        [BatchRow(ids[:7], 0, first), BatchRow(ids[:12], 0, second)],
        [BatchRow(ids[12:13], 12, second), BatchRow(ids[7:30], 7, first)],
        [BatchRow(ids[30:31], 30, first), BatchRow(ids[13:14], 13, second)],
    ]
    for batch in batches:
        states = run.model.forward_with_aux(ForwardBatch.build(batch, PAGE_SIZE, "cpu"), ModelPools(run.kv), ())
        expected = [rows.handoff[row.position : row.position + len(row.input_ids)] for row in batch]
        close(states.handoff, torch.cat(expected))


@pytest.mark.parametrize("hc_mult", ["absent", None, 0, 1])
def test_one_stream_is_a_plain_llama(hc_mult: Any, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Bit for bit, and what it hands over is the state after the last norm."""
    plain, ids = checkpoint("llama"), prompt()
    config = (plain / "config.json").read_text().replace("LlamaForCausalLM", "HyperLlamaForCausalLM")
    if hc_mult != "absent":
        config = config.replace("{", '{"hc_mult": %s,' % ("null" if hc_mult is None else hc_mult), 1)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").symlink_to(plain / "model.safetensors")
    ours, theirs = Run(tmp_path), Run(plain)
    assert isinstance(ours.model.stack, DecoderStack) and ours.config.hc_mult == 1
    assert ours.model.handoff_hidden_size == ours.config.hidden_size
    for a, b in zip(ours.forward(ids, CHUNKS[1]), theirs.forward(ids, CHUNKS[1]), strict=True):
        assert torch.equal(a.final, b.final) and torch.equal(a.handoff, a.final)


def test_a_family_may_hand_over_the_collapsed_state(target_dir: Path) -> None:
    run = Run(target_dir, hands_over_collapsed=True)
    (states,) = run.forward(prompt(), (40,))
    assert run.model.handoff_hidden_size == SIZE
    assert torch.equal(states.handoff, states.final)


def test_streams_where_the_family_has_none_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = (checkpoint("llama") / "config.json").read_text().replace("{", '{"hc_mult": 4,', 1)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="hc_mult = 4 is not served for LlamaForCausalLM"):
        read_model_config(tmp_path)


def test_streams_of_another_number_than_the_tensors_are_refused(target_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"attn_hc\.mix|attn_hc\.read"):
        Run(target_dir, hc_mult=2)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.1  # else everything is close
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)
