"""A bounded run of every fuzz target. Long ones: `python tests/fuzz/run.py --minutes N` (docs/reliability.md)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest
from fuzz_buses import MembershipTarget, RouterTarget
from fuzz_sockets import PagePortTarget, SocketTarget
from fuzz_targets import (
    DECODERS,
    ClientTarget,
    DecoderTarget,
    GpuClientTarget,
    NixlClientTarget,
    RowTarget,
    ServerTarget,
    Target,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton.metadata.handoff.nixl_agents import has_nixl

TARGETS: dict[str, Callable[[], Target]] = {
    **{direction: lambda direction=direction: DecoderTarget(direction) for direction in DECODERS},
    "row": RowTarget,
    "server": ServerTarget,
    "client": ClientTarget,
    "client on a GPU": GpuClientTarget,
    **({"client by NIXL": NixlClientTarget} if has_nixl() else {}),
    "membership": MembershipTarget,
    "router": RouterTarget,
    "sockets": SocketTarget,
    "page port": PagePortTarget,
}


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_that_hypothesis_makes(name: str) -> None:
    """Each example is a short life of a fresh target. hypothesis shrinks a failure to the draws that matter."""

    @settings(
        max_examples=10,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.randoms(use_true_random=False), min_size=1, max_size=6))
    def run(draws: list[random.Random]) -> None:
        target = TARGETS[name]()
        try:
            for rng in draws:
                target.feed(rng)
        except BaseException:  # hypothesis' own, too, when an example grows too long
            with contextlib.suppress(AssertionError):
                target.close()
            raise
        target.close()

    run()


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_one_after_the_other(name: str) -> None:
    """One target takes all inputs, because one input may leave behind what makes the next one fail."""
    target = TARGETS[name]()
    for seed in range(600):
        target.feed(random.Random(seed))
    target.close()
    assert 0 < target.num_accepted < 600, "all were taken, or none: nothing behind the decoder was reached"
