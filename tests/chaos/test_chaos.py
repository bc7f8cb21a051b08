"""A few fault scenarios in a cluster that speculates: every stream ends with the tokens of a run without faults.

`python tests/chaos/run.py --minutes N --seed S` runs many more, with all algorithms.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from models import flags, known_answers, make_target
from play import Play
from rig import Rig
from run import check_clean
from scenarios import Scenario
from tally import Tally

pytestmark = pytest.mark.integration

SET = (
    Scenario(0, 20, "flip", "decoding", "decode-0"),
    Scenario(1, 21, "duplicate", "queued", "decode-0"),
    Scenario(2, 27, "page flip", "pulling", "decode-1"),  # with this seed, the first page that a node pulls is damaged
    Scenario(3, 23, "partition cut", "decoding", "decode-1"),
    Scenario(4, 24, "stop", "pulling", "decode-1"),
    Scenario(5, 25, "kill", "moving", "prefill-0"),  # a decode node dies first, while it generates
)


# in a cluster where prefill-1 and decode-1 have two ranks
RANK_SET = (
    Scenario(0, 22, "page flip", "pulling", "decode-1"),
    Scenario(1, 31, "rank kill", "pulling", "decode-1"),  # with this seed, at the first page that a rank has pulled
    Scenario(2, 37, "rank kill", "pulling", "prefill-1"),  # and here at the first pull that comes
    Scenario(3, 26, "partition cut", "pulling", "decode-1"),
    Scenario(4, 25, "rank stop", "decoding", "prefill-1"),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_streams_survive_with_their_tokens(num_ranks: int, tmp_path: Path) -> None:
    target = make_target(tmp_path)
    answers = known_answers(target)
    scenarios, place, transport = (SET, "mixed", "auto") if num_ranks == 1 else (RANK_SET, "remote", "zmq")
    node_flags = [*flags("eagle", target), "--transport", transport]
    rig, tally = Rig(tmp_path / "cluster", target, node_flags, place=place, num_ranks=num_ranks), Tally()
    try:
        rig.begin()
        check_clean(rig, answers)
        for scenario in scenarios:
            result = Play(rig, answers, scenario).run()
            tally.add("eagle", result)
            assert not result.defects, f"{result}\n{rig.tails()}"
        assert {kind for kind, _ in tally.faults} >= {each.kind for each in scenarios} - {"stop"}, tally.faults
        kills = [each for each in scenarios if each.kind == "rank kill"]
        assert tally.faults["rank kill", "pulling"] == len(kills), tally.faults
        rig.end()
    finally:
        rig.abandon()
