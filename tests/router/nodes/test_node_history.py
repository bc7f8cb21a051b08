"""Restarts and losses are counted by node name, also while no node has that name."""

from __future__ import annotations

from baton.router.nodes.node import Node
from baton.router.nodes.node_history import MAX_NAMES, RECENT_S, NodeHistories, NodeHistory

from ..hellos import ClockedRegistry


def node(epoch: str, name: str = "d0") -> Node:
    """Return one process of a node."""
    return ClockedRegistry().join(epoch, name)


def only(histories: NodeHistories) -> NodeHistory:
    (history,) = histories
    return history


def test_a_return_after_a_loss_is_a_restart_and_a_recent_return() -> None:
    histories = NodeHistories()
    first, second = node("first"), node("second")
    histories.joined(first, 0.0)
    histories.departed(first, "closed", 10.0)
    assert only(histories).is_missing(11.0) and not only(histories).is_missing(10.0 + RECENT_S)
    histories.joined(second, 20.0)
    history = only(histories)
    assert history.is_here and not history.is_missing(21.0) and histories.num_restarts("d0") == 1
    assert history.losses == {"closed": 1}
    assert (history.num_returns(21.0), history.num_returns(20.0 + RECENT_S)) == (1, 0)


def test_a_node_that_announced_its_leave_is_neither_lost_nor_missing() -> None:
    histories = NodeHistories()
    first, second = node("first"), node("second")
    histories.joined(first, 0.0)
    histories.departed(first, None, 10.0)
    assert not only(histories).is_missing(11.0) and not only(histories).losses
    histories.joined(second, 20.0)
    assert histories.num_restarts("d0") == 1 and only(histories).num_returns(21.0) == 0


def test_the_same_process_that_joins_again_is_no_restart() -> None:
    histories = NodeHistories()
    same = node("same")
    histories.joined(same, 0.0)
    histories.departed(same, "anew", 10.0)
    histories.joined(same, 20.0)
    assert histories.num_restarts("d0") == 0 and only(histories).losses == {"anew": 1}
    assert histories.num_restarts("unknown") == 0


def test_the_names_that_have_been_absent_for_longest_are_forgotten_first() -> None:
    histories = NodeHistories()
    here = node("e", "here")
    histories.joined(here, 0.0)
    for number in range(MAX_NAMES + 5):
        each = node("e", f"x{number}")
        histories.joined(each, float(number))
        histories.departed(each, "dead", float(number))
    names = [history.node_id for history in histories]
    assert len(names) == MAX_NAMES and names[:2] == ["here", "x6"] and names[-1] == f"x{MAX_NAMES + 4}"
