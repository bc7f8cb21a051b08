"""DeepSeek-V4: the published names and formats of its tensors, and settings that it refuses.

tests/engine/models/test_odd_shapes.py compares logits and texts with transformers, tests/engine/models/test_heads.py
the prediction layer, and tests/decode_node/test_sparse_attention.py texts between nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from entry_formats import QUANTIZED, packed, published
from model_pools import pools_of
from node_pair import node_pairs, params
from own_mtp import with_mtp
from ties import Reference

from baton.decode_node.config import DecodeConfig
from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.engine import Engine
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.work import BatchRow
from baton.metadata.errors import BatonError, ModelError

Checkpoint = Callable[..., Path]
SIZES = {"hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 8}


def logits(model: Path) -> torch.Tensor:
    config, ids = read_model_config(model), random.Random(0).choices(range(512), k=30)
    loaded = load_model(model, config, torch.float32, "cpu")
    batch = ForwardBatch.build([BatchRow(ids, 0, [*range(1, 9)])], 4, "cpu")
    return loaded.logits(loaded.forward(batch, pools_of(config, 4, 9, float("nan"))))


def test_experts_of_four_bits_have_the_numbers_that_they_stand_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, plain = checkpoint("deepseek_v4", **SIZES), dict[str, torch.Tensor]()

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if ".experts." in each]:
            tensors[name], scales, plain[name] = packed(tensors[name])
            tensors[f"{name.removesuffix('weight')}scale"] = scales

    model = published(source, tmp_path / "fp4", pack, expert_dtype="fp4", **QUANTIZED)
    expected = logits(published(source, tmp_path / "plain", lambda tensors: tensors.update(plain)))
    assert len(plain) == 4 * 8 * 3
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    assert (logits(source) - expected).abs().max() > 0.05


def test_scales_of_blocks_may_be_powers_of_two_in_a_byte(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("deepseek_v4", **SIZES)

    def round_to(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            for name in [each for each in tensors if each.endswith(("wq_b.weight", "wo_a.weight"))]:
                weight = tensors[name]
                shape = [-(-size // 128) for size in weight.shape]
                scales = torch.full(shape, 2.0**-6)
                scales[0, 0] = 2.0**-5
                tensors[name] = (weight * 32).clamp(-448, 448).to(torch.float8_e4m3fn)
                tensors[f"{name.removesuffix('weight')}scale"] = scales.to(dtype)

        return change

    both = [
        logits(published(source, tmp_path / str(dtype), round_to(dtype), **QUANTIZED))
        for dtype in (torch.float32, torch.float8_e8m0fnu)
    ]
    assert torch.equal(*both) and (both[0] - logits(source)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 6}, "page_size is 6, but DeepseekV4ForCausalLM makes entries of 4 tokens.* use --page-size 4"),
        (
            {"draft_topk": 2, "draft_steps": 2},
            "draft_topk is 2, but DeepseekV4ForCausalLM makes entries by position.*use --draft-topk 1",
        ),
        ({"kv_dtype": "fp8"}, "kv_dtype is fp8, but DeepseekV4ForCausalLM has keys that are also values"),
    ],
)
def test_settings_that_it_cannot_have_are_refused(
    settings: dict[str, Any], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = with_mtp(checkpoint("deepseek_v4"), tmp_path / "model")
    common: dict[str, Any] = {"page_size": 4, "num_pages": 8, "speculative": "mtp", "device": "cpu"}
    with pytest.raises(BatonError, match=words):
        Engine(DecodeConfig(model=str(model), **(common | settings)))


@pytest.mark.parametrize("is_collapsed", [False, True])
def test_drafters_get_all_streams_and_collapsed_states_of_layers(is_collapsed: bool, checkpoint: Checkpoint) -> None:
    """A family may hand over the state that the streams collapse to instead."""
    model, ids = checkpoint("deepseek_v4"), random.Random(1).choices(range(512), k=20)
    config = replace(read_model_config(model), hands_over_collapsed=is_collapsed)
    loaded, reference = load_model(model, config, torch.float32, "cpu"), Reference(model).model.model
    streams: list[torch.Tensor] = []  # at the inputs of layers, and behind the last one
    modules = (*reference.layers, reference.hc_head)
    hooks = [each.register_forward_pre_hook(lambda _, args: streams.append(args[0])) for each in modules]
    batch, pools = (
        ForwardBatch.build([BatchRow(ids, 0, [*range(1, 9)])], 4, "cpu"),
        pools_of(config, 4, 9, float("nan")),
    )
    with torch.inference_mode():
        states = loaded.forward_with_aux(batch, pools, (4, 0, 2))
        final = reference(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        aux = [reference.hc_head(streams[layer])[0] for layer in (4, 0, 2)]
    torch.testing.assert_close(states.final, final, atol=1e-4, rtol=0)
    torch.testing.assert_close(states.handoff, final if is_collapsed else streams[4][0].flatten(1), atol=1e-4, rtol=0)
    assert loaded.handoff_hidden_size == states.handoff.shape[1] == (1 if is_collapsed else 3) * 64
    for ours, theirs in zip(states.aux, aux, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_streams_of_another_number_than_the_tensors_are_refused(checkpoint: Checkpoint) -> None:
    model = checkpoint("deepseek_v4")
    with pytest.raises(ModelError, match="hc_attn_fn"):
        load_model(model, replace(read_model_config(model), hc_mult=2), torch.float32, "cpu")


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_table_that_names_an_expert_that_does_not_exist_is_refused(
    expert: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """When the model is loaded, not when the token comes."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][511, 2] = expert

    model = published(checkpoint("deepseek_v4"), tmp_path / "damaged", damage)
    with pytest.raises(ModelError, match=rf"tid2eid names expert {expert}, but the layer has 8 experts"):
        load_model(model, read_model_config(model), torch.float32, "cpu")


