"""Experts in one tensor: their order, the shares of ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.checkpoint.checkpoint import Checkpoint
from baton.engine.checkpoint.quantization import Quantization
from baton.engine.checkpoint.stacked_weights import StackedWeight
from baton.engine.checkpoint.weights import CheckpointWeights, ListedWeights
from baton.engine.products.base import INNER_IN, INNER_OUT, Split
from baton.engine.ranks.group import OneRank
from baton.engine.ranks.ranks import Ranks
from baton.kernels.experts.mxfp4 import from_checkpoint, unpacked
from baton.metadata.errors import ModelError

NUM_EXPERTS, SIZE, INNER = 3, 64, 96


class OneOf(OneRank):
    """A place among ranks that never meet."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        "up": torch.randn(NUM_EXPERTS, SIZE, 2 * INNER),
        "up_bias": torch.randn(NUM_EXPERTS, 2 * INNER),
        "down": torch.randn(NUM_EXPERTS, INNER, SIZE),
        "down_bias": torch.randn(NUM_EXPERTS, SIZE),
        "down_blocks": torch.randint(256, (NUM_EXPERTS, SIZE, INNER // 32, 16), dtype=torch.uint8),
        "down_scales": torch.randint(120, 130, (NUM_EXPERTS, SIZE, INNER // 32), dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def weights(model: Path, rank: int = 0, size: int = 1) -> CheckpointWeights:
    ranks = Ranks(OneOf(rank, size)) if size > 1 else Ranks()
    return CheckpointWeights(Checkpoint(model), torch.float32, torch.device("cpu"), ranks=ranks)


def up(model: Path, rank: int = 0, size: int = 1) -> StackedWeight:
    return StackedWeight(weights(model, rank, size), "up", NUM_EXPERTS, 2, INNER, SIZE, INNER_OUT)


def down(model: Path, rank: int = 0, size: int = 1) -> StackedWeight:
    return StackedWeight(weights(model, rank, size), "down", NUM_EXPERTS, 1, SIZE, INNER, INNER_IN)


def test_gate_and_up_of_an_expert_are_parted(model: Path) -> None:
    stored, source = Checkpoint(model), up(model)
    found, bias = source.fused("weight").view(NUM_EXPERTS, 2, INNER, SIZE), source.bias
    assert bias is not None
    for expert in range(NUM_EXPERTS):
        for part in range(2):
            assert torch.equal(found[expert, part], stored.read("up")[expert, :, part::2].T)
            expected = stored.read("up_bias")[expert, part::2]
            assert torch.equal(bias.view(NUM_EXPERTS, 2, INNER)[expert, part], expected)
    assert source.fused("weight") is source.fused("weight")
    assert source.has("weight") and source.has("bias") and not source.has("blocks") and not source.has("weight_scale")


def test_ranks_share_the_hidden_units(model: Path) -> None:
    whole, halves = up(model), [up(model, rank, 2) for rank in range(2)]
    for name in ("weight", "bias"):
        wide = whole.fused(name).unflatten(0, (NUM_EXPERTS, 2, 2, INNER // 2))
        for rank, half in enumerate(halves):
            assert torch.equal(half.fused(name).unflatten(0, (NUM_EXPERTS, 2, INNER // 2)), wide[:, :, rank])
    whole, halves = down(model), [down(model, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([half.fused("weight") for half in halves], 1), whole.fused("weight"))
    assert [half.in_size for half in halves] == [INNER // 2] * 2 and all(half.divides_columns for half in halves)
    assert halves[1].bias is None and halves[0].bias is not None and whole.bias is not None
    assert torch.equal(halves[0].bias, whole.bias)


def test_ranks_with_some_columns_round_whole_rows(model: Path) -> None:
    """A row's scale in FP8 is that of all ranks' columns, or text would depend on their number."""
    for rank in range(2):
        group = down(model, rank, 2).ranks
        assert group is not None and (group.rank, group.size) == (rank, 2)
        assert up(model, rank, 2).ranks is None
    assert down(model).ranks is None


@pytest.mark.parametrize(("size", "group"), [(1, 32), (2, 16), (3, 32), (6, 16), (12, 8), (48, 2)])
def test_ranks_share_packed_columns(size: int, group: int, model: Path) -> None:
    """Also if a group of 32 columns falls to two of them: each then has the group's scale."""
    stored = Checkpoint(model)
    blocks, scales = (stored.read(f"down_{name}").flatten(0, 1) for name in ("blocks", "scales"))
    whole, shares = unpacked(*from_checkpoint(blocks.flatten(1), scales), 32), []
    for rank in range(size):
        source = down(model, rank, size)
        own = [torch.cat(source.parts(name)) for name in ("blocks", "scales")]
        assert source.in_size // own[1].shape[1] == group
        shares.append(unpacked(*from_checkpoint(*own), group))
    assert torch.equal(torch.cat(shares, 1), whole)


def test_columns_that_share_a_byte_are_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="down: ranks would have 3 columns each, and two share a byte"):
        down(model, 0, 32).parts("scales")


def test_columns_that_groups_cannot_divide_are_refused(model: Path) -> None:
    source = StackedWeight(weights(model), "down", NUM_EXPERTS, 1, SIZE, 40, INNER_IN)
    with pytest.raises(ModelError, match=r"down has 40 columns, which groups of 32 \(MXFP4\) cannot divide"):
        source.parts("blocks")


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_read_is_listed(is_packed: bool, model: Path) -> None:
    """With the shapes and the types that the file has."""
    listed = ListedWeights(Checkpoint(model).names, Quantization("mxfp4", "none"))
    source = StackedWeight(listed, "down", NUM_EXPERTS, 1, SIZE, INNER, Split("inner", 1))
    for name in ("blocks", "scales") if is_packed else ("weight",):
        assert all(part.device.type == "meta" for part in source.parts(name))
    assert source.bias is not None
    assert [spec.name for spec in listed.specs] == [
        *(["down_blocks", "down_scales"] if is_packed else ["down"]),
        "down_bias",
    ]
    assert Checkpoint(model).check(listed.specs) > 0


def test_another_type_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    wrong = {"down_scales": torch.randn(NUM_EXPERTS, SIZE, INNER // 32)}
    path.unlink()
    save_file(wrong, path)
    with pytest.raises(ModelError, match="down_scales is F32; only U8 are served"):
        down(tmp_path).parts("scales")
