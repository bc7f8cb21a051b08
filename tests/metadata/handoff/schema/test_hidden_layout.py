"""One width function per phase."""

from __future__ import annotations

import pytest
import torch
from layouts import make_layout

from baton.metadata.errors import ConfigError
from baton.metadata.handoff.schema.hidden_layout import HiddenLayout, assign, spec_hidden_size


def layout(algorithm: str, **more) -> HiddenLayout:
    return make_layout(algorithm, **{"target_dtype": "bfloat16", **more})


@pytest.mark.parametrize(
    ("hc_mult", "width"),
    [(None, 64), (0, 64), (1, 64), (2, 128), (4, 256)],
    ids=["absent", "zero", "one", "two", "four"],
)
def test_only_several_streams_widen_the_hidden_state(hc_mult, width):
    assert spec_hidden_size(64, hc_mult) == width
    assert layout("eagle", hc_mult=hc_mult).spec("extend") == (width, "bfloat16")


@pytest.mark.parametrize("phase", ["extend", "recurrent"])
@pytest.mark.parametrize(
    ("source", "spec"),
    [
        (None, None),
        ("handoff", (128, "bfloat16")),
        ("final", (64, "bfloat16")),
        ("aux", (192, "bfloat16")),
        ("draft", (160, "float32")),
    ],
)
def test_each_source_has_the_width_and_dtype_of_its_side(phase, source, spec):
    """With two streams of the target and five of the draft: `final` and `aux` are collapsed."""
    numbers = {"target_hidden_size": 64, "hc_mult": 2, "draft_hidden_size": 32, "draft_hc_mult": 5, "num_aux": 3}
    made = HiddenLayout(algorithm="x", target_dtype="bfloat16", **numbers, **{phase: source})
    other = "recurrent" if phase == "extend" else "extend"
    assert made.spec(phase) == spec and made.spec(other) is None


def test_a_family_may_hand_over_the_collapsed_state():
    assert layout("mtp", hc_mult=4, hands_over_collapsed=True).spec("extend") == (64, "bfloat16")


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_idle_and_live_inputs_have_the_same_width(num_rows):
    tensor = layout("eagle3").allocate("extend", num_rows)
    assert tensor is not None and tensor.shape == (num_rows, 192) and tensor.dtype == torch.bfloat16
    assert layout("standalone").allocate("recurrent", num_rows) is None


@pytest.mark.parametrize("num_rows", [0, 4])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((32,), dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int32)),
        *(((width,), torch.float32) for width in (0, 16, 31, 33, 64)),
        ((32, 1), torch.float32),
        ((), torch.float32),
    ],
)
def test_rows_of_another_width_or_dtype_are_refused_also_when_there_are_none(num_rows, shape, dtype):
    eagle = layout("eagle")
    eagle.check("recurrent", torch.zeros(num_rows, 32))
    with pytest.raises(ValueError, match=r"recurrent state of eagle is \[num_rows, 32\] float32, not \(\d") as raised:
        eagle.check("recurrent", torch.zeros(num_rows, *shape, dtype=dtype))
    assert str(raised.value).endswith(f"not {(num_rows, *shape)} {dtype}")


def test_each_phase_checks_its_own_rows():
    eagle = layout("eagle")
    eagle.check("extend", torch.zeros(2, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="extend state of eagle"):
        eagle.check("extend", torch.zeros(2, 32))


@pytest.mark.parametrize("phase", ["extend", "recurrent"])
def test_rows_of_a_phase_without_state_are_refused(phase):
    with pytest.raises(ValueError, match=f"{phase} state of standalone is none, not"):
        layout("standalone").check(phase, torch.zeros(0, 32))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in ((4, 16), (4, 33), (4, 1), (1, 32), (5, 32), (32,), (1, 4, 32))),
        *(((4, 32), dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
)
def test_copies_between_unlike_shapes_and_dtypes_raise(shape, dtype):
    with pytest.raises(ValueError, match="does not fit"):
        assign(torch.zeros(4, 32), torch.ones(shape, dtype=dtype))


def test_equal_shapes_copy():
    dst = torch.zeros(4, 32)
    assign(dst, torch.ones(4, 32))
    assert torch.all(dst == 1)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            {"algorithm": "eagle3", "extend": "aux"},
            "eagle3 needs auxiliary target rows, num_aux is 0; it must be 1 or more",
        ),
        (
            {"algorithm": "eagle", "recurrent": "draft"},
            "eagle needs the draft's hidden size, it is 0; it must be 1 or more",
        ),
    ],
    ids=["no aux", "no draft"],
)
def test_missing_numbers_are_refused(numbers, words):
    with pytest.raises(ConfigError) as raised:
        HiddenLayout(target_hidden_size=64, **numbers)
    assert str(raised.value) == words


def test_the_least_numbers_are_taken():
    least = HiddenLayout(
        algorithm="x", target_hidden_size=64, extend="aux", recurrent="draft", draft_hidden_size=1, num_aux=1
    )
    assert (least.spec("extend"), least.spec("recurrent")) == ((64, "float32"), (1, "float32"))
    plain = HiddenLayout(algorithm="x", target_hidden_size=64)
    assert (plain.spec("extend"), plain.spec("recurrent"), plain.num_target_rows) == (None, None, 0)


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "mtp"])
def test_the_recurrent_state_is_as_wide_as_the_draft_s_own_streams(algorithm):
    assert layout(algorithm, draft_hc_mult=4).spec("recurrent") == (128, "float32")
    assert layout(algorithm, hc_mult=4).spec("recurrent") == (32, "float32")


def test_rows_are_allocated_as_zeros_on_the_requested_device():
    rows = layout("eagle").allocate("recurrent", 3)
    assert rows is not None and rows.device.type == "cpu" and not rows.any()
    there = layout("eagle").allocate("extend", 2, "meta")
    assert there is not None and there.device.type == "meta" and there.dtype == torch.bfloat16


@pytest.mark.parametrize("dst_shape", [(4, 32), (2, 3)])
def test_a_refused_copy_names_both_sides(dst_shape):
    with pytest.raises(ValueError, match="does not fit") as raised:
        assign(torch.zeros(*dst_shape), torch.ones(4, 16, dtype=torch.float64))
    assert str(raised.value) == (
        f"hidden state of (4, 16) torch.float64 does not fit a buffer of {dst_shape} torch.float32"
    )
