"""Which graph serves a batch: the kinds of sampling, and the sizes of buckets."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.engine.graphs import EVERYTHING, FILTERED, GREEDY, KINDS, SAMPLED, covering, graph_sizes
from baton.engine.sampling_state import Needs
from baton.kernels.operations import preferring
from baton.metadata.wire.request import MAX_TOP_LOGPROBS

NUMS = (None, 0, 1, MAX_TOP_LOGPROBS)
ALL = [Needs(*flags, num) for flags in itertools.product((False, True), repeat=6) for num in NUMS]


def does(kind: Needs, needs: Needs) -> bool:
    """Whether a graph of `kind` does every step that `needs` asks for."""
    if not all(has or not wants for has, wants in zip(kind[:-1], needs[:-1], strict=True)):
        return False
    return needs.num_logprobs is None or (kind.num_logprobs is not None and kind.num_logprobs >= needs.num_logprobs)


def test_the_least_kind_that_does_all_that_is_asked_serves_it() -> None:
    for needs in ALL:
        assert covering(needs) == next(kind for kind in KINDS if does(kind, needs)), needs


def test_each_kind_does_all_that_the_one_before_it_does() -> None:
    assert all(does(later, kind) and later != kind for kind, later in itertools.pairwise(KINDS))


@pytest.mark.parametrize(
    ("needs", "kind"),
    [
        (Needs(), GREEDY),
        (Needs(is_random=True), SAMPLED),
        (Needs(is_random=True, ranks=True), FILTERED),
        (Needs(is_random=True, cuts=True), FILTERED),
        (Needs(is_random=True, ranks=True, cuts=True), FILTERED),
        (Needs(penalizes=True), EVERYTHING),
        (Needs(biases=True), EVERYTHING),
        (Needs(bans=True), EVERYTHING),
        (Needs(num_logprobs=0), EVERYTHING),
        (Needs(is_random=True, num_logprobs=MAX_TOP_LOGPROBS), EVERYTHING),
    ],
)
def test_what_one_request_asks_for_decides_the_kind(needs: Needs, kind: Needs) -> None:
    assert covering(needs) == kind


@pytest.mark.parametrize("others", [(), (Needs(),), (Needs(is_random=True), Needs(is_random=True, cuts=True))])
def test_a_batch_is_served_by_a_kind_that_serves_each_of_its_rows(others: tuple[Needs, ...]) -> None:
    for needs in ALL[::7]:
        kind = covering(Needs.any_of([needs, *others]))
        assert all(does(kind, each) for each in (needs, *others))


@pytest.mark.parametrize(
    ("max_running", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (13, [1, 2, 4, 8, 13])]
)
def test_buckets_are_powers_of_two_and_the_largest_batch(max_running: int, sizes: list[int]) -> None:
    kv = torch.zeros(1)
    assert graph_sizes(kv, max_running) == [], "there are no graphs on a CPU"
    with preferring("triton"):
        assert graph_sizes(kv, max_running) == sizes
