"""Which graph serves a batch: the kinds of sampling, and the sizes of buckets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.engine import graphs
from baton.engine.graphs import EVERYTHING, GREEDY, KINDS, SAMPLED, SCORED, covering, graph_sizes
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
        (Needs(is_random=True, ranks=True), SAMPLED),
        (Needs(is_random=True, cuts=True), SAMPLED),
        (Needs(is_random=True, ranks=True, cuts=True), SAMPLED),
        (Needs(penalizes=True), EVERYTHING),
        (Needs(biases=True), EVERYTHING),
        (Needs(bans=True), EVERYTHING),
        (Needs(num_logprobs=0), SCORED),
        (Needs(is_random=True, cuts=True, num_logprobs=MAX_TOP_LOGPROBS), SCORED),
        (Needs(penalizes=True, num_logprobs=1), EVERYTHING),
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


class StandIn:
    """A graph whose replay notes its key."""

    def __init__(self, replayed: list[str], name: str) -> None:
        self.replay = lambda: replayed.append(name)


class Block:
    """Inputs of a bucket."""

    num_seqs = 2

    def copy_(self, other: object) -> None: ...

    def fill_with_padding(self, padding: int) -> None: ...


def test_a_step_whose_graph_has_no_memory_runs_without_one_and_tries_no_capture_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran, replayed, tried = list[Needs](), list[str](), list[str]()

    def captured(run: Callable[[], str], pool: object) -> tuple[StandIn, str]:
        result = run()
        tried.append(result)
        if result == "EVERYTHING":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return StandIn(replayed, result), result

    def run(inputs: object, step: int, needs: Needs) -> str:
        ran.append(needs)
        return "EVERYTHING" if needs == EVERYTHING else "SAMPLED"

    monkeypatch.setattr(graphs, "captured", captured)
    block: Any = Block()
    owner = graphs.RoundGraphs("rounds", run, [block], 3, None)
    for _ in range(3):
        assert owner.replay(block, 1, EVERYTHING) == "EVERYTHING"
        assert owner.replay(block, 1, SAMPLED) == "SAMPLED"
    assert tried == ["EVERYTHING", "SAMPLED"] and replayed == ["SAMPLED"] * 3
    assert ran.count(EVERYTHING) == 1 + 3  # a try, and the three steps
    [record] = caplog.records
    assert "no memory for a graph of rounds of 2 sequences" in record.message


def test_a_step_without_memory_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(inputs: object, step: int, needs: Needs) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "captured", lambda run, pool: run())
    block: Any = Block()
    owner = graphs.RoundGraphs("rounds", run, [block], 3, None)
    with pytest.raises(torch.OutOfMemoryError):
        owner.replay(block, 1, SAMPLED)
