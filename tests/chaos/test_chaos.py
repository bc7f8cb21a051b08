"""A short seeded set of scenarios in a cluster that speculates: all streams survive, with the tokens of the clean run.

`python tests/chaos/run.py --minutes N --seed S` plays long ones, over all algorithms.
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
    ("flip", "decoding", "decode-0"),
    ("duplicate", "queued", "decode-0"),
    ("page flip", "pulling", "decode-1"),
    ("partition cut", "decoding", "decode-1"),
    ("stop", "pulling", "decode-1"),
    ("kill", "moving", "prefill-0"),  # a decode node dies while it generates, and then the prefill node
)


@pytest.mark.timeout(600)
def test_streams_survive_with_their_tokens(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    answers = known_answers(target)
    rig, tally = Rig(tmp_path / "cluster", target, flags("eagle", target)), Tally()
    try:
        rig.begin()
        check_clean(rig, answers)
        for number, (kind, phase, name) in enumerate(SET):
            result = Play(rig, answers, Scenario(number, 20 + number, kind, phase, name)).run()
            tally.add("eagle", result)
            assert not result.defects, f"{result}\n{rig.tails()}"
        assert {kind for kind, _ in tally.faults} >= {kind for kind, _, _ in SET} - {"stop"}, tally.faults
        rig.end()
    finally:
        rig.abandon()
