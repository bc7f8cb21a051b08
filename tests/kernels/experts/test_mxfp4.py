"""Numbers of 4 bits, one by one and as transformers reads them."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.experts.mxfp4 import from_checkpoint, unpacked


def test_each_value_in_each_half_of_a_byte() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values += [-value for value in values]
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(119, 135, dtype=torch.uint8).view(16, 1)
    low, high = (torch.tensor([values[byte >> shift & 15] for byte in range(256)]).view(16, 16) for shift in (0, 4))
    powers = 2.0 ** torch.arange(-8, 8).unsqueeze(1)
    assert torch.equal(unpacked(packed, scales, 32), torch.cat((low, high), 1) * powers)


@pytest.mark.parametrize("group", [32, 16, 2])
def test_a_scale_is_that_of_its_columns(group: int) -> None:
    packed = torch.full((3, 32), 0x22, dtype=torch.uint8)  # ones
    scales = torch.randint(120, 130, (3, 64 // group), dtype=torch.uint8)
    expected = (2.0 ** (scales.float() - 127)).repeat_interleave(group, 1)
    assert torch.equal(unpacked(packed, scales, group), expected)


@pytest.mark.parametrize(("num_groups", "group"), [(2, 32), (3, 16), (16, 2)])
def test_columns_of_a_checkpoint_are_side_by_side_in_halves(num_groups: int, group: int) -> None:
    packed = torch.randint(256, (3, num_groups * group // 2), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, num_groups), dtype=torch.uint8)
    of_pairs = torch.stack((packed & 15, packed >> 4), 2).view(3, num_groups, group)
    ours, own_scales = from_checkpoint(packed, scales)
    halves = torch.stack([half.view(3, num_groups, -1) for half in (ours & 15, ours >> 4)], 2)
    assert torch.equal(halves.flatten(2), of_pairs)
    assert torch.equal(own_scales, scales) and own_scales.stride() == (16, 1)


def test_bfloat16_holds_every_number() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(254, 1)
    scales = torch.arange(1, 255, dtype=torch.uint8).view(254, 1).repeat(1, 16)
    numbers = unpacked(packed, scales, 32)
    is_finite = numbers.isfinite()  # the largest are no float32
    assert torch.equal(numbers.bfloat16().float()[is_finite], numbers[is_finite])
    assert is_finite[:250].all()


def test_numbers_are_those_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 10, 4), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    ours = unpacked(*from_checkpoint(blocks.view(30, 64), scales.view(30, 4)), 32)
    assert torch.equal(ours, theirs.flatten(0, 1))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AssertionError):
        unpacked(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), 32)
