"""Chunks beside rounds: gaps keep the bound, prompts advance, and the router learns how long prompts take.

The simulated node of gap_world.py stands for the clock and the device.
"""

from __future__ import annotations

import pytest
from gap_world import FULL, Device, Simulation, with_arrivals
from thinned import halved

from baton.decode_node.chunk_length import (
    DEFAULT_GAP,
    MAX_AHEAD,
    QUEUE_S,
    RARE,
    Alone,
    ChunkBudget,
    ChunkRoom,
    ChunksAlone,
    PromptTokens,
    Queue,
)
from baton.decode_node.round_clock import RoundSeconds
from baton.engine.pace.draft_length import NO_DRAFTS
from baton.engine.pace.mixed_sizes import MAX_PROMPTS, MixedSizes, mixed_sizes
from baton.engine.pace.step_times import KEPT, ChunkCosts
from baton.engine.work import BatchRow

FORWARDS = {"one forward each": 0.005, "one forward for both": 0.0003}


@pytest.mark.parametrize(
    ("forwards", "bound"), halved(FORWARDS, [(7.5, 0.0), (9.0, 0.03), (12.0, 0.1), (20.0, 0.03)]), ids=str
)
def test_99_percent_of_the_gaps_keep_the_operators_bound(forwards: str, bound: tuple[float, float]) -> None:
    """`bound`: in milliseconds, and the noise of the device's times."""
    max_gap_ms, noise = bound
    device = Device(fixed_s=FORWARDS[forwards], noise=noise)
    world = with_arrivals(device, max_gap_ms / 1000, every_s=1.0)
    assert world.late_share(max_gap_ms / 1000) <= 0.01
    assert len(world.waits) > 6, "prompts advance whatever the bound"


