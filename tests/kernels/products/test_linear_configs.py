"""Launch configurations: which ones exist for a shape, which one is chosen, and what no launch can be."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from baton.kernels.products import linear_configs
from baton.kernels.products.linear_configs import (
    FEWEST_PROGRAMS,
    ROW_CLASSES,
    Config,
    ProductShape,
    candidates,
    check,
    choose,
    default,
    trying,
)

NUM_SMS = 132
SHAPES = [  # odd ones too
    ProductShape(out_size, in_size, max_rows, is_gated)
    for out_size, in_size in ((3072, 2048), (37888, 3584), (3584, 18944), (128256, 4096), (70, 160), (2, 16))
    for max_rows in ROW_CLASSES
    for is_gated in (False, True)
]
SHAPE = ProductShape(96, 64, 8)


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linear_configs, "CHOSEN", {})
    yield


@pytest.mark.parametrize(
    ("num_rows", "bound"), [(1, 1), (2, 4), (4, 4), (5, 8), (9, 16), (17, 32), (32, 32), (33, 64), (64, 64)]
)
def test_numbers_of_rows_share_a_shape(num_rows: int, bound: int) -> None:
    assert ProductShape.of(num_rows, 96, 64, is_gated=True) == ProductShape(96, 64, bound, is_gated=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_begin_with_the_default_and_torch_and_can_all_be_launched(shape: ProductShape) -> None:
    found = candidates(shape, NUM_SMS)
    assert found[:2] == [default(shape), None] and len(set(found)) == len(found)
    for config in found:
        check(shape, config)


@pytest.mark.parametrize("shape", SHAPES)
def test_measured_candidates_have_enough_programs_for_both_states_of_a_gpu(shape: ProductShape) -> None:
    num_out = shape.out_size // (1 + shape.is_gated)
    for config in candidates(shape, NUM_SMS)[2:]:
        assert config is not None
        if config.kind == "dot":
            assert -(-num_out // config.block_n) * config.split_k >= FEWEST_PROGRAMS, config


def test_some_candidates_give_every_multiprocessor_as_many_programs() -> None:
    """296 programs of 64 rows of W, two at once on each of 132 multiprocessors, leave 32 for a wave of their own."""
    shape = ProductShape(37888, 3584, 8, is_gated=True)
    counts = {-(-18944 // each.block_n) for each in candidates(shape, NUM_SMS) if each is not None}
    assert 296 in counts and any(num <= 2 * NUM_SMS and num > 2 * NUM_SMS - 5 for num in counts), counts


def test_a_choice_comes_before_the_default_and_a_trial_before_the_choice() -> None:
    assert choose(SHAPE) == default(SHAPE)
    linear_configs.CHOSEN[SHAPE] = None
    tried = Config("dot", 32, 32)
    assert choose(SHAPE) is None
    with trying({SHAPE: tried}):
        assert choose(SHAPE) == tried
        assert choose(SHAPE._replace(max_rows=4)) == default(SHAPE._replace(max_rows=4))
        with trying({}):
            assert choose(SHAPE) is None
        assert choose(SHAPE) == tried
    assert choose(SHAPE) is None


def test_a_trial_is_that_of_one_thread() -> None:
    found: list[Config | None] = []
    with trying({SHAPE: None}):
        thread = threading.Thread(target=lambda: found.append(choose(SHAPE)))
        thread.start()
        thread.join()
    assert found == [default(SHAPE)]


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        (SHAPE._replace(max_rows=7), None),
        (SHAPE._replace(out_size=0), None),
        (SHAPE, Config("dot", 0, 64)),
        (SHAPE, Config("dot", 512, 64)),
        (SHAPE, Config("dot", 32, 48)),
        (SHAPE, Config("dot", 32, 1024)),
        (SHAPE, Config("dot", 32, 64, 3)),
        (SHAPE, Config("dot", 32, 64, 4, 99)),
        (SHAPE, Config("dot", 32, 64, 4, 4, 64)),
        (SHAPE._replace(is_gated=True), Config("dot", 32, 64, 4, 4, 2)),
        (SHAPE, Config("vector", 3, 64)),
        (SHAPE, Config("vector", 2, 32)),  # more rows than one need whole rows of W
        (SHAPE._replace(max_rows=1), Config("vector", 2, 64, split_k=2)),
    ],
)
def test_what_cannot_be_launched_is_refused(shape: ProductShape, config: Config | None) -> None:
    with pytest.raises(ValueError, match="is no"):
        check(shape, config)


def test_any_number_of_rows_per_program_of_a_dot_can_be_launched() -> None:
    check(SHAPE, Config("dot", 37, 64, split_k=3))
