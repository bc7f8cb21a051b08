"""Columns of ids, seeds of choices, and the prompts that a model can compute."""

from __future__ import annotations

import pytest

from baton.metadata.errors import RequestError
from baton.metadata.wire.request import (
    ChunkTimes,
    GenerationRequest,
    SamplingParams,
    Unit,
    add_bounded,
    choice_seed,
    pack_ids,
    unpack_ids,
)


def request(prompt: list[int], received: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        prompt_ids=pack_ids(prompt), params=SamplingParams(max_tokens=1), received_ids=pack_ids(received)
    )


def test_ids_are_little_endian_int32_and_read_back() -> None:
    assert pack_ids([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert unpack_ids(pack_ids([0, 2**31 - 1])) == [0, 2**31 - 1]


def test_malformed_columns_of_ids_are_refused() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError):
        unpack_ids(b"abc")
    with pytest.raises(ValueError, match="3 and 0 bytes are not int32 columns"):
        GenerationRequest(prompt_ids=b"abc", params=SamplingParams(max_tokens=1))


def test_each_choice_has_its_own_seed() -> None:
    seeds = [choice_seed(7, choice) for choice in range(64)]
    assert seeds[0] == 7 and len(set(seeds)) == 64 and all(0 <= seed < 2**63 for seed in seeds)


def test_ids_are_read_within_context_and_vocabulary() -> None:
    assert request([3, 4], (5,)).token_ids(6, 3) == ([3, 4], [5])


@pytest.mark.parametrize(
    ("prompt", "received", "words"),
    [
        ([], (), "a prompt of 0 tokens is outside what this node computes: 1 to 3 tokens"),
        ([1, 2], (3, 4), "a prompt of 4 tokens is outside what this node computes: 1 to 3 tokens"),
        ([1, 6], (), "a prompt has token ids 1 to 6, but the vocabulary has 6 tokens"),
        ([1], (-1,), "a prompt has token ids -1 to -1, but the vocabulary has 6 tokens"),
    ],
)
def test_prompts_that_a_model_cannot_run_are_refused_with_the_value(
    prompt: list[int], received: tuple[int, ...], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        request(prompt, received).token_ids(6, 3)


def test_a_unit_is_printed_with_choice_and_attempt() -> None:
    assert str(Unit("cmpl-1", 2, 3)) == "cmpl-1/2.3"


@pytest.mark.parametrize("count", [1, 4, 5, 6, 23, 1000])
def test_a_full_list_joins_neighbours(count: int) -> None:
    items: list[ChunkTimes] = []
    for place in range(count):
        add_bounded(items, ChunkTimes(1, place, 0.25, 0.5), most=4)
        assert len(items) <= 4
    assert sum(item.num_chunks for item in items) == count
    assert sum(item.num_tokens for item in items) == count * (count - 1) // 2
    assert sum(item.waited_s + item.compute_s for item in items) == 0.75 * count


def test_a_list_within_its_bound_keeps_every_entry() -> None:
    items: list[ChunkTimes] = []
    for place in range(4):
        add_bounded(items, ChunkTimes(1, place, 0.0, float(place)), most=4)
    assert items == [ChunkTimes(1, place, 0.0, float(place)) for place in range(4)]
