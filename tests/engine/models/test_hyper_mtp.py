"""MTP layers over residual streams equal the formula of docs/drafter_checkpoints.md, and other layouts are refused.

tests/engine/models/test_heads.py compares whole prompts and rounds with plain torch, and
tests/decode_node/test_mtp_layers.py three layers through the handoff.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from heads import HYPER_LAYERED, HYPER_MTP, write_head
from safetensors.torch import load_file, save_file

from baton.engine.checkpoint.read_config import read_model_config
from baton.engine.checkpoint.tensor_names import layer_prefixes
from baton.engine.models.head_file import check_state_width, read_head
from baton.engine.models.hyper_mtp import HyperMtpHead, load_hyper_mtp
from baton.engine.models.mtp import load_mtp
from baton.engine.models.registry import load_model
from baton.engine.rounds.batch import ForwardBatch
from baton.engine.state.model_pools import ModelPools
from baton.engine.work import BatchRow
from baton.metadata.errors import ConfigError, ModelError

PAGE_SIZE, STREAMS, SIZE = 4, 4, 64
Checkpoint = Callable[..., Path]


def load(model: Path, head: Path) -> tuple[HyperMtpHead, ...]:
    config = read_model_config(model)
    file = read_head(head, config)
    check_state_width(file, config)
    return load_hyper_mtp(file, layer_prefixes(file.names), load_model(model, config, torch.float32, "cpu"))


def test_one_row_equals_the_formula(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With one row the attention returns V, so that the formula fits on a few lines."""
    model = checkpoint("hyper_llama")
    head = write_head(tmp_path / "head", HYPER_MTP, model)
    (layer,) = load(model, head)
    tensors, target = load_file(head / "model.safetensors"), load_file(model / "model.safetensors")
    hidden = torch.randn(1, STREAMS * SIZE, generator=torch.Generator().manual_seed(1))
    batch = ForwardBatch.build([BatchRow([7], 0, [1])], PAGE_SIZE, "cpu")
    with torch.inference_mode():
        ours = layer.forward(batch, ModelPools(torch.zeros(1, 2, 2, 2, PAGE_SIZE, 8)), hidden)
        logits = layer.logits(ours)

    def weight(name: str) -> torch.Tensor:
        return tensors[f"mtp.0.{name}"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (SIZE,), weight(f"{name}.weight"), eps=1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weight(f"{name}.weight"))

    embedded = linear(norm(target["model.embed_tokens.weight"][7], "enorm"), "e_proj")
    streams = [linear(norm(each, "hnorm"), "h_proj") + embedded for each in hidden.view(STREAMS, SIZE)]
    for site, norm_name in (("attn_hc", "input_layernorm"), ("ffn_hc", "post_attention_layernorm")):
        read, write, mix = (weight(f"{site}.{part}") for part in ("read", "write", "mix"))
        x = norm(sum(read[a] * streams[a] for a in range(STREAMS)), norm_name)  # type: ignore[arg-type]
        if site == "attn_hc":
            v = linear(x, "self_attn.v_proj").view(2, 1, 8).expand(-1, 2, -1)  # two queries share a KV head
            y = linear(v.reshape(-1), "self_attn.o_proj")
        else:
            y = linear(F.silu(linear(x, "mlp.gate_proj")) * linear(x, "mlp.up_proj"), "mlp.down_proj")
        streams = [sum(mix[a, b] * streams[a] for a in range(STREAMS)) + write[b] * y for b in range(STREAMS)]
    torch.testing.assert_close(ours[0], torch.cat(streams), atol=1e-4, rtol=1e-4)
    final = norm(sum(streams), "norm")  # type: ignore[arg-type]
    torch.testing.assert_close(logits[0], F.linear(final, target["lm_head.weight"]), atol=1e-4, rtol=1e-4)


def test_zero_rows_have_the_width_of_all_streams(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("hyper_llama")
    (layer,) = load(model, write_head(tmp_path / "head", HYPER_MTP, model))
    assert layer.logits(torch.zeros(0, STREAMS * SIZE)).shape == (0, 512)


def test_several_layers_are_read_in_the_order_of_their_numbers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = checkpoint("hyper_llama")
    head = write_head(tmp_path / "head", HYPER_LAYERED, model)
    tensors = load_file(head / "model.safetensors")
    for m, layer in enumerate(load(model, head)):
        assert torch.equal(layer.final_norm, tensors[f"mtp.{m}.norm.weight"])


def test_other_numbers_of_streams_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    four, two = checkpoint("hyper_llama"), checkpoint("hyper_llama", hc_mult=2)
    head = write_head(tmp_path / "head", HYPER_MTP, four)
    with pytest.raises(ConfigError, match=r"256 numbers \(hc_mult 4\); the target hands over 128 \(hc_mult 2\)"):
        load(two, head)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("mtp.0.h_proj.weight"), "h_proj.weight"),
        (lambda tensors: tensors.pop("mtp.0.attn_hc.mix"), "attn_hc.mix"),
        (lambda tensors: tensors.update({"mtp.0.hc_head_fn": torch.ones(4, 256)}), "hc_head_fn"),
        (lambda tensors: tensors.update({"mtp.0.ffn.gate.weight": torch.ones(4, 64)}), "ffn.gate.weight"),
    ],
    ids=["projection", "mixing", "learned collapse", "experts"],
)
def test_tensors_that_are_missing_or_unknown_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = checkpoint("hyper_llama")
    head = write_head(tmp_path / "head", HYPER_MTP, model)
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=words):
        load(model, head)


def test_layers_without_streams_take_another_layout(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`e_proj` and `h_proj` on a target with one stream: no such checkpoint is known."""
    one = checkpoint("llama")
    config = read_model_config(one)
    head = write_head(tmp_path / "head", HYPER_MTP, checkpoint("hyper_llama"))
    tensors = load_file(head / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "_hc." not in name}, head / "model.safetensors")
    (head / "config.json").write_text((head / "config.json").read_text().replace('"hc_mult": 4', '"hc_mult": 1'))
    file = read_head(head, config)
    with pytest.raises(ModelError, match=r"eh_proj\.weight|shared_head|enorm|lacks"):
        load_mtp(file, layer_prefixes(file.names), load_model(one, config, torch.float32, "cpu"))
