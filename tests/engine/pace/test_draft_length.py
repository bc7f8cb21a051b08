"""The choice of draft steps: it finds the fastest, and pays a bounded price for what it does not know yet.

The last part simulates nodes. Its limits: a node may lose FIRST_BALANCE rounds, 2.5, in its life and SHARE of the
time, 0.5 %, and as much for measuring. So it loses less than 2 % of its first 256 rounds, plus what one round can lose.
Noise of 15 % per round and a wrong table add to that until the node has seen some rounds of each kind. Adaptive
drafting must reach nine tenths of the best fixed K if that is 1.5 times as fast as no drafting and the table is right.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
from dataclasses import replace

import pytest
from adaptive_world import Machine, World
from thinned import thinned

from baton.engine.pace.draft_length import FIRST_BALANCE, DraftShape, StepChooser
from baton.engine.pace.step_times import KEPT, MEMORY, SHARE, StepTimes

CHEAP = (1.0, 0.15, 0.001)  # a machine that waits for weights
DEAR = (1.0, 0.1, 1.0)  # one that computes every row


def run(
    chooser: StepChooser, times: StepTimes, rate: float, num_seqs: int, num_rounds: int, seed: int = 0
) -> tuple[list[int], float]:
    """Return the steps of each round, and tokens per second. A draft is right with `rate`."""
    rng, chosen, seconds, tokens = random.Random(seed), [], 0.0, 0
    slots = list(range(num_seqs))
    for _ in range(num_rounds):
        steps = 0 if chooser.rests() else chooser.choose(slots, [chooser.shape.num_steps] * num_seqs)
        accepted = [next((i for i in range(steps) if rng.random() > rate), steps) for _ in slots]
        took = times.seconds(num_seqs, steps)
        if not chooser.passes_over(steps):
            chooser.observe(slots, steps, [steps] * num_seqs, accepted, took)
        chosen.append(steps)
        seconds += took
        tokens += sum(accepted) + num_seqs
    return chosen, tokens / seconds


def make(times: tuple[float, float, float]) -> tuple[StepChooser, StepTimes]:
    return StepChooser(DraftShape(5), Machine(*times).table(), 16), Machine(*times).table()


def begin(chooser: StepChooser, times: StepTimes, num_seqs: int = 1) -> None:
    """Let a chooser observe the rounds without drafts with which a node begins."""
    slots = list(range(num_seqs))
    for _ in range(KEPT):
        assert not chooser.rests()
        assert chooser.choose(slots, [5] * num_seqs) == 0
        chooser.observe(slots, 0, [0] * num_seqs, [0] * num_seqs, times.seconds(num_seqs, 0))


def test_what_was_never_tried_is_tried() -> None:
    chooser, real = make(CHEAP)
    begin(chooser, real)
    assert chooser.choose([0], [5]) == 5


def test_it_keeps_to_a_choice_and_measures_for_a_small_share_of_the_time() -> None:
    chooser, real = make(CHEAP)
    chosen, speed = run(chooser, real, 0.9, 4, 1000)
    tokens, took = sum(0.9**i for i in range(6)), real.seconds(4, 5) / real.seconds(4, 0)
    assert chosen.count(5) > 900 and chosen.count(4) + chosen.count(5) > 980, "four steps are nearly as good"
    assert speed > 0.985 * 4 * tokens / real.seconds(4, 5)
    assert 1 < chosen[KEPT:].count(0) <= 1 + SHARE / 2 * 1000 * tokens / (tokens / took - 1), chosen


def test_measuring_is_frequent_where_it_costs_little() -> None:
    """Drafts that bring hardly anything are compared with rounds without them again and again."""
    counts = []
    for rate in (0.9, 0.2):
        chooser, real = make(CHEAP)
        chosen, _ = run(chooser, real, rate, 8, 500)
        assert any(chosen)
        counts.append(chosen[KEPT:].count(0))
    assert counts[1] > 3 * counts[0] > 0, counts


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("machine", [CHEAP, DEAR])
def test_no_more_is_lost_than_the_bound(machine: tuple[float, float, float], rate: float) -> None:
    """Whatever the estimate promises: here it always believes in drafts."""
    chooser, real = make(machine)
    chooser._rates = lambda slots: ([0.99] * len(slots), [0.0] * len(slots))
    num_rounds = 400
    chosen, speed = run(chooser, real, rate, 4, num_rounds)
    took = [real.seconds(4, steps) / real.seconds(4, 0) for steps in chosen]
    lost = sum(took) * (1 - speed * real.seconds(4, 0) / 4)
    assert any(chosen), "nothing was tried"
    assert lost < FIRST_BALANCE + SHARE * sum(took) + max(took) - 1, (lost, chosen)


def test_nothing_is_drafted_while_the_account_is_empty() -> None:
    """Not even by those who are sure to gain."""
    chooser, real = make(CHEAP)
    begin(chooser, real)
    for _ in range(40):
        chooser.observe([0], 1, [1], [1], real.seconds(1, 1))
    chooser.balance = -1.0
    assert chooser.choose([0], [5]) == 0
    chooser.balance = 0.01
    assert chooser.choose([0], [5]) > 0


def test_it_rests_until_the_account_can_bear_a_try() -> None:
    chooser, real = make(CHEAP)
    begin(chooser, real)
    chooser.balance = 0.0
    assert chooser.choose([0], [5]) == 0
    loss = real.seconds(1, 1) / real.seconds(1, 0) - 1
    rests = next(i for i in itertools.count() if not chooser.rests())
    assert rests == min(MEMORY, math.ceil(loss / SHARE)) - 1
    assert chooser.choose([0], [5]) == 0
    chooser.admit(3)
    assert not chooser.rests(), "a new sequence ends the rest"


def test_the_time_of_catching_up_is_learnt_and_counts() -> None:
    chooser, real = make(CHEAP)
    begin(chooser, real)
    for _ in range(60):
        chooser.observe([0], 0, [0], [0], real.seconds(1, 0))
        chooser.observe([0], 1, [1], [1], real.seconds(1, 1) + 3.0, num_caught_up=20)
    assert chooser.times.catch_up_seconds(20) == pytest.approx(3.0, rel=0.1)
    assert chooser.times.catch_up_seconds(200) > chooser.times.catch_up_seconds(20)
    assert chooser.times.catch_up_seconds(0) == 0.0 < chooser.times.catch_up_seconds(1)
    assert chooser.times.seconds(1, 1) == pytest.approx(real.seconds(1, 1), rel=0.02)
    chooser.balance = 1.0
    assert chooser.choose([0], [5], 2000) == 0
    assert chooser.choose([0], [5], 0) > 0


def test_it_tries_again_once_drafts_are_better() -> None:
    chooser, real = make(CHEAP)
    chosen, _ = run(chooser, real, 0.0, 2, 400)
    assert 0 < sum(chosen[100:]) <= 20, chosen  # some tries
    chosen, _ = run(chooser, real, 0.95, 2, 1200)
    assert 5 in chosen[-2:], chosen[-50:]  # the other one measures


def test_a_table_that_is_wrong_about_many_steps_is_found_out() -> None:
    real = Machine(*CHEAP).table()
    table = {(size, k): real.seconds(size, k) * (1.8 if k == 5 else 1.0) for size in (1, 4, 16) for k in (0, 1, 5)}
    chosen, _ = run(StepChooser(DraftShape(5), StepTimes(table), 16), real, 0.9, 4, 1200)
    assert chosen[:50].count(5) < 10 and chosen[-100:].count(5) > 80, chosen


def test_a_table_that_is_wrong_about_few_steps_is_found_out() -> None:
    """A disturbance made rounds of one step look as slow as those of five, so five looked best."""
    real = {0: 6.76, 1: 8.4, 2: 9.8, 3: 11.3, 4: 13.1, 5: 14.98}  # ms, 64 sequences
    table = {(size, steps): ms for size in (1, 4, 16) for steps, ms in ((0, 4.3), (1, 8.0), (5, 8.0))}
    chooser = StepChooser(DraftShape(5), StepTimes(table), 64)
    times = StepTimes({(size, steps): ms for size in (1, 64) for steps, ms in real.items()})
    chosen, _ = run(chooser, times, 0.6, 64, 400)
    assert statistics.mean(chosen[300:]) < 3.5, chosen
    assert chosen[:50].count(5) > 20, "the table said so"


def test_each_kind_of_sampling_has_times_of_its_own() -> None:
    """Rounds with drafts of one kind take three times as long as the table says. The other kind goes on drafting."""
    chooser, real = make(CHEAP)
    chosen: dict[str, list[int]] = {"greedy": [], "dear": []}
    for number in range(1200):
        kind = ("greedy", "dear")[number // 40 % 2]
        if number % 40 == 0:
            chooser.wake()
        steps = 0 if chooser.rests() else chooser.choose([0, 1], [5, 5], kind=kind)
        took = real.seconds(2, steps) * (3.0 if kind == "dear" and steps else 1.0)
        if not chooser.passes_over(steps):
            chooser.observe([0, 1], steps, [steps] * 2, [min(steps, 2)] * 2, took, kind=kind)
        chosen[kind].append(steps)
    assert [chosen[kind][:KEPT] for kind in chosen] == [[0] * KEPT] * 2, "each begins without drafts"
    assert sum(steps > 0 for steps in chosen["greedy"][-200:]) > 150, chosen["greedy"]
    assert sum(steps > 0 for steps in chosen["dear"][-200:]) < 30, chosen["dear"]


def test_sequences_differ() -> None:
    """One whose drafts are right is not held back by another's, and a new one in a slot starts anew."""
    chooser, real = make(CHEAP)
    begin(chooser, real, 2)
    for _ in range(60):
        chooser.observe([0, 1], 5, [5, 5], [5, 0], 1.8)
    assert chooser.acceptance(0) > 0.9 > 0.3 > chooser.acceptance(1)
    assert chooser.choose([0], [5]) == 5
    chooser.admit(1)
    assert chooser.acceptance(1) == pytest.approx(chooser.acceptance(15))


