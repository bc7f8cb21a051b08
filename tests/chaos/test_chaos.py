"""A few fault scenarios in a cluster that speculates, and whose target has tail pages: every stream ends with the
tokens of a run without faults.

`python tests/chaos/run.py --minutes N --seed S` runs many more, with all algorithms.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drawn_places import Place
from host_rig import TRANSPORTS, HostRig, flags_of
from models import flags, known_answers, make_target
from network import reason_against
from play import Play
from rig import Rig, Sharing
from run import check_clean
from scenarios import RANKS, Scenario
from streams import Known
from tally import Tally
from thinned import is_whole

from baton.metadata.handoff.nixl_agents import has_nixl

SET = (
    Scenario(0, 20, "flip", "decoding", "decode-0"),
    Scenario(1, 21, "duplicate", "queued", "decode-0"),
    Scenario(2, 27, "page flip", "pulling", "decode-1"),  # with this seed, the first page that a node pulls is damaged
    Scenario(3, 23, "partition cut", "decoding", "decode-1"),
    Scenario(4, 24, "stop", "pulling", "decode-1"),
    Scenario(5, 25, "kill", "moving", "prefill-0"),  # a decode node dies first, while it generates
)


# in a cluster where prefill-1 and decode-1 have two ranks, with --tp; in the gate, tests/integration/test_ranks.py
# kills a rank while streams run, and test_one_wrong_byte_of_one_rank_is_caught damages its pages
RANK_SET = (
    Scenario(0, 22, "page flip", "pulling", "decode-1"),
    Scenario(1, 31, "rank kill", "pulling", "decode-1"),  # with this seed, at the first page that a rank has pulled
    Scenario(2, 42, "rank kill", "pulling", "prefill-1"),  # and here at the first pull that comes
    Scenario(3, 26, "partition cut", "pulling", "decode-1"),
    Scenario(4, 25, "rank stop", "decoding", "prefill-1"),
)


# the same with --dp-attention
OWN_RANK_SET = (
    Scenario(0, 41, "rank kill", "decoding", "decode-1"),
    Scenario(1, 42, "rank stop", "prefilling", "prefill-1"),
    Scenario(2, 43, "partition cut", "pulling", "decode-1"),
)


# with keys, and pages beside the data links
SEALED_SET = (
    Scenario(0, 51, "flip", "pulling", "decode-0"),
    Scenario(1, 52, "page flip", "pulling", "decode-1"),
    Scenario(2, 53, "drop", "pulling", "decode-0"),
    Scenario(3, 54, "duplicate", "pulling", "decode-1"),
    Scenario(4, 55, "partition cut", "pulling", "decode-0"),
    Scenario(5, 56, "partition held", "pulling", "decode-1"),
    Scenario(6, 57, "kill", "pulling", "prefill-0"),
    Scenario(7, 58, "stop", "pulling", "prefill-1"),
)


# pages that NIXL reads: faults while they are on the way
NIXL_SET = (
    Scenario(0, 61, "page flip", "pulling", "decode-1"),
    Scenario(1, 62, "partition cut", "pulling", "decode-0"),
    Scenario(2, 63, "stop", "pulling", "prefill-1"),
    Scenario(3, 64, "kill", "pulling", "prefill-0"),
    Scenario(4, 65, "stop", "pulling", "decode-1"),
    Scenario(5, 66, "kill", "pulling", "decode-0"),
)


# two routers share the nodes: what one of them loses, the other one answers, and its own streams go on
ROUTERS_SET = (
    Scenario(0, 71, "router kill", "decoding", "decode-0"),
    Scenario(1, 72, "router stop", "pulling", "decode-0"),
    Scenario(2, 73, "partition cut", "decoding", "decode-1"),
    Scenario(3, 74, "kill", "decoding", "decode-1"),
    Scenario(4, 75, "router restart", "queued", "decode-0"),
    Scenario(5, 76, "storm", "preempted", "decode-0"),
    Scenario(6, 77, "router kill", "queued", "decode-0"),
)


# host memory, files and loans
TIERS_SET = (
    Scenario(0, 81, "file flip", "preempted", "decode-0"),
    Scenario(1, 82, "file full", "preempted", "decode-0"),
    Scenario(2, 83, "evict", "borrowing", "decode-0"),
    Scenario(3, 84, "kill", "borrowing", "decode-0"),
    Scenario(4, 85, "drop", "borrowing", "decode-1"),
    Scenario(5, 86, "file gone", "moving", "decode-1"),
    Scenario(6, 87, "restart", "borrowing", "prefill-0"),
    Scenario(7, 88, "storm", "preempted", "decode-0"),
)


# each process on a host of its own, with two routers
HOSTS_SET = (
    Scenario(0, 81, "partition cut", "pulling", "decode-0"),
    Scenario(1, 82, "partition hole", "pulling", "prefill-0"),
    Scenario(2, 83, "partition lossy", "decoding", "decode-1"),
    Scenario(3, 84, "router kill", "decoding", "decode-0"),
    Scenario(4, 85, "kill", "pulling", "prefill-0"),
    Scenario(5, 86, "stop", "pulling", "decode-1"),
    Scenario(6, 87, "page flip", "pulling", "decode-0"),
)


class Case(NamedTuple):
    """A cluster, and what happens in it."""

    scenarios: tuple[Scenario, ...]
    place: Place
    transport: str
    num_ranks: int = 1
    sharing: Sharing = "tp"
    has_keys: bool = False
    num_routers: int = 1
    has_tiers: bool = False
    has_hosts: bool = False


CASES = {
    # in the gate, tests/integration/test_lost_messages.py sends messages twice
    "one-rank": Case(SET if is_whole() else tuple(each for each in SET if each.kind != "duplicate"), "mixed", "auto"),
    "tiers": Case(TIERS_SET, "mixed", "auto", has_tiers=True),
    "sealed": Case(SEALED_SET, "remote", "aes", has_keys=True),
    "nixl": Case(NIXL_SET, "remote", "nixl"),
    "routers": Case(ROUTERS_SET, "mixed", "auto", num_routers=2),
    **{
        f"hosts-{each}": Case(HOSTS_SET, "mixed", each, has_keys=True, num_routers=2, has_hosts=True)
        for each in TRANSPORTS
    },
    "tp": Case(RANK_SET, "remote", "zmq", num_ranks=2),
    "dp-attention": Case(OWN_RANK_SET, "mixed", "auto", num_ranks=2, sharing="dp-attention"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model"), has_tails=True)


@pytest.fixture(scope="module")
def answers(target: Path) -> dict[str, Known]:
    return known_answers(target)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.whole] * (name != "one-rank")) for name, case in CASES.items()],
)
def test_streams_survive_with_their_tokens(case: Case, target: Path, answers: dict[str, Known], tmp_path: Path) -> None:
    if case.transport == "nixl" and not has_nixl():
        pytest.skip("needs nixl-cu13 or nixl-cu12")
    scenarios, tally = case.scenarios, Tally()
    if case.has_hosts and (reason := reason_against()):
        pytest.skip(reason)
    node_flags = [*flags("eagle", target), *flags_of(case.transport)]
    more: dict[str, Any] = {"num_ranks": case.num_ranks, "sharing": case.sharing, "has_keys": case.has_keys}
    more |= {"place": case.place, "num_routers": case.num_routers, "has_tiers": case.has_tiers}
    rig = (HostRig if case.has_hosts else Rig)(tmp_path / "cluster", target, node_flags, **more)
    try:
        rig.begin()
        check_clean(rig, answers)
        for scenario in scenarios:
            result = Play(rig, answers, scenario).run()
            tally.add("eagle", result)
            assert not result.defects, f"{result}\n{rig.tails()}"
        assert {kind for kind, _ in tally.faults} >= {each.kind for each in scenarios} - {"stop", "storm"}, tally.faults
        strikes = Counter((each.kind, each.phase) for each in scenarios if each.kind in RANKS)
        assert strikes <= tally.faults, (strikes, tally.faults)
        rig.end()
    finally:
        rig.abandon()
