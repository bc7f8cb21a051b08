"""One width function per phase, checked against the table of DESIGN section 4."""

from __future__ import annotations

import pytest
import torch

from baton.metadata.errors import ConfigError
from baton.metadata.hidden_layout import HiddenLayout, assign, spec_hidden_size


def layout(algorithm: str, **more) -> HiddenLayout:
    return HiddenLayout(
        algorithm=algorithm, target_hidden_size=64, draft_hidden_size=32, target_dtype="bfloat16", num_aux=3, **more
    )


@pytest.mark.parametrize(
    ("hc_mult", "width"), [(None, 64), (0, 64), (1, 64), (4, 256)], ids=["absent", "zero", "one", "four"]
)
def test_streams_widen_only_above_one(hc_mult, width):
    assert spec_hidden_size(64, hc_mult) == width
    assert layout("eagle", hc_mult=hc_mult).spec("extend") == (width, "bfloat16")


@pytest.mark.parametrize(
    ("algorithm", "extend", "recurrent"),
    [
        ("none", None, None),
        ("ngram", None, None),
        ("standalone", None, None),
        ("eagle", (64, "bfloat16"), (32, "float32")),
        ("eagle3", (192, "bfloat16"), (32, "float32")),
        ("mtp", (64, "bfloat16"), None),
        ("frozen_kv_mtp", (64, "bfloat16"), (64, "bfloat16")),
    ],
)
def test_widths_by_algorithm(algorithm, extend, recurrent):
    assert layout(algorithm).spec("extend") == extend
    assert layout(algorithm).spec("recurrent") == recurrent


def test_auxiliary_rows_are_collapsed_and_a_family_may_hand_over_the_collapsed_state():
    assert layout("eagle3", hc_mult=4).spec("extend") == (192, "bfloat16")
    assert layout("mtp", hc_mult=4, hands_over_collapsed=True).spec("extend") == (64, "bfloat16")


def test_chained_mtp_passes_the_drafts_own_state_on():
    chained = layout("mtp", num_mtp_layers=3, is_chained=True)
    assert chained.spec("recurrent") == (32, "float32") and chained.num_target_rows == 2


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_idle_and_live_inputs_have_the_same_width(num_rows):
    tensor = layout("eagle3").allocate("extend", num_rows)
    assert tensor is not None and tensor.shape == (num_rows, 192) and tensor.dtype == torch.bfloat16
    assert layout("standalone").allocate("recurrent", num_rows) is None


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 16), torch.float32), ((1, 32), torch.float32), ((4, 32), torch.bfloat16)]
)
def test_copies_between_unlike_shapes_and_dtypes_raise(shape, dtype):
    with pytest.raises(ValueError, match="does not fit"):
        assign(torch.zeros(4, 32), torch.ones(shape, dtype=dtype))


def test_equal_shapes_copy():
    dst = torch.zeros(4, 32)
    assign(dst, torch.ones(4, 32))
    assert torch.all(dst == 1)


@pytest.mark.parametrize(
    "numbers", [{"algorithm": "eagle3", "draft_hidden_size": 8}, {"algorithm": "eagle"}], ids=["no aux", "no draft"]
)
def test_missing_numbers_are_refused(numbers):
    with pytest.raises(ConfigError):
        HiddenLayout(target_hidden_size=64, **numbers)