def test_drafts_that_others_looked_up_count_as_tries() -> None:
    chooser, real = make(CHEAP)
    begin(chooser, real)
    before = chooser.balance
    for _ in range(30):
        chooser.learn(0, 0, 6)
    assert chooser.choose([0], [5]) == 0, "all of them were wrong"
    for _ in range(90):
        chooser.learn(0, 6, 6)
    assert chooser.choose([0], [5]) > 0
    assert chooser.balance == before, "looking up costs the device nothing"


def test_optimism_is_as_large_as_pessimism() -> None:
    chooser, _ = make(CHEAP)
    assert chooser._rates([0]) == ([1.0], [0.0]), "nothing is known"
    chooser.learn(0, 300, 400)
    [most], [least] = chooser._rates([0])
    assert least == chooser.acceptance(0) == pytest.approx(0.75, abs=0.02)
    assert 0 < most - least < 0.01


def test_not_more_than_anybody_can_use() -> None:
    chooser, real = make(CHEAP)
    begin(chooser, real, 2)
    assert 0 < chooser.choose([0, 1], [2, 1]) <= 2
    assert chooser.choose([0, 1], [0, 0]) == 0


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    shape = DraftShape(5, 2, 12)
    chooser = StepChooser(shape, Machine(*CHEAP).table(), 16)
    chosen, _ = run(chooser, Machine(*CHEAP).table(), 0.8, 2, 50)
    assert set(chosen) <= {0, 5} and 5 in chosen
    assert chooser.choose([0], [3]) in (0, 5)