def test_a_bound_with_room_gives_prompts_most_of_it() -> None:
    """The bound leaves 5.8 ms, in which one forward for chunk and round computes about 275 tokens."""
    device = Device(fixed_s=0.0003, noise=0.01)
    world = with_arrivals(device, 0.012, every_s=1.0)
    waits = sorted(wait for rid, wait in world.waits.items() if int(rid[1:]) > 6)
    num_steps = 2000 / 275
    assert waits[len(waits) // 2] < 1.5 * (num_steps + 1) * 0.012, waits


def test_without_room_a_full_chunk_runs_beside_one_round_of_many() -> None:
    device = Device(noise=0.0, num_pauses=0.0)
    world = Simulation(device, 0.008)
    world.stream()
    prompt = world.submit(3 * FULL + 1, max_tokens=5)
    assert prompt is not None
    computed: list[int] = []
    for _ in world.run(60.0):
        if not computed or prompt.num_computed != computed[-1]:
            computed.append(prompt.num_computed)
        if prompt.num_generated:
            break
    assert computed[:4] == [0, FULL, 2 * FULL, 3 * FULL]
    assert world.late_share(0.008) <= 1 / RARE
    assert not world.budget.rate(1, 0).has_room and Simulation(device, 0.020).budget.rate(1, 0).has_room


@pytest.mark.parametrize("forwards", FORWARDS)
def test_without_an_operators_bound_the_mean_gap_is_one_and_a_half_rounds(forwards: str) -> None:
    device = Device(fixed_s=FORWARDS[forwards], noise=0.01, num_pauses=0.0)
    world = with_arrivals(device, None, every_s=1.0)
    mean_s, round_s = sum(world.gaps) / len(world.gaps), device.round_s(5)
    assert round_s < mean_s < 1.02 * DEFAULT_GAP * round_s, (mean_s, round_s)
    assert len(world.waits) > 15 and max(list(world.waits.values())[10:]) < 1.5, world.waits
    assert world.budget.rate(4, 0).has_room


def test_without_an_operators_bound_short_prompts_keep_each_gap_within_one_and_a_half_rounds() -> None:
    device = Device(fixed_s=FORWARDS["one forward for both"], noise=0.01, num_pauses=0.0)
    world = with_arrivals(device, None, every_s=0.2, prompt_len=300)
    bound_s = DEFAULT_GAP * device.round_s(8) * 1.05
    assert sum(gap > bound_s for gap in world.gaps) < 0.01 * len(world.gaps)
    waits = list(world.waits.values())[10:]
    assert len(waits) > 50 and max(waits) < 0.2, waits


def test_without_an_operators_bound_a_long_prompt_waits_little_longer_than_for_its_chunks() -> None:
    """Within the bound 8,000 tokens would take 0.4 s."""
    device = Device(fixed_s=FORWARDS["one forward for both"], noise=0.0, num_pauses=0.0)
    world = with_arrivals(device, None, every_s=2.0, prompt_len=8 * FULL)
    waits = list(world.waits.values())[6:]
    chunks_s = sum(device.chunk_s(FULL, depth) for depth in range(0, 8 * FULL, FULL))
    assert sorted(waits)[len(waits) // 2] < chunks_s + 9 * device.round_s(8) + QUEUE_S, (waits, chunks_s)


def test_without_an_operators_bound_a_load_that_the_node_can_serve_does_not_pile_up() -> None:
    """Prompts take half of the time, more than the third that they get beside streams at the default bound."""
    device = Device(noise=0.01)
    per_prompt_s = device.chunk_s(FULL, 1000) * 4
    world = with_arrivals(device, None, every_s=2 * per_prompt_s, prompt_len=4 * FULL, seconds=40.0)
    waits = list(world.waits.values())
    assert sum(waits[-20:]) / 20 < 3.0, waits


def test_a_preempted_sequence_is_computed_again_within_the_bound() -> None:
    device = Device(fixed_s=0.0003, noise=0.0, num_pauses=0.0)
    world = Simulation(device, 0.009)
    for _ in range(3):
        world.stream(prompt_len=3000)
    for _ in world.run(3.0):
        pass
    before = len(world.gaps)
    world.cache.flush()
    world.scheduler.preempt(world.scheduler.running[-1])
    world.cache.flush()
    for _ in world.run(3.0):
        pass
    stalled = max(world.gaps[before:])
    gaps = [gap for gap in world.gaps[before:] if gap != stalled]  # its own, while it was computed
    assert stalled > 0.1, "3,000 tokens took many short chunks"
    assert sum(gap > 0.009 for gap in gaps) <= 0.01 * len(gaps), sorted(gaps)[-20:]


def test_the_rate_for_the_router_follows_the_load() -> None:
    device = Device(fixed_s=0.0003, noise=0.0, num_pauses=0.0)
    world = with_arrivals(device, 0.009, every_s=1.0)
    idle, busy = world.budget.rate(0, 0), world.budget.rate(8, 0)
    assert idle.token_s == pytest.approx(device.token_s, rel=0.3) and idle.has_room
    assert busy.token_s > 2 * idle.token_s and busy.round_s == pytest.approx(device.round_s(8), rel=0.1)
    taken = world.waits[list(world.waits)[-3]]
    num_streams = len(world.scheduler.running)
    expected = world.budget.rate(num_streams, 0)
    assert taken == pytest.approx(expected.fixed_s + 2000 * expected.token_s + expected.round_s, rel=0.35)


@pytest.mark.parametrize("prompt_len", [300, 2000, 8 * FULL])
def test_the_rate_without_an_operators_bound_holds_for_prompts_of_all_lengths(prompt_len: int) -> None:
    """A long prompt gets chunks of full length until its rest takes QUEUE_S."""
    device = Device(fixed_s=FORWARDS["one forward for both"], noise=0.0, num_pauses=0.0)
    world = with_arrivals(device, None, every_s=1.5, prompt_len=prompt_len)
    waits = sorted(list(world.waits.values())[6:])
    rate = world.budget.rate(4, 0)
    assert rate.rest_token_s < 0.4 * rate.token_s and rate.num_paced == pytest.approx(QUEUE_S / rate.token_s, abs=1)
    num_rest = max(0, prompt_len - rate.num_paced)
    expected = rate.fixed_s + (prompt_len - num_rest) * rate.token_s + num_rest * rate.rest_token_s + rate.round_s
    assert waits[len(waits) // 2] == pytest.approx(expected, rel=0.35)


def test_chunks_in_a_row_are_measured_together() -> None:
    chunks = ChunksAlone()
    assert chunks.take() is None
    chunks.add(PromptTokens.of([BatchRow([1] * 30, 0, [1]), BatchRow([1] * 10, 40, [1])]), 5.0)
    chunks.add(PromptTokens(20, 100), 6.0)
    alone = chunks.take()
    assert alone == Alone(PromptTokens(30, (10 * 40 + 20 * 100) // 60), 2, 5.0) and chunks.take() is None
    costs = ChunkCosts({30: 1.0})
    budget = ChunkBudget(costs, RoundSeconds(0.5), 30, None)
    for _ in range(3):
        budget.end_alone(1, 0, alone, 4.5)
    assert costs.seconds(30, 0, is_mixed=False) == pytest.approx(2.0)


SIZES = MixedSizes([size for size in mixed_sizes([1, 2, 4, 8, 16, 32], NO_DRAFTS) if size.num_tokens <= 256])


@pytest.mark.parametrize(
    ("round_s", "max_gap_s", "expected"),
    [
        (0.0068, 0.0102, (256, 1)),  # room for 3.4 ms
        (0.0068, 0.0088, (128, 1)),  # 2.0 ms
        (0.0068, 0.0076, (64, 1)),  # 0.8 ms
        (0.0068, None, (128, 1)),  # one delays the streams by 1.0 ms, two of 64 by 1.2 ms, one of 256 by 2.5 ms
        (0.0068, 0.019, (616, 1)),  # a forward of its own fits in
        (0.0068, 0.0071, (FULL, RARE)),  # nothing does
        (0.0006, None, (128, 1)),  # however short rounds are
    ],
)
def test_chunks_that_share_a_forward_have_the_lengths_that_it_is_prepared_for(
    round_s: float, max_gap_s: float | None, expected: tuple[int, int]
) -> None:
    mixed = {64: 0.0006, 128: 0.001, 256: 0.0025}
    costs = ChunkCosts({16: 0.0045, 256: 0.0075, FULL: 0.0175})
    costs.learn_mixed(lambda num_tokens: mixed[num_tokens], (64, 128, 256))
    budget = ChunkBudget(costs, RoundSeconds(round_s), FULL, max_gap_s, SIZES)
    pace = budget.pace(1, 0, Queue(100))
    assert (pace.num_tokens, pace.every) == expected, pace


@pytest.mark.parametrize(
    ("queue", "max_gap_s", "num_tokens"),
    [
        (Queue(60), None, 64),
        (Queue(100), None, 128),
        (Queue(250), None, 256),  # delays the streams by 5.06 ms; two of 128, which keep 1.5 rounds, by 5.26 ms
        (Queue(1023), None, 256),  # they take 48 ms beside rounds
        (Queue(1100), None, FULL),  # they would take 52 ms
        (Queue(500, depth=4000), None, 256),  # behind a history that was found in a cache
        (Queue(500, depth=600, num_done=600), None, 128),  # the end of such a prompt: as long as the bound allows
        (Queue(1000, depth=3000, num_done=3000), None, FULL),
        (Queue(250), 0.0100, 128),  # the operator's bound comes first
    ],
)
def test_a_chunk_that_shares_a_forward_delays_the_streams_as_little_as_it_can_in_all(
    queue: Queue, max_gap_s: float | None, num_tokens: int
) -> None:
    mixed = {64: 0.00165, 128: 0.00263, 256: 0.00506}  # beside 64 sequences of 8B on an H200
    costs = ChunkCosts({16: 0.00445, 256: 0.00739, FULL: 0.0241})
    costs.learn_mixed(lambda num_tokens: mixed[num_tokens], (64, 128, 256))
    budget = ChunkBudget(costs, RoundSeconds(0.007), FULL, max_gap_s, SIZES)
    pace = budget.pace(1, 0, queue)
    assert (pace.num_tokens, pace.every) == (num_tokens, 1), pace
    assert pace.is_within == (
        0.007 + costs.seconds(num_tokens, 0, is_mixed=pace.is_mixed) <= (max_gap_s or 1.5 * 0.007)
    )


def test_the_rate_is_that_of_the_longest_chunk_within_the_bound() -> None:
    rate = sized_budget(None, 0.004).rate(1, 0)
    assert rate.token_s == pytest.approx((0.004 + 0.001) / 128) and rate.num_paced == int(QUEUE_S / rate.token_s)


def sized_budget(max_gap_s: float | None, round_s: float = 0.0068) -> ChunkBudget:
    """Return a budget that knows the times of both kinds of chunks: apart, 256 tokens take 7.5 ms, mixed 2.5 ms."""
    costs = ChunkCosts({16: 0.0045, 256: 0.0075, FULL: 0.0175})
    costs.learn_mixed(lambda num_tokens: {64: 0.0006, 128: 0.001, 256: 0.0025}[num_tokens], (64, 128, 256))
    return ChunkBudget(costs, RoundSeconds(round_s), FULL, max_gap_s, SIZES)


def test_a_chunk_beside_a_round_without_a_mixed_forward_has_the_length_that_its_own_forward_allows() -> None:
    budget = sized_budget(0.0143)  # leaves 7.5 ms
    assert budget.room(32, 0, Queue(5000)) == ChunkRoom(256, MAX_PROMPTS, is_mixed=True)
    assert budget.room(33, 0, Queue(5000)) == ChunkRoom(256), "no graph holds so many sequences"
    tighter = sized_budget(0.0120)  # leaves 5.2 ms
    assert tighter.room(32, 0, Queue(5000)).num_tokens == 256
    assert tighter.room(33, 0, Queue(5000)).num_tokens == 16 + (256 - 16) * 7 // 30


def test_a_chunk_that_is_scored_has_the_length_that_its_own_forward_allows() -> None:
    budget = sized_budget(0.0120)
    scored = budget.room(8, 0, Queue(5000, is_scored=True))
    assert not scored.is_mixed and scored.num_tokens == budget.room(33, 0, Queue(5000)).num_tokens


def test_each_kind_of_forward_learns_from_its_own_chunks() -> None:
    for num_streams, num_prompts, is_mixed in ((8, MAX_PROMPTS, True), (8, MAX_PROMPTS + 1, False), (33, 1, False)):
        costs = ChunkCosts({16: 0.0045, FULL: 0.0175})
        budget = ChunkBudget(costs, RoundSeconds(0.0068), FULL, 0.0143, SIZES)
        for _ in range(KEPT):
            budget.end_beside(num_streams, 0, PromptTokens(256, 0, num_prompts), 0.0068 + 0.009)
        assert costs.seconds(256, 0, is_mixed=is_mixed) == pytest.approx(0.009)
        assert costs.seconds(256, 0, is_mixed=False) == pytest.approx(0.009 if not is_mixed else 0.007595, abs=1e-5)


@pytest.mark.parametrize(("max_gap_s", "within_s"), [(0.0218, 0.0075), (0.030, 0.0116)])
def test_chunks_before_a_stream_that_starts_keep_the_operators_bound(max_gap_s: float, within_s: float) -> None:
    budget = sized_budget(max_gap_s)
    num_tokens = budget.room(0, 0, Queue(5000)).num_tokens
    assert num_tokens == ChunkCosts({16: 0.0045, 256: 0.0075, FULL: 0.0175}).most_tokens(
        within_s, 0, FULL, is_mixed=False
    )
    assert MAX_AHEAD * within_s + 0.0068 == pytest.approx(max_gap_s)
    assert budget.room(0, 0, Queue(5000, depth=0)).num_prompts is None
    assert sized_budget(None).room(0, 0, Queue(5000)) == ChunkRoom(FULL), "nobody asked for a bound"
    assert sized_budget(0.007).room(0, 0, Queue(5000)) == ChunkRoom(FULL), "nothing fits in"
