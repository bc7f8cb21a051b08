"""Five kinds of traces, and the regret of each decision that is made by estimates of seconds.

    drafts      time per token beyond that of the best fixed number of draft steps, in rounds without drafts
    gaps        share of the gaps beyond the operator's bound, and the wait of prompts in seconds
    placement   seconds to the first two tokens beyond those of the better role
    retry       relative error of the expected time between two grants

A seed decides everything, and nothing here reads a clock. `python tests/support/oracles/estimate_traces.py SEEDS`
prints the means: compare them before and after a change of an estimator.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adaptive_world import Machine, World
from gap_world import Device, with_arrivals

from baton.prefill_node.chunk_length import ChunkSeconds
from baton.router.nodes.prompt_role import EstimateError, PromptTimes, handoff_estimate
from baton.router.placement.prompt_placement import LocalFigures, RemoteFigures, place_sooner
from baton.router.waiting.pace import Pace

TRACES = ("steady", "pause", "new kind of sampling", "change of text", "wrong table")
MACHINES = (
    Machine(1.0, 0.15, 0.001, call=0.3, row_missed=0.005),  # waits for weights
    Machine(4.0, 0.75, 0.2, call=1.0, row_missed=0.25),  # a CPU
    Machine(1.0, 0.5, 0.01, call=3.0, row_missed=0.02, beside=2.5),  # a small model on a GPU
)


def drafts(trace: str, seed: int) -> float:
    """Let nodes choose their draft steps, and return the mean regret over machines, batches and rates."""
    changes: dict[str, dict[str, Any]] = {
        "pause": {"pauses": 0.03},
        "new kind of sampling": {"factors": (1.0, 1.5)},
        "wrong table": {"wrong": (0.6, 1.6)[seed % 2]},
    }
    found: list[float] = []
    for machine, batch, rate in itertools.product(MACHINES, (1, 8), (0.1, 0.5, 0.9)):
        noisy = replace(machine, noise=0.05, **changes.get(trace, {}))
        rates = (rate, 0.5 * rate) if trace == "change of text" else (rate,)
        world = World(noisy, lambda stream, _, rates=rates: rates[stream // 8 % len(rates)], batch, seed=seed)
        best = statistics.mean(1 / machine.best_speed(batch, each) for each in rates)
        found.append(1 / world.run(1024) - best)
    return statistics.mean(found)


def gaps(trace: str, seed: int) -> tuple[float, float]:
    """Let a node compute prompts beside streams within a bound of 14 ms. Return the share of late gaps and the mean
    wait."""
    changes: dict[str, dict[str, Any]] = {
        "pause": {"num_pauses": 0.006},
        "new kind of sampling": {"turns": (1.0, 1.3)},
        "change of text": {"drafts": (0, 3)},
        "wrong table": {"wrong": (0.6, 1.6)[seed % 2]},
    }
    lates: list[float] = []
    waits: list[float] = []
    for fixed_s in (0.005, 0.0003):  # a forward each for chunk and round, or one for both
        device = Device(fixed_s=fixed_s, noise=0.03, random=random.Random(seed), **changes.get(trace, {}))
        world = with_arrivals(device, 0.014, every_s=1.0, seconds=20.0)
        lates.append(world.late_share(0.014))
        waits += world.waits.values()
    return statistics.mean(lates), statistics.mean(waits)


def placement(trace: str, seed: int, num_prompts: int = 1500) -> float:
    """Let a router choose between a prefill node and a decode node, and return the mean regret."""
    rng, now, regrets = random.Random(seed), 0.0, list[float]()
    rate, handoffs = ChunkSeconds(), handoff_estimate()
    rate.observe(4000, 0.08)
    errors = {"remote": EstimateError(), "local": EstimateError()}
    told = PromptTimes((0.5 if seed % 2 else 2.0) * 4e-5 if trace == "wrong table" else 4e-5, 0.004)
    due: deque[tuple[float, str, float | None, float]] = deque()
    for number in range(num_prompts):
        now += rng.expovariate(10.0)
        while due and due[0][0] <= now:
            _, where, expected_s, actual_s = due.popleft()
            if expected_s is not None:
                errors[where].observe(expected_s, actual_s, now)
        phase = number // 100 % 2
        round_s = 0.012 if trace == "new kind of sampling" and phase else 0.006
        longest = 400 if trace == "change of text" and phase else 3000
        num_tokens, num_queued = rng.randint(16, longest), rng.choice((0, 0, 500))
        # chunks take longer than nodes expect beside streams
        real = {
            "remote": 0.003 + 2e-5 * (num_tokens + num_queued) + (0.02 + round_s) / 2,
            "local": 1.3 * (0.004 + 4e-5 * num_tokens) + 1.5 * round_s,
        }
        for where in real:
            real[where] *= math.exp(rng.gauss(0.0, 0.1)) * (10 if trace == "pause" and rng.random() < 0.03 else 1)
        times = PromptTimes(rate.token_s, rate.fixed_s)
        remote = RemoteFigures(num_queued, num_tokens, times, handoffs.mean, round_s, errors["remote"].factor(now))
        local = LocalFigures(0, num_tokens, told, round_s, True, 2, 64, 10_000, 10, errors["local"].factor(now))
        place = place_sooner([remote], [local]).place
        actual_s = real[place.where]
        regrets.append(actual_s - min(real.values()))
        due.append((now + actual_s, place.where, place.expected_s, actual_s))
        if place.where == "remote":
            rate.observe(num_tokens, (0.003 + 2e-5 * num_tokens) * math.exp(rng.gauss(0.0, 0.05)))
            handoffs.observe(0.02 * math.exp(rng.gauss(0.0, 0.3)) * (10 if rng.random() < 0.02 else 1))
    return statistics.mean(regrets)


def retry(trace: str, seed: int) -> float:
    """Let a full group learn the time between grants, and return the mean relative error of the next one."""
    rng, pace, now, wrong = random.Random(seed), Pace(), 0.0, list[float]()
    pace.blocked(now)
    for number in range(2000):
        phase = number // 200 % 2
        real = 0.1 * (1.5 if trace == "new kind of sampling" and phase else 1.0)
        real *= 2.0 if trace == "change of text" and phase else 1.0
        if trace == "wrong table" and number == 0:  # requests that began together end together
            now += 5.0
        now += rng.gammavariate(4.0, real / 4) * (10 if trace == "pause" and rng.random() < 0.03 else 1)
        pace.granted(now)
        wrong.append(abs(math.log(max(1e-9, pace.wait_s(0)) / real)))
    return statistics.mean(wrong)


DECISIONS: dict[str, Callable[[str, int], float | tuple[float, float]]] = {
    "drafts": drafts,
    "gaps": gaps,
    "placement": placement,
    "retry": retry,
}


def regret(decision: str, trace: str, num_seeds: int) -> tuple[float, ...]:
    """Return the mean regret of a decision in so many traces of a kind."""
    found = [DECISIONS[decision](trace, seed) for seed in range(num_seeds)]
    rows = [each if isinstance(each, tuple) else (each,) for each in found]
    return tuple(statistics.mean(column) for column in zip(*rows, strict=True))


if __name__ == "__main__":
    for decision, trace in itertools.product(sys.argv[2:] or DECISIONS, TRACES):
        means = " ".join(f"{each:.5f}" for each in regret(decision, trace, int(sys.argv[1])))
        print(f"{decision:10} {trace:22} {means}", flush=True)