def test_a_slow_start_is_forgotten() -> None:
    """The first rounds with drafts compile kernels; that must not speak against drafts for good."""
    chooser, real = make(CHEAP)
    begin(chooser, real)
    for _ in range(2):
        chooser.observe([0], 5, [5], [4], 100.0)
    chosen, _ = run(chooser, real, 0.9, 1, 2000)
    assert sum(each == 5 for each in chosen[-100:]) > 90, chosen


def test_a_round_whose_time_is_not_known_counts_by_what_is_expected() -> None:
    """The time of a burst of arrivals spoils neither the table nor the account; what was accepted counts."""
    chooser, real = make(CHEAP)
    begin(chooser, real)
    before, rate, balance = chooser.times.seconds(1, 5), chooser.acceptance(0), 0.0
    chooser.balance = balance
    chooser.observe([0], 5, [5], [5], None, None)
    assert chooser.times.seconds(1, 5) == before
    assert chooser.acceptance(0) > rate
    assert chooser.balance == pytest.approx(balance + 6 - (1 - SHARE) * before / chooser.times.seconds(1, 0), abs=0.01)
    for _ in range(2):
        chooser.observe([0], 5, [5], [0], 100 * before)
    assert chooser.times.seconds(1, 5) > before


# --- simulated nodes ---

