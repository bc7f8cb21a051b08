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


@pytest.mark.timeout(600)
def test_streams_survive_with_their_tokens(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    answers = known_answers(target)
    rig, tally = Rig(tmp_path / "cluster", target, flags("eagle", target), place="mixed"), Tally()
    try:
        rig.begin()
        check_clean(rig, answers)
        for scenario in SET:
            result = Play(rig, answers, scenario).run()
            tally.add("eagle", result)
            assert not result.defects, f"{result}\n{rig.tails()}"
        assert {kind for kind, _ in tally.faults} >= {scenario.kind for scenario in SET} - {"stop"}, tally.faults
        rig.end()
    finally:
        rig.abandon()
