"""The choice of two nodes of both roles for a request."""

from __future__ import annotations

from baton.deploy.simulation.pair_choice import BothFigures, Pair, choose_pair
from baton.router.prompt_placement import LocalFigures, PromptTimes

HANDOFF_S = 0.006


def figures(num_running: int = 0, num_queued: int = 0, round_s: float = 0.005, share: float = 0.0) -> BothFigures:
    """Return the figures of a node for a prompt of 1,000 tokens."""
    times = PromptTimes(50e-6 if num_running else 25e-6, 0.004)
    local = LocalFigures(num_queued, 1000, times, round_s, True, num_running, 256, 1000, 100)
    return BothFigures(local, round_s, share, 25e-6)


def test_an_idle_node_has_both_roles_unless_the_handoff_is_shorter_than_a_round() -> None:
    """A node that computes a prompt for itself needs a round for the first token."""
    assert choose_pair([figures(), figures()], 100, 0.03) == Pair(0, 0)
    assert choose_pair([figures(), figures()], 100, HANDOFF_S) == Pair(1, 0)


def test_the_prompt_is_computed_where_no_streams_wait_and_the_sequence_joins_them() -> None:
    """Until rounds beside the streams take longer than those on a node that is busy with prompts."""
    streams = figures(num_running=20, round_s=0.0052)
    assert choose_pair([figures(share=0.3), streams], 500, HANDOFF_S) == Pair(0, 1)
    slow = figures(num_running=200, round_s=0.015)
    assert choose_pair([figures(share=0.3), slow], 500, HANDOFF_S) == Pair(0, 0)


def test_a_queue_of_prompts_is_passed_on_to_the_node_with_the_streams() -> None:
    streams = figures(num_running=4)
    assert choose_pair([figures(num_queued=8000, share=0.9), streams], 500, HANDOFF_S) == Pair(1, 1)


def test_a_longer_answer_counts_more() -> None:
    """A short one stays on the node that is free for the prompt."""
    busy, streams = figures(share=0.5), figures(num_running=8, round_s=0.0055)
    assert choose_pair([busy, streams], 2, HANDOFF_S) == Pair(0, 1)
    assert choose_pair([figures(share=0.05), figures(num_running=8, round_s=0.0099)], 2, HANDOFF_S) == Pair(0, 0)


def test_a_full_node_has_neither_role() -> None:
    full = figures(num_running=256)
    assert choose_pair([full, figures(num_queued=100_000)], 2, HANDOFF_S) == Pair(1, 1)
    assert choose_pair([full, full], 2, HANDOFF_S) is None
    assert choose_pair([], 2, HANDOFF_S) is None