MACHINES = {
    "waits for weights": Machine(1.0, 0.15, 0.001, call=0.3, row_missed=0.005),
    "computes every row": Machine(1.0, 0.1, 1.0, call=0.3, row_missed=0.3),
    "CPU": Machine(4.0, 0.75, 0.2, call=1.0, row_missed=0.25),
    "GPU, catching up breaks the overlap": Machine(1.0, 0.12, 0.002, call=1.0, row_missed=0.005),
    "GPU, a small model: catching up takes many rounds": Machine(1.0, 0.25, 0.02, call=3.0, row_missed=0.02),
    "GPU, a small model: the node's own work is the most": Machine(
        1.0, 0.5, 0.01, call=3.0, row_missed=0.02, beside=2.5
    ),
    "n-grams": Machine(4.0, 0.05, 0.2, has_draft_kv=False),
}
NOISE = {"noise": 0.15, "pauses": 0.01}
ACCEPTANCE = (0.0, 0.2, 0.5, 0.75, 0.9)


def test_the_first_256_tokens_lose_two_percent_at_most() -> None:
    """On machines whose rounds take nearly equal times, as a GPU's, for any batch and drafter."""
    for (name, each), batch, rate in itertools.product(MACHINES.items(), (1, 8, 32), (0.0, 0.3, 0.6)):
        machine = replace(each, noise=0.02, pauses=0.01)
        world = World(machine, lambda stream, token, rate=rate: rate, batch, length=256, seed=batch)
        one_round = max(machine.seconds(batch, 5) / machine.seconds(batch, 0) - 1, machine.catch_up_seconds(4 * batch))
        assert world.run(256) > 0.98 - one_round / 256, (name, batch, rate)


@pytest.mark.parametrize("name", thinned(MACHINES, lambda i, _: i % 2 == 0))
def test_not_slower_than_without_drafts_and_near_the_best(name: str) -> None:
    """Unless BATON_WHOLE_MATRIX=1, with noise or without it: every two of batch, rate and noise meet."""
    seeds = itertools.count()
    for batch, rate, noise in itertools.product((1, 8, 32), ACCEPTANCE, ({}, NOISE)):
        if ((batch == 8) + ACCEPTANCE.index(rate) + bool(noise)) % 2 and "BATON_WHOLE_MATRIX" not in os.environ:
            continue
        machine, laters = replace(MACHINES[name], **noise), list[float]()
        for _ in range(3):
            world = World(machine, lambda stream, token, rate=rate: rate, batch, seed=next(seeds))
            first, later = world.run(128), world.run(896)
            laters.append(later)
            assert first > 0.92, (batch, rate, noise, first)
            assert 1024 / (128 / first + 896 / later) > 0.98, (batch, rate, noise, first, later)
        best = machine.best_speed(batch, rate)
        assert statistics.median(laters) > 0.9 * best or best < 1.5, (batch, rate, noise, laters, best)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("wrong", [{"wrong": 0.6}, {"wrong_plain": 1.4}, {"wrong": 1.6}], ids=str)