def test_a_checkpoint_with_its_prediction_layer_drafts_by_itself(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = with_mtp(checkpoint("deepseek_v4"), tmp_path / "model")
    engine = Engine(DecodeConfig(model=str(model), page_size=4, num_pages=8, device="cpu"))
    assert engine.speculation.algorithm == "mtp"
    for phase in ("extend", "recurrent"):
        assert engine.speculation.hidden.spec(phase) == (3 * 64, "float32")


PUBLISHED_LAYERS = {  # the first two, pairs behind them, and bytes per token that docs/models.md states
    "flash": ("sliding", 20, 6_880, 95_872),
    "pro": ("heavily_compressed", 29, 9_848, 137_920),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", PUBLISHED_LAYERS)
def test_a_handoff_moves_the_bytes_that_are_stated(name: str, checkpoint: Checkpoint) -> None:
    """All layers of the published model with their entries, keys and windows. Everything else is small."""
    first, num_pairs, kept, tail = PUBLISHED_LAYERS[name]
    kinds = [first] * 2 + ["compressed_sparse", "heavily_compressed"] * num_pairs + ["compressed_sparse"]
    model = checkpoint(
        "deepseek_v4",
        num_hidden_layers=len(kinds),
        layer_types=[f"{kind}_attention" for kind in kinds],
        mlp_layer_types=["hash_moe"] * 3 + ["moe"] * (len(kinds) - 3),
        compress_rates=None,
        sliding_window=128,
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        hc_mult=4,
        hidden_size=32,
        num_attention_heads=2,
        n_routed_experts=4,
        vocab_size=512,
    )
    both: dict[str, Any] = {"page_size": 128, "num_pages": 9, "dtype": "bfloat16", "chunk_tokens": 64}
    with node_pairs() as start:
        pair, moved = start(model, prefill=both, decode=both), 0
        for length, num_pages, num_tails in ((100, 1, 1), (128, 1, 1), (300, 3, 2), (384, 3, 1)):
            pair.submit(f"{length}", random.Random(length).choices(range(1, 512), k=length), params(2))
            assert len(pair.run(timeout_s=170)[f"{length}", 0].ids) == 2
            moved, before = pair.decode.stats().bytes_moved, moved
            print(f"{name}: a prompt of {length} tokens moved {moved - before:,} bytes")
            assert moved - before == 128 * (num_pages * kept + num_tails * tail)