def test_a_wrong_table_costs_little(name: str, wrong: dict[str, float]) -> None:
    machine = replace(MACHINES[name], **NOISE, **wrong)
    for seed, (batch, rate) in enumerate(itertools.product((1, 8), (0.0, 0.2, 0.6))):
        world = World(machine, lambda stream, token, rate=rate: rate, batch, seed=seed)
        assert world.run(128) > 0.9, (batch, rate)
        assert world.run(896) > 0.97, (batch, rate)


@pytest.mark.parametrize("name", MACHINES)
def test_texts_that_change(name: str) -> None:
    """Acceptance changes in mid text, and from one text to the next."""

    def in_mid_text(stream: int, token: int) -> float:
        return (0.9, 0.0, 0.5)[(token // 60) % 3]

    def from_text_to_text(stream: int, token: int) -> float:
        return (0.9, 0.0)[(stream // 8) % 2]

    machine = replace(MACHINES[name], **NOISE)
    for seed, (batch, text) in enumerate(itertools.product((1, 8), (in_mid_text, from_text_to_text))):
        world = World(machine, text, batch, length=192, seed=seed)
        world.run(192)
        assert world.run(768) > 0.98, (batch, text.__name__)


@pytest.mark.parametrize("name", MACHINES)
def test_contexts_that_grow(name: str) -> None:
    """Rounds take twice as long after 1,000 of them, with and without drafts."""
    machine = replace(MACHINES[name], **NOISE, growth=1.0)
    for seed, (batch, rate) in enumerate(itertools.product((1, 8), (0.0, 0.9))):
        world = World(machine, lambda stream, token, rate=rate: rate, batch, length=1024, seed=seed)
        world.run(256)
        later, best = world.run(768), machine.best_speed(batch, rate)
        assert later > 0.97 and (later > 0.85 * best or best < 1.5), (batch, rate, later, best)


@pytest.mark.parametrize("name", MACHINES)
def test_kinds_of_sampling_that_take_turns(name: str) -> None:
    """Rounds of the second kind take half as long again, with and without drafts."""
    machine = replace(MACHINES[name], **NOISE, factors=(1.0, 1.5))
    for seed, (batch, rate) in enumerate(itertools.product((1, 8), (0.0, 0.2, 0.9))):
        world = World(machine, lambda stream, token, rate=rate: rate, batch, length=256, seed=seed)
        first, later = world.run(256), world.run(768)
        assert first > 0.95 and later > 0.97, (batch, rate, first, later)


@pytest.mark.parametrize("disturbed", list(itertools.product((1, 4, 16), (0, 1, 5))), ids=str)
def test_a_disturbance_while_the_table_was_measured(disturbed: tuple[int, int]) -> None:
    """Something else ran on the device, as a prefill node that starts beside this one, when rounds of one kind were
    measured: drafts are made all the same. Times of Llama-3.1-8B with an EAGLE-3 head on an H200."""
    machine = Machine(4.4e-3, 0.65e-3, 1e-6, call=1.3e-3, row_missed=0.09e-3, noise=0.02)

    def measured(size: int, steps: int) -> float:
        return machine.seconds(size, steps) * (2.0 if (size, steps) == disturbed else 1.0)

    for batch in (1, 8, 32):
        world = World(machine, lambda stream, token: 0.6, batch, length=256)
        world.chooser.times = StepTimes.measure(measured, 16, range(6))
        world.run(256)
        later, best = world.run(512), machine.best_speed(batch, 0.6)
        assert later > 0.85 * best, (batch, later, best)


def test_the_world_sees_a_loss() -> None:
    """Steps that are fixed, in a world where they do not pay."""
    world = World(MACHINES["CPU"], lambda stream, token: 0.2, 8, fixed_steps=5)
    assert world.run(128) < 0.6
    assert set(world.chosen) <= {0, 1, 2, 3, 4, 5} and 5 in world.chosen
